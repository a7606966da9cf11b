"""How much of the machine other processes took while something was measured: a figure is worth less beside them."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
# Fields of the line "cpu": user, nice, system, idle, iowait, irq, softirq, steal. What waits is not busy.
IDLE_FIELDS = (3, 4)
NUM_FIELDS = 8


@dataclass(frozen=True)
class BusyClock:
    """Readings at the start: seconds of all CPUs busy, of this process and its ended children, and of the clock."""

    busy_s: float | None
    own_s: float
    started_at: float

    @classmethod
    def start(cls) -> BusyClock:
        return cls(_busy_seconds(), _own_seconds(), time.monotonic())

    def others_share(self) -> float | None:
        """Share of all CPUs' time since the start that others took, 0 to 1; None where the system does not tell.

        Processes that were started meanwhile must have ended and been waited for, or they count as others. Time that
        a host takes from a virtual machine (steal) counts too.
        """
        busy = _busy_seconds()
        if busy is None or self.busy_s is None:
            return None
        others = busy - self.busy_s - (_own_seconds() - self.own_s)
        available = (time.monotonic() - self.started_at) * (os.cpu_count() or 1)
        return min(max(others / available, 0.0), 1.0)


def _busy_seconds() -> float | None:
    if not STAT.exists():
        return None
    fields = [int(text) for text in STAT.read_text().splitlines()[0].split()[1 : NUM_FIELDS + 1]]
    ticks = sum(fields) - sum(fields[index] for index in IDLE_FIELDS)
    return ticks / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
