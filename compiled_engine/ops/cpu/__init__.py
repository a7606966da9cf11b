"""Kernels of the CPU backend.

Paged attention by gathering a sequence's cached tokens and calling torch's own attention on them.
Everything that depends only on the step, not on the layer, is computed once per step.
"""

from __future__ import annotations

from compiled_engine.ops.cpu.attention import CpuAttention, CpuAttentionMetadata

__all__ = ["CpuAttention", "CpuAttentionMetadata"]
