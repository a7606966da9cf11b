"""Kernels of the CPU backend.

Written in C++ with a plain C ABI, built by the system's compiler at the first start, sharing torch's OpenMP runtime.
"""

from __future__ import annotations

from compiled_engine.ops.cpu.attention import CpuAttention, CpuAttentionMetadata

__all__ = ["CpuAttention", "CpuAttentionMetadata"]
