"""Bar charts as one self-contained SVG file: a panel for each quantity, a bar for each engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from catalogue import OURS
from figures import Figure, number

COLUMNS = 3
PANEL_WIDTH = 330
NAME_WIDTH = 112
VALUE_WIDTH = 52
BAR_HEIGHT = 14
BAR_PITCH = 20
HEADING = 44
MARGIN = 16
OUR_COLOUR, THEIR_COLOUR = "#c2410c", "#94a3b8"


def svg(title: str, panels: Sequence[Figure]) -> str:
    """The whole picture. Each panel has a scale of its own, which begins at zero; its heading says what is better."""
    panel_height = HEADING + max(len(panel.values) for panel in panels) * BAR_PITCH + MARGIN
    rows = -(-len(panels) // COLUMNS)
    width, height = COLUMNS * PANEL_WIDTH + MARGIN, rows * panel_height + 2 * MARGIN + BAR_PITCH
    size = f'width="{width}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {size} font-family="sans-serif">',
        f"<title>{escape(title)}</title>",
        f'<rect {size} fill="#ffffff"/>',
        text(MARGIN, MARGIN + 8, title, 'font-size="14" font-weight="bold"'),
        '<g font-size="12">',
    ]
    for index, panel in enumerate(panels):
        left = MARGIN + index % COLUMNS * PANEL_WIDTH
        top = MARGIN + BAR_PITCH + index // COLUMNS * panel_height
        lines += panel_lines(panel, left, top)
    return "\n".join([*lines, "</g>", "</svg>", ""])


def panel_lines(panel: Figure, left: int, top: int) -> Iterator[str]:
    better = "more" if panel.more_is_better else "less"
    yield text(left, top + 20, panel.label, 'font-weight="bold"')
    yield text(left, top + 36, f"{panel.unit}; {better} is better", 'font-size="10" fill="#64748b"')
    room = PANEL_WIDTH - NAME_WIDTH - VALUE_WIDTH - MARGIN
    largest = max((value for value in panel.values.values() if value is not None), default=0) or 1
    for index, (engine, value) in enumerate(panel.values.items()):
        y = top + HEADING + index * BAR_PITCH
        length = room * (value or 0) / largest
        weight = 'font-weight="bold"' if engine.startswith(OURS) else ""
        yield text(left + NAME_WIDTH - 6, y + 11, engine, f'text-anchor="end" {weight}')
        colour = OUR_COLOUR if engine.startswith(OURS) else THEIR_COLOUR
        yield f'<rect x="{left + NAME_WIDTH}" y="{y}" width="{length:.1f}" height="{BAR_HEIGHT}" fill="{colour}"/>'
        yield text(round(left + NAME_WIDTH + length) + 4, y + 11, number(value), weight)


def text(x: int, y: int, words: str, attributes: str = "") -> str:
    return f'<text x="{x}" y="{y}" {attributes}>{escape(words)}</text>'
