"""What sections hand back, as tables for people and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDTH = 130
_STYLES = {"passed": "green", "failed": "bold red", "error": "bold red", "skipped": "yellow"}


class Verdict(str, Enum):
    """How a section ended."""

    PASSED = "passed"
    FAILED = "failed"
    """It ran, and what it saw is wrong."""
    ERROR = "error"
    """It raised."""
    SKIPPED = "skipped"
    """It did not run; the summary says why."""


@dataclass(frozen=True)
class Outcome:
    """What a section found.

    ``summary``: one line. ``figures``: plain data, with units in the names. ``rows``: plain data with equal keys, the
    section's own table.
    """

    verdict: Verdict
    summary: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Result:
    """The outcome of the section ``name``, and how long it took."""

    name: str
    seconds: float
    outcome: Outcome


def passed_if(faults: Sequence[str], summary: str, **outcome: Any) -> Outcome:
    """An outcome that failed with ``faults``, or passed with ``summary`` where there are none."""
    if faults:
        more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
        return Outcome(Verdict.FAILED, "; ".join(faults[:3]) + more, **outcome)
    return Outcome(Verdict.PASSED, summary, **outcome)


def skipped(why: str) -> Outcome:
    """An outcome of a section that cannot run here."""
    return Outcome(Verdict.SKIPPED, why)


def exit_code(results: Sequence[Result]) -> int:
    """1 when a section failed or raised, else 0."""
    return int(any(result.outcome.verdict in (Verdict.FAILED, Verdict.ERROR) for result in results))


def print_details(result: Result, console: Console) -> None:
    """The section's own table, if it has one."""
    rows = result.outcome.rows
    if not rows:
        return
    table = Table(title=result.name, title_justify="left")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), overflow="fold", justify="left" if _is_text(rows, name) else "right")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row.values()))
    console.print(table)


def print_summary(results: Sequence[Result], console: Console) -> None:
    """One line for every section."""
    table = Table(title="gpu_check", title_justify="left")
    table.add_column("section")
    table.add_column("verdict")
    table.add_column("seconds", justify="right")
    table.add_column("what was seen", overflow="fold")
    for result in results:
        verdict = result.outcome.verdict.value
        table.add_row(
            result.name, Text(verdict, _STYLES[verdict]), f"{result.seconds:.1f}", Text(result.outcome.summary)
        )
    console.print(table)


def new_console() -> Console:
    """Standard output, of a fixed width where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def write_json(path: Path, results: Sequence[Result], heading: Mapping[str, Any]) -> None:
    """Everything, in one file that is replaced as a whole. ``heading``: what else goes to the top."""
    data = {**heading, "exit_code": exit_code(results), "sections": [asdict(result) for result in results]}
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(_plain(data), indent=2, allow_nan=False) + "\n")
    partial.replace(path)


def read_json(path: Path) -> list[Result]:
    """The results that ``write_json`` wrote."""
    sections = json.loads(path.read_text())["sections"]
    return [
        Result(
            item["name"],
            item["seconds"],
            Outcome(**{**item["outcome"], "verdict": Verdict(item["outcome"]["verdict"])}),
        )
        for item in sections
    ]


def _plain(data: Any) -> Any:
    """``data`` with numbers that JSON does not have as text."""
    if isinstance(data, Mapping):
        return {name: _plain(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_plain(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data


def _is_text(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    return any(isinstance(row[name], str) for row in rows)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
