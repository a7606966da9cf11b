"""How many threads the CPU kernels get, and how long an idle one waits before it sleeps."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

_SPIN_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
# Rounds of GNU OpenMP's waiting loop, some tens of microseconds. Its own default spins for milliseconds, and a thread
# that spins keeps its core from the kernels, which have threads of their own, and from other processes.
_SPIN_COUNT = "3000"


def limit_spinning(environment: MutableMapping[str, str] | None = None) -> None:
    """Let idle OpenMP threads give up their core soon, unless ``environment`` (None: this process's) says otherwise.

    GNU OpenMP reads it when torch is imported: afterwards it has no effect.
    """
    target = os.environ if environment is None else environment
    if not any(name in target for name in _SPIN_VARIABLES):
        target["GOMP_SPINCOUNT"] = _SPIN_COUNT


def usable_cores(system: Path = Path("/sys")) -> int:
    """Cores that this process may keep busy: its affinity, two hardware threads of a core counting once, and no more
    than the share of time that its control group grants. At least 1.

    ``system``: where the kernel describes cores and control groups.
    """
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    allowed = os.sched_getaffinity(0)
    cores = {_core_of(cpu, system) for cpu in allowed}
    quota = _quota(system)
    return max(1, len(cores) if quota is None else min(len(cores), int(quota)))


def _core_of(cpu: int, system: Path) -> tuple[str, str]:
    topology = system / "devices/system/cpu" / f"cpu{cpu}" / "topology"
    try:
        return (topology / "physical_package_id").read_text().strip(), (topology / "core_id").read_text().strip()
    except OSError:
        return "", str(cpu)


def _quota(system: Path) -> float | None:
    """Cores' worth of time that control groups allow this process; None without a limit."""
    groups = system / "fs/cgroup"
    limits = [_read_quota((groups / "cpu.max").read_text().split())] if (groups / "cpu.max").is_file() else []
    old = groups / "cpu"
    if (old / "cpu.cfs_quota_us").is_file():
        limits.append(_read_quota([(old / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")]))
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def _read_quota(words: list[str]) -> float | None:
    quota, period = words
    return None if quota in ("max", "-1") else int(quota) / int(period)
