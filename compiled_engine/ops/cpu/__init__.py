"""Kernels of the CPU backend.

Paged attention: a C++ kernel for requests with one new token, torch's attention for prompt chunks. The C++ has a plain
C ABI, is built by the system's compiler at the first start, and shares torch's OpenMP runtime.
"""

from __future__ import annotations

from compiled_engine.ops.cpu.attention import CpuAttention, CpuAttentionMetadata

__all__ = ["CpuAttention", "CpuAttentionMetadata"]
