"""``compiled-engine-debug startup``: two or more starts side by side."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_engine.cli.common import EXIT_OK

if TYPE_CHECKING:
    from compiled_engine.compile.ledger import Phase
    from compiled_engine_debug.startup import Row, Start

_EPILOG = """\
FILE is a recording, a bundle, or what --ledger-json wrote. Seconds of a phase include those of the phases inside it,
which are indented. Differences are to the first file.

examples:
  compiled-engine-debug startup run.jsonl
  compiled-engine-debug startup cold.jsonl warm.jsonl
  compiled-engine-debug startup cold.json warm.json --json
"""


def add_command(commands: Any) -> None:
    """Add the subcommand's parser to ``commands``."""
    parser = commands.add_parser(
        "startup",
        help="compare the phases of starts",
        description="Compare where the time of two or more starts went, phase by phase.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_run)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="a recording, a bundle or a ledger")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _run(arguments: argparse.Namespace) -> int:
    from compiled_engine_debug.startup import compare_starts, read_start, to_json

    starts = [read_start(path) for path in arguments.files]
    rows = compare_starts(starts)
    if arguments.json:
        print(json.dumps(to_json(starts, rows), indent=1))
    else:
        _print(starts, rows)
    return EXIT_OK


def _print(starts: Sequence[Start], rows: Sequence[Row]) -> None:
    from compiled_engine_debug.tables import Column, print_table

    names = _short_names([start.name for start in starts])
    header = [Column("phase"), Column(names[0], right=True)]
    for name in names[1:]:
        header += [Column(name, right=True), Column("difference", right=True)]
    header += [Column(f"note, {name}") for name in names]
    shown = [
        ["  " * row.depth + row.name, *_times([_seconds(phase) for phase in row.phases], row.differences), *_notes(row)]
        for row in rows
    ]
    outside, totals = [start.outside_seconds for start in starts], [start.total_seconds for start in starts]
    for name, numbers in (("outside of phases", outside), ("total", totals)):
        shown.append([name, *_times(numbers, [number - numbers[0] for number in numbers[1:]]), *[""] * len(starts)])
    print_table("Seconds of the start", header, shown)
    for name, start in zip(names, starts, strict=True):
        print(f"{name}: {start.kind} start, {start.num_hits} hits, {start.num_misses} misses, {start.name}")


def _times(seconds: Sequence[float | None], differences: Sequence[float | None]) -> list[str]:
    """Of the first start its seconds, of every other one these and the difference."""
    cells = [_number(seconds[0])]
    for second, difference in zip(seconds[1:], differences, strict=True):
        cells += [_number(second), _number(difference, "+")]
    return cells


def _notes(row: Row) -> list[str]:
    return ["" if phase is None or phase.note is None else phase.note for phase in row.phases]


def _seconds(phase: Phase | None) -> float | None:
    return None if phase is None else phase.seconds


def _number(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.3f}"


def _short_names(names: Sequence[str]) -> list[str]:
    """Names of files without their folders, where these tell them apart; else numbered."""
    short = [Path(name).name for name in names]
    return short if len(set(short)) == len(short) else [f"{index} {name}" for index, name in enumerate(short, 1)]
