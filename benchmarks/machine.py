"""What a measurement was made on."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any


def describe_machine(threads: int) -> dict[str, Any]:
    """Processor, threads, system and Python, for a report."""
    return {"cpu": cpu_name(), "threads": threads, "system": platform.platform(), "python": platform.python_version()}


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
