"""The steps as charts: gathered into columns few enough for a page, whatever their number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiled_engine_debug.report.text import count_text, seconds_text
from compiled_engine_debug.steps import Steps

MODES = ("full", "piecewise", "bucket", "eager")
"""Modes of steps, in the order in which charts pile them up."""

MAX_COLUMNS = 1500
HEIGHT = 100  # units of a chart from bottom to top
_SHOWN_REQUESTS = 8

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Mark:
    """A filled outline (SVG path data). ``style``: its class in the page."""

    style: str
    path: str


@dataclass(frozen=True)
class Chart:
    """One chart. Paths are ``HEIGHT`` units high and as many wide as there are columns; ``top``: what its top means."""

    name: str
    title: str
    top: str
    height: int
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class Timeline:
    """All charts, and what is said of a column when it is chosen: ``columns``, plain data for the page's script."""

    num_steps: int
    steps_per_column: int
    num_columns: int
    modes: tuple[tuple[str, int], ...]
    charts: tuple[Chart, ...]
    columns: dict[str, Any]


def timeline_of(steps: Steps, max_columns: int = MAX_COLUMNS) -> Timeline | None:
    """The charts of ``steps``, in ``max_columns`` columns at most; None without steps."""
    if not len(steps):
        return None
    per_column = -(-len(steps) // max_columns)
    columns = _Columns(steps, np.arange(0, len(steps), per_column))
    return Timeline(
        num_steps=len(steps),
        steps_per_column=per_column,
        num_columns=len(columns.begins),
        modes=tuple((mode, int((steps.mode == mode).sum())) for mode in MODES if (steps.mode == mode).any()),
        charts=columns.charts(),
        columns=columns.to_json(),
    )


class _Columns:
    """Sums over runs of steps; column ``i`` begins with the step at ``begins[i]``."""

    def __init__(self, steps: Steps, begins: NDArray[np.int64]) -> None:
        self.steps, self.begins = steps, begins
        self.sizes = np.diff(np.append(begins, len(steps)))
        self.real = np.add.reduceat(steps.num_tokens, begins)
        self.padded = np.add.reduceat(steps.num_padded_tokens, begins)
        self.seconds = np.add.reduceat(steps.seconds, begins)
        self.slowest = np.maximum.reduceat(steps.seconds, begins)
        in_mode = [steps.mode == mode for mode in MODES]
        self.mode_steps = [np.add.reduceat(chosen.astype(np.int64), begins) for chosen in in_mode]
        self.mode_tokens = [np.add.reduceat(np.where(chosen, steps.num_tokens, 0), begins) for chosen in in_mode]

    def charts(self) -> tuple[Chart, ...]:
        """From the top of the page to its bottom."""
        return self._tokens(), self._padding(), self._modes(), self._times()

    def to_json(self) -> dict[str, Any]:
        """Of every column its sums, and one step in full: the one with most padding, the first of these."""
        wasted = self.steps.num_padded_tokens - self.steps.num_tokens
        ends = np.append(self.begins[1:], len(self.steps))
        shown = [
            begin + int(np.argmax(wasted[begin:end]))
            for begin, end in zip(self.begins.tolist(), ends.tolist(), strict=True)
        ]
        return {
            "first": self.steps.index[self.begins].tolist(),
            "last": self.steps.index[ends - 1].tolist(),
            "start": np.round(self.steps.start[self.begins], 4).tolist(),
            "tokens": self.real.tolist(),
            "padded": self.padded.tolist(),
            "seconds": self.seconds.tolist(),
            "slowest": self.slowest.tolist(),
            "modes": {mode: counts.tolist() for mode, counts in zip(MODES, self.mode_steps, strict=True)},
            "shown": [self._shown_step(position) for position in shown],
        }

    def _shown_step(self, position: int) -> dict[str, Any]:
        step = self.steps[position]
        return {
            "index": step.index,
            "mode": step.mode,
            "key": step.key,
            "reason": step.reason,
            "tokens": step.num_tokens,
            "padded": step.num_padded_tokens,
            "num_requests": step.num_requests,
            "requests": [list(share) for share in step.requests[:_SHOWN_REQUESTS]],
        }

    def _tokens(self) -> Chart:
        most = float((self.padded / self.sizes).max())
        tops = [(mode, counts / self.sizes) for mode, counts in zip(MODES, self.mode_tokens, strict=True)]
        tops.append(("padding", (self.padded - self.real) / self.sizes))
        title = "tokens per step, by mode; padding on top (square-root scale)"
        top = f"top: {count_text(round(most))} tokens, half: {count_text(round(most / 4))}"
        return Chart("tokens", title, top, 150, _piled(tops, most, np.sqrt))

    def _padding(self) -> Chart:
        share = (self.padded - self.real) / np.maximum(self.padded, 1)
        return Chart(
            "padding", "share of padding in what was computed", "top: 100%", 56, _piled([("padding", share)], 1.0)
        )

    def _modes(self) -> Chart:
        tops = [(mode, counts / self.sizes) for mode, counts in zip(MODES, self.mode_steps, strict=True)]
        return Chart("modes", "how steps ran", "full height: all steps", 28, _piled(tops, 1.0))

    def _times(self) -> Chart:
        most = float(self.slowest.max()) or 1.0
        marks = (
            Mark("area", _outline(self.slowest / most)),
            Mark("line", _top_line(self.seconds / self.sizes / most)),
        )
        title = "seconds per step: line, the mean; area, the slowest"
        return Chart("seconds", title, f"top: {seconds_text(most)}", 90, marks)


def _piled(
    series: Sequence[tuple[str, FloatArray]], most: float, scale: Callable[[FloatArray], FloatArray] = np.positive
) -> tuple[Mark, ...]:
    """One mark for each series that is not all zero, piled up in order and painted from the highest down.

    ``scale``: from shares of ``most`` to heights, both from 0 to 1.
    """
    total = np.zeros_like(series[0][1])
    marks = []
    for style, values in series:
        total = total + values
        if values.any():
            marks.append(Mark(style, _outline(scale(total / (most or 1.0)))))
    return tuple(reversed(marks))


def _outline(shares: FloatArray) -> str:
    """The area below ``shares``, each from 0 to 1 and one unit wide."""
    return f"M0 {HEIGHT}{_stairs(shares)}V{HEIGHT}Z"


def _top_line(shares: FloatArray) -> str:
    return f"M0 {_heights(shares)[0]}{_stairs(shares)}"


def _stairs(shares: FloatArray) -> str:
    """Up or down to each height, then across; runs of one height are one line."""
    heights = _heights(shares)
    ends = [column for column in range(1, len(heights)) if heights[column] != heights[column - 1]]
    return "".join(f"V{heights[end - 1]}H{end}" for end in [*ends, len(heights)])


def _heights(shares: FloatArray) -> list[str]:
    return [f"{HEIGHT * (1 - share):.4g}" for share in shares.tolist()]
