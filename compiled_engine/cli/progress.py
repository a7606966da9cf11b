"""Progress of long work on stderr: bars on a terminal, a line for each step elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compiled_engine.compile.pipeline import Progress


@contextmanager
def progress_on_stderr(wanted: bool = True) -> Iterator[Progress]:
    """A function that shows progress while the block runs."""
    if not wanted:
        yield lambda what, done, total: None
    elif sys.stderr.isatty():
        with _bars() as report:
            yield report
    else:
        yield _print_line


def _print_line(what: str, done: int, total: int) -> None:
    print(f"[compiled-engine] {what}: {done} of {total}", file=sys.stderr, flush=True)


@contextmanager
def _bars() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    # Library chatter and log lines go to sys.stderr, which rich then keeps above the bars.
    with Bars(*columns, console=Console(file=sys.stderr), redirect_stdout=False) as bars:

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield report
