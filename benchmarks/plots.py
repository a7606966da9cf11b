"""Line plots as inline SVG, and the page that holds them: plain HTML, readable in light and in dark mode."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 340
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 16, 48
LEGEND_LINE = 18
COLOURS = ("#2f7ed8", "#e0662b", "#2e9e5b", "#a855c7", "#c69214")
STEPS = (1, 2, 5)
MOST_TICKS = 7

STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1e293b; --faint: #94a3b84d; }
@media (prefers-color-scheme: dark) { :root { --page: #14181f; --ink: #d9e0ea; } }
body { background: var(--page); color: var(--ink); font: 15px/1.5 sans-serif; }
body { max-width: 1180px; margin: 2em auto; padding: 0 1em; }
figure { display: inline-block; margin: 0 1em 2em 0; vertical-align: top; max-width: 100%; }
figcaption { font-weight: bold; margin-bottom: .3em; }
svg.plot { max-width: 100%; height: auto; font-size: 12px; fill: var(--ink); }
svg.plot .grid { stroke: var(--faint); stroke-width: 1; }
svg.plot .frame { stroke: var(--ink); stroke-width: 1; fill: none; }
svg.plot .line { fill: none; stroke-width: 2; }
"""


@dataclass(frozen=True)
class Series:
    """One line: its name in the legend and its points (x, y) in order of x."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """log: logarithmic; its values must be positive then. ticks: where to put marks; None: at round numbers. A linear
    axis begins at zero unless ``from_zero`` says otherwise."""

    label: str
    log: bool = False
    ticks: Sequence[float] | None = None
    from_zero: bool = True


@dataclass(frozen=True)
class Scale:
    """Values from ``low`` to ``high`` on pixels from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def place(self, value: float) -> float:
        low, high, here = (math.log(number) if self.log else number for number in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (here - low) / (high - low)


def line_plot(x_axis: Axis, y_axis: Axis, series: Sequence[Series]) -> str:
    """The plot as an ``<svg>`` element for ``page``. Raises ``ValueError`` without points or where a logarithmic axis
    has a value that is not positive."""
    height = HEIGHT + LEGEND_LINE * len(series)
    x_scale = fit([x for line in series for x, _ in line.points], x_axis, LEFT, WIDTH - RIGHT)
    y_scale = fit([y for line in series for _, y in line.points], y_axis, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg class="plot" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">',
        *x_marks(x_axis, x_scale),
        *y_marks(y_axis, y_scale),
        f'<path class="frame" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>',
    ]
    for index, line in enumerate(series):
        parts += line_parts(line, COLOURS[index % len(COLOURS)], x_scale, y_scale)
        parts += legend_entry(line.name, COLOURS[index % len(COLOURS)], HEIGHT + LEGEND_LINE * index)
    return "\n".join([*parts, "</svg>"])


def page(title: str, introduction: str, figures: Sequence[tuple[str, str]]) -> str:
    """A whole HTML document. figures: caption, and markup such as ``line_plot`` returns."""
    lines = [
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n<p>{escape(introduction)}</p>",
    ]
    lines += [f"<figure><figcaption>{escape(caption)}</figcaption>\n{markup}</figure>" for caption, markup in figures]
    return "\n".join([*lines, "</body>\n</html>", ""])


def fit(values: Sequence[float], axis: Axis, start: float, end: float) -> Scale:
    if not values:
        raise ValueError(f"nothing to show on the axis {axis.label!r}")
    low, high = min(values), max(values)
    if axis.log:
        if low <= 0:
            raise ValueError(f"the axis {axis.label!r} is logarithmic and has the value {low}")
        return Scale(low / 1.1, high * 1.1, start, end, True)
    low = min(low, 0) if axis.from_zero else low
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1
    return Scale(low if axis.from_zero else low - room, high + room, start, end, False)


def ticks_of(axis: Axis, scale: Scale) -> list[float]:
    if axis.ticks is not None:
        return [tick for tick in axis.ticks if scale.low <= tick <= scale.high]
    return log_ticks(scale) if axis.log else linear_ticks(scale)


def linear_ticks(scale: Scale) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    magnitude = 10.0 ** math.floor(math.log10((scale.high - scale.low) / MOST_TICKS))
    step = next(size for size in (*(factor * magnitude for factor in STEPS), 10 * magnitude) if fits(size, scale))
    return [index * step for index in range(math.ceil(scale.low / step), math.floor(scale.high / step) + 1)]


def fits(step: float, scale: Scale) -> bool:
    return (scale.high - scale.low) / step <= MOST_TICKS


def log_ticks(scale: Scale) -> list[float]:
    """Powers of ten, and twice and five times these where that is not too much."""
    decades = range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high)) + 1)
    fine, coarse = (
        [tick for power in decades for factor in factors if scale.low <= (tick := factor * 10.0**power) <= scale.high]
        for factors in (STEPS, (1,))
    )
    return fine if len(fine) <= MOST_TICKS + 2 or len(coarse) < 2 else coarse


def tick_label(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def x_marks(axis: Axis, scale: Scale) -> Iterator[str]:
    for tick in ticks_of(axis, scale):
        x = scale.place(tick)
        yield f'<path class="grid" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>'
        yield text(x, HEIGHT - BOTTOM + 16, tick_label(tick), "middle")
    yield text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM + 36, axis.label, "middle")


def y_marks(axis: Axis, scale: Scale) -> Iterator[str]:
    for tick in ticks_of(axis, scale):
        y = scale.place(tick)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
        yield text(LEFT - 6, y + 4, tick_label(tick), "end")
    middle = (TOP + HEIGHT - BOTTOM) / 2
    yield f'<g transform="rotate(-90 14 {middle:.1f})">{text(14, middle, axis.label, "middle")}</g>'


def line_parts(line: Series, colour: str, x_scale: Scale, y_scale: Scale) -> Iterator[str]:
    places = [(x_scale.place(x), y_scale.place(y)) for x, y in line.points]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    yield f'<path class="line" stroke="{colour}" d="M{path}"/>'
    for (x, y), (x_value, y_value) in zip(places, line.points, strict=True):
        hint = escape(f"{line.name}: {tick_label(x_value)}, {y_value:.4g}")
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{hint}</title></circle>'


def legend_entry(name: str, colour: str, y: float) -> Iterator[str]:
    yield f'<path class="line" stroke="{colour}" d="M{LEFT} {y:.1f}h24"/>'
    yield text(LEFT + 32, y + 4, name, "start")


def text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
