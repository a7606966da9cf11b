"""The ledger: where the time between the start of the process and the first token goes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

_START_TIME_FIELD = 19  # of /proc/self/stat, counted after the command's name


@dataclass(frozen=True)
class Phase:
    """One finished stretch of work.

    start: seconds since the ledger's zero, which is the start of the process where that is known.
    seconds: how long it took. A phase inside another one (``depth`` above 0) is part of that one's seconds.
    num_bytes: bytes that were read, written or allocated, where that says something.
    note: such as "hit", "miss" or "3 of 31 pieces".
    """

    name: str
    start: float
    seconds: float
    num_bytes: int | None = None
    note: str | None = None
    depth: int = 0


@dataclass
class PhaseHandle:
    """A phase that is running; ``num_bytes`` and ``note`` may be set until it ends."""

    name: str
    start: float
    depth: int
    num_bytes: int | None = None
    note: str | None = None
    seconds: float | None = None


class Ledger:
    """Phases of a start, in the order in which they began.

    One thread enters phases; ``add`` may be called from others. Times are seconds since the start of the process, or
    since the ledger was made where the system does not tell when the process started.
    """

    def __init__(self, zero: float | None = None) -> None:
        """zero: reading of ``time.monotonic()`` from which times count; None: the start of the process."""
        self._zero = _process_start() if zero is None else zero
        self._handles: list[PhaseHandle] = []
        self._depth = 0

    @property
    def now(self) -> float:
        """Seconds since the ledger's zero."""
        return time.monotonic() - self._zero

    @contextmanager
    def phase(self, name: str) -> Iterator[PhaseHandle]:
        """Time the block. Blocks may be nested. One that fails is kept, with the note "failed"."""
        handle = PhaseHandle(name, self.now, self._depth)
        self._handles.append(handle)
        self._depth += 1
        try:
            yield handle
        except BaseException:
            handle.note = "failed" if handle.note is None else f"{handle.note}, failed"
            raise
        finally:
            self._depth -= 1
            handle.seconds = self.now - handle.start

    def add(
        self,
        name: str,
        seconds: float,
        *,
        start: float | None = None,
        num_bytes: int | None = None,
        note: str | None = None,
    ) -> None:
        """Note a stretch that was timed elsewhere, inside the phases that are running now.

        start: seconds since the ledger's zero; None: it ends now.
        """
        begin = max(0.0, self.now - seconds) if start is None else start
        self._handles.append(PhaseHandle(name, begin, self._depth, num_bytes, note, seconds))

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases that have ended, in the order in which they began or were added."""
        return tuple(
            Phase(handle.name, handle.start, handle.seconds, handle.num_bytes, handle.note, handle.depth)
            for handle in list(self._handles)
            if handle.seconds is not None
        )

    @property
    def total_seconds(self) -> float:
        """Seconds from the ledger's zero to the end of the phase that ended last; 0 without phases."""
        return max((phase.start + phase.seconds for phase in self.phases), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data: ``{"total_seconds": ..., "phases": [{"name": ..., "start": ..., ...}, ...]}``."""
        return {"total_seconds": self.total_seconds, "phases": [asdict(phase) for phase in self.phases]}

    def table(self) -> Table:
        """The phases as a rich table; ``str(ledger)`` is the same as plain text."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title="Start-up", title_justify="left", caption_justify="left")
        table.add_column("phase", overflow="fold")
        for name in ("start", "seconds", "size"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("note", overflow="fold")
        phases = self.phases
        for phase in phases:
            table.add_row(*map(Text, _cells(phase)), end_section=phase is phases[-1])
        table.add_row("total", "", _seconds(self.total_seconds), "", "")
        return table

    def __str__(self) -> str:
        rows = [("phase", "start", "seconds", "size", "note"), *map(_cells, self.phases)]
        rows.append(("total", "", _seconds(self.total_seconds), "", ""))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        return "\n".join(
            f"{name:<{widths[0]}}  {start:>{widths[1]}}  {seconds:>{widths[2]}}  {size:>{widths[3]}}  {note}".rstrip()
            for name, start, seconds, size, note in rows
        )


def format_bytes(num_bytes: int) -> str:
    """``num_bytes`` with a binary unit, such as "1.5 GiB"."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"


def _cells(phase: Phase) -> tuple[str, str, str, str, str]:
    size = "" if phase.num_bytes is None else format_bytes(phase.num_bytes)
    name = "  " * phase.depth + phase.name
    return name, _seconds(phase.start), _seconds(phase.seconds), size, phase.note or ""


def _seconds(value: float) -> str:
    return f"{value:.3f}"


def _process_start() -> float:
    """Reading of ``time.monotonic()`` when this process started, to 10 ms; now, where the system does not tell."""
    now = time.monotonic()
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[_START_TIME_FIELD])
        # The kernel counts from boot with the time that the machine slept, time.monotonic() without it.
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return now
    return now - age if age >= 0 else now
