"""The machine and the software that the figures belong to."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from typing import Any

import torch

from gpu_checks.lab import Lab
from gpu_checks.report import Outcome, Verdict

_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy")


def check(lab: Lab) -> Outcome:
    """Versions, and the GPU with its driver, memory and compute capability."""
    figures: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "torch_cuda": torch.version.cuda,
        "cpu_cores": os.cpu_count(),
    }
    versions = f"torch {torch.__version__}, triton {figures['packages']['triton']}"
    if not lab.on_gpu:
        return Outcome(Verdict.PASSED, f"no GPU, everything is emulated; {versions}", figures)
    properties = torch.cuda.get_device_properties(lab.device)
    free, total = torch.cuda.mem_get_info(lab.device)
    figures |= {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": total,
        "free_memory_bytes": free,
        "driver": _driver(),
    }
    summary = (
        f"{properties.name}, sm_{properties.major}{properties.minor}, {total / 2**30:.0f} GiB ({free / 2**30:.0f} "
        f"free), driver {figures['driver']}; {versions}"
    )
    return Outcome(Verdict.PASSED, summary, figures)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """The driver's version; None where nvidia-smi does not tell."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return answer.stdout.split("\n")[0].strip() or None
