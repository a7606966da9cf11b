"""The start as a waterfall: every phase a bar on one scale of time, two starts below each other where there are two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from compiled_engine.compile.ledger import Phase
from compiled_engine_debug.recording import Recording
from compiled_engine_debug.report.text import bytes_text, seconds_text
from compiled_engine_debug.startup import Row, Start, compare_starts

COLD, WARM = "cold", "warm"


@dataclass(frozen=True)
class Bar:
    """One phase of one start. ``left`` and ``width`` in per cent of the scale; ``style``: which start."""

    style: str
    start: float
    seconds: float
    left: float
    width: float
    text: str


@dataclass(frozen=True)
class Line:
    """One phase: a bar for each start that has it. ``notes``: what the starts say of it; ``inside``: its parts."""

    name: str
    depth: int
    bars: tuple[Bar, ...]
    notes: tuple[str, ...]
    inside: tuple[Line, ...]


@dataclass(frozen=True)
class Waterfall:
    """``totals``: style, seconds and text of each start."""

    lines: tuple[Line, ...]
    totals: tuple[tuple[str, float, str], ...]


def waterfall(recording: Recording, warm: Recording | None) -> Waterfall:
    """The start of ``recording``, beside that of ``warm`` where it is given."""
    recordings = [recording] if warm is None else [recording, warm]
    starts = [
        Start(style, item.phases, max((phase.start + phase.seconds for phase in item.phases), default=0.0))
        for style, item in zip((COLD, WARM), recordings, strict=False)
    ]
    scale = max(start.total_seconds for start in starts) or 1.0
    return Waterfall(
        lines=_nested(compare_starts(starts), scale),
        totals=tuple((start.name, start.total_seconds, seconds_text(start.total_seconds)) for start in starts),
    )


def _nested(rows: Sequence[Row], scale: float) -> tuple[Line, ...]:
    """Rows of one depth, each with the deeper rows that follow it inside."""
    return tuple(
        Line(
            name=row.name,
            depth=row.depth,
            bars=tuple(
                _bar(style, phase, scale) for style, phase in zip((COLD, WARM), row.phases, strict=False) if phase
            ),
            notes=tuple(dict.fromkeys(_notes(row))),
            inside=_nested(deeper, scale),
        )
        for row, deeper in _with_deeper(rows)
    )


def _with_deeper(rows: Sequence[Row]) -> Iterator[tuple[Row, Sequence[Row]]]:
    begins = [place for place, row in enumerate(rows) if row.depth <= rows[0].depth]
    ends = [*begins[1:], len(rows)]
    for begin, end in zip(begins, ends, strict=False):
        yield rows[begin], rows[begin + 1 : end]


def _bar(style: str, phase: Phase, scale: float) -> Bar:
    return Bar(
        style=style,
        start=phase.start,
        seconds=phase.seconds,
        left=round(100 * phase.start / scale, 3),
        width=round(100 * phase.seconds / scale, 3),
        text=seconds_text(phase.seconds),
    )


def _notes(row: Row) -> Iterator[str]:
    several = len(row.phases) > 1
    for style, phase in zip((COLD, WARM), row.phases, strict=False):
        if phase is None:
            continue
        size = None if phase.num_bytes is None else bytes_text(phase.num_bytes)
        if texts := [text for text in (phase.note, size) if text]:
            yield f"{style}: {', '.join(texts)}" if several else ", ".join(texts)
