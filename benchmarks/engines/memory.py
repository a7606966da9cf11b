"""Peak memory of this process and of the processes that it started."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def peak_memory() -> int:
    """Bytes: the most that this process has held, plus the same for each of its living descendants.

    An engine may do its work in processes of its own. Pages that several of them map are counted in each.

    VmHWM belongs to the program that runs now. ``ru_maxrss``, the way out elsewhere, also counts what the parent held
    before it started this program, and knows no children.
    """
    if Path("/proc/self/status").exists():
        return sum(_peak_of(process) for process in [Path("/proc/self"), *_descendants()])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _peak_of(process: Path) -> int:
    for line in _read(process / "status").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0  # a process that has just ended has no memory any more


def _descendants() -> list[Path]:
    found: list[Path] = []
    open_ends = [Path("/proc/self")]
    while open_ends:
        tasks = (open_ends.pop() / "task").glob("*/children")
        children = [Path("/proc") / number for path in tasks for number in _read(path).split()]
        found += children
        open_ends += children
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""  # the process ended meanwhile
