"""What instructions this machine's CPU has, by what the kernel says, and which of the kernels' paths it can run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class InstructionPath:
    """One way of compiling the kernels: ``needs`` of the CPU, ``flags`` for the compiler."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")

INSTRUCTION_PATHS = (
    InstructionPath(
        "avx512_bf16",
        frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "fma", "f16c"}),
        (*_AVX512, "-mavx512bf16"),
    ),
    InstructionPath("avx512", frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c"}), _AVX512),
    InstructionPath("avx2", frozenset({"avx2", "fma", "f16c"}), _AVX2),
    InstructionPath("portable", frozenset(), ()),
)
"""All paths, best first. ``portable`` is the compiler's default for the architecture: SSE2 on x86-64, NEON on Arm."""


def runnable_paths(flags: Collection[str] | None = None) -> tuple[InstructionPath, ...]:
    """The paths that a CPU with ``flags`` (None: this one) can run, best first."""
    present = cpu_flags() if flags is None else frozenset(flags)
    return tuple(path for path in INSTRUCTION_PATHS if path.needs <= present)


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
