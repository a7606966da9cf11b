"""Progress of long work on stderr: bars on a terminal, a line for each step elsewhere."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from compiled_engine.compile.pipeline import Progress


@contextmanager
def progress_on_stderr(wanted: bool = True) -> Iterator[Progress]:
    """A function that shows progress while the block runs."""
    if not wanted:
        yield lambda what, done, total: None
    elif sys.stderr.isatty():
        with _bars(sys.stderr) as report:
            yield report
    else:
        yield _print_line


def _print_line(what: str, done: int, total: int) -> None:
    print(f"[compiled-engine] {what}: {done} of {total}", file=sys.stderr, flush=True)


class MessagesAndBars(logging.StreamHandler):  # type: ignore[type-arg]  # generic from Python 3.11 on
    """Writes log messages as lines; on a terminal those that tell progress move a bar instead.

    A bar stays for as long as nothing but progress is told, or until ``end_bars``.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._open = ExitStack()
        self._report: Progress | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Show ``record``."""
        progress = getattr(record, "progress", None)
        if progress is None or not self.stream.isatty():
            self.end_bars()
            super().emit(record)
            return
        if self._report is None:
            self._report = self._open.enter_context(_bars(self.stream))
        what, done, total = progress
        # What is under way counts, as in the lines: the last is not told of when it is done.
        self._report(what, done + 1, total)

    def end_bars(self) -> None:
        """Leave the bars as they are. Later progress begins new ones."""
        self._report = None
        self._open.close()


@contextmanager
def _bars(stream: TextIO) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    # Library chatter and log lines go to sys.stderr, which rich then keeps above the bars.
    with Bars(*columns, console=Console(file=stream), redirect_stdout=False) as bars:

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield report
