"""What instructions this machine's CPU has, by what the kernel says."""

from __future__ import annotations

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def cpu_flags(cpuinfo: Path | None = None) -> frozenset[str]:
    """The flags of the first core in ``cpuinfo`` (default: ``/proc/cpuinfo``), such as ``avx2`` or Arm's ``bf16``.

    Empty where there is no such file, i.e. outside Linux.
    """
    try:
        lines = (cpuinfo if cpuinfo is not None else CPUINFO).read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
