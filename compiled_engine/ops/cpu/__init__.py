"""Kernels of the CPU backend: matrix products from packed weights, paged attention, sampling.

Written in C++ with a plain C ABI, one source for every instruction path. They are built by the system's compiler at the
first start, kept beside the stored graphs, called through ctypes or by compiled pieces, and share torch's OpenMP
runtime.
"""

from __future__ import annotations

from compiled_engine.ops.cpu.attention import CpuAttention, CpuAttentionMetadata

__all__ = ["CpuAttention", "CpuAttentionMetadata"]
