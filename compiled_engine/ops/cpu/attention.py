"""Paged attention on CPU: decodes, prompt chunks and any mix of them in one call of one C++ kernel per layer.

The kernel reads keys and values straight from the cache, and only those that a request's queries can see, so nothing
outside a request can reach its result.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from compiled_engine.context import AttentionMetadata
from compiled_engine.errors import ForwardContextError
from compiled_engine.ops.attention import AttentionLaunch, AttentionSpec
from compiled_engine.ops.cpu.kernels import AttentionKernel, AttentionLayer, AttentionStep


@dataclass(frozen=True)
class CpuAttentionMetadata(AttentionMetadata):
    """``step``: the addresses of this metadata's own tensors, which live as long as it does."""

    step: AttentionStep


class CpuAttention:
    """The CPU's ``AttentionBackend``. ``dtype`` is that of queries and caches; ``library``: see ``load_kernels``."""

    def __init__(self, dtype: torch.dtype, library: ctypes.CDLL) -> None:
        self.dtype = dtype
        self._kernel = AttentionKernel(dtype, library)

    def build_metadata(
        self, query_start_loc: np.ndarray, seq_lens: np.ndarray, block_table: np.ndarray
    ) -> CpuAttentionMetadata:
        """See ``AttentionBackend``. The metadata's tensors share the memory of arrays that are int32 and dense."""
        starts, lengths, blocks = (
            torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32))
            for array in (query_start_loc, seq_lens, block_table)
        )
        step = AttentionStep(
            starts.data_ptr(), lengths.data_ptr(), blocks.data_ptr(), lengths.shape[0], blocks.shape[1]
        )
        return CpuAttentionMetadata(starts, lengths, blocks, step)

    def metadata_over(
        self, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, launch: AttentionLaunch
    ) -> CpuAttentionMetadata:
        """See ``PersistentAttentionBackend``. The kernel finds out by itself what ``launch`` says.

        Raises ``ForwardContextError`` for tensors that are not dense int32: they would be copied.
        """
        for tensor in (query_start_loc, seq_lens, block_table):
            if tensor.dtype is not torch.int32 or not tensor.is_contiguous():
                layout = f"{tensor.dtype} with strides {tensor.stride()}"
                raise ForwardContextError(f"metadata of {layout} would have to be copied: give dense int32")
        return self.build_metadata(query_start_loc.numpy(), seq_lens.numpy(), block_table.numpy())

    def num_kv_splits(self, num_requests: int, max_seq_len: int) -> int:
        """See ``PersistentAttentionBackend``. The kernel splits by itself."""
        return 1

    def workspaces(self) -> dict[str, torch.Tensor]:
        """See ``PersistentAttentionBackend``. What the kernel needs is its own."""
        return {}

    def for_layer(self, spec: AttentionSpec) -> CpuLayerAttention:
        """See ``AttentionBackend``."""
        return CpuLayerAttention(spec, self._kernel)


class CpuLayerAttention:
    """The CPU's ``LayerAttention``."""

    def __init__(self, spec: AttentionSpec, kernel: AttentionKernel) -> None:
        self._layer = AttentionLayer.of(spec)
        self._kernel = kernel

    def write_and_attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        out: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
        metadata: AttentionMetadata,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """See ``LayerAttention``. ``metadata`` must come from a CPU backend's ``build_metadata``."""
        if not isinstance(metadata, CpuAttentionMetadata):
            raise TypeError(f"CpuAttention needs CpuAttentionMetadata, it got {type(metadata).__name__}")
        self._kernel(self._layer, metadata.step, query, key, value, out, kv_cache, slots, sinks)
