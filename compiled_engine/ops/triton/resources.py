"""What a compiled Triton kernel takes of a GPU, read from its machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

import triton


@dataclass(frozen=True)
class Resources:
    """Of one kernel. ``registers``: per thread (AMD: vector registers).   ``shared_bytes``: per program.

    ``spill_bytes``: of local (AMD: scratch) memory per thread, where what does not fit the registers goes.
    ``registers`` and ``spill_bytes`` are None where the tool that tells them is missing.
    """

    registers: int | None
    shared_bytes: int
    spill_bytes: int | None


def resources_of(kernel: Any) -> Resources:
    """``kernel``: what ``warmup`` of a Triton kernel returns."""
    shared_bytes = kernel.metadata.shared
    if "amdgcn" in kernel.asm:
        notes = kernel.asm["amdgcn"]
        scratch_bytes = _number(r"\.private_segment_fixed_size:", notes)
        return Resources(_number(r"\.vgpr_count:", notes), shared_bytes, scratch_bytes)
    usage = _cubin_usage(kernel.asm["cubin"])
    if usage is None:
        return Resources(None, shared_bytes, None)
    return Resources(_number("REG:", usage), shared_bytes, _number("STACK:", usage) + _number("LOCAL:", usage))


def _cubin_usage(cubin: bytes) -> str | None:
    """What cuobjdump says; None without a cuobjdump."""
    try:
        tool = triton.knobs.nvidia.cuobjdump.path
    except RuntimeError:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _number(label: str, text: str) -> int:
    found = re.search(label + r"\s*(\d+)", text)
    if found is None:
        raise ValueError(f"no {label} in the compiler's report:\n{text}")
    return int(found[1])
