"""Paged attention on CPU.

Requests with one new token read every key and value once, straight from the cache, in a C++ kernel. Requests with
several new tokens (prompt chunks) run one by one: their cached tokens are gathered for torch's own attention, whose
matrix products are worth the copy. Only what a request's queries can see is ever read, so nothing outside a request can
reach its result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from compiled_engine.context import AttentionMetadata, token_slots
from compiled_engine.ops.attention import AttentionSpec
from compiled_engine.ops.cpu.kernels import CpuKernels


@dataclass(frozen=True)
class PromptChunk:
    """One request with several queries, rows ``first`` to ``last``. slots: int64 [length], what any of them sees.
    mask: [last - first, length], 0 or -inf; None when it is exactly the lower triangle."""

    first: int
    last: int
    slots: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True)
class CpuAttentionMetadata(AttentionMetadata):
    """decode_rows, decode_requests: int32 [n], token row and request of every request with one new token.
    ``chunks``: the other requests, as the layers with one particular window see them, by window."""

    decode_rows: torch.Tensor
    decode_requests: torch.Tensor
    chunks: Mapping[int | None, tuple[PromptChunk, ...]]


class CpuAttention:
    """The CPU's ``AttentionBackend``. ``dtype`` is that of queries and caches.

    ``kernel_folder``: where its C++ kernels are kept, and built where they are missing; None: nowhere.
    """

    def __init__(self, dtype: torch.dtype, kernel_folder: Path | None) -> None:
        self.dtype = dtype
        self._kernels = CpuKernels(dtype, kernel_folder)

    def build_metadata(
        self,
        query_start_loc: np.ndarray,
        seq_lens: np.ndarray,
        block_table: np.ndarray,
        block_size: int,
        sliding_windows: Sequence[int | None],
    ) -> CpuAttentionMetadata:
        """See ``AttentionBackend``. The arrays are int32; the metadata's tensors share their memory."""
        chunks = {
            window: tuple(self._chunks(query_start_loc, seq_lens, block_table, block_size, window))
            for window in set(sliding_windows)
        }
        decodes = np.flatnonzero(np.diff(query_start_loc) == 1).astype(np.int32)
        return CpuAttentionMetadata(
            query_start_loc=torch.from_numpy(query_start_loc),
            seq_lens=torch.from_numpy(seq_lens),
            block_table=torch.from_numpy(block_table),
            decode_rows=torch.from_numpy(query_start_loc[decodes]),
            decode_requests=torch.from_numpy(decodes),
            chunks=chunks,
        )

    def write_kv(self, kv_cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """See ``AttentionBackend``."""
        self._kernels.write_kv(kv_cache, key, value, slots)

    def attend(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        """See ``AttentionBackend``. ``metadata`` must come from this backend's ``build_metadata``."""
        if not isinstance(metadata, CpuAttentionMetadata):
            raise TypeError(f"CpuAttention needs CpuAttentionMetadata, it got {type(metadata).__name__}")
        if len(metadata.decode_rows):
            self._kernels.decode_attention(
                spec,
                query,
                kv_cache,
                metadata.decode_rows,
                metadata.decode_requests,
                metadata.block_table,
                metadata.seq_lens,
                out,
            )
        for chunk in metadata.chunks[spec.sliding_window]:
            _attend_chunk(spec, query, token_slots(kv_cache), chunk, out)

    def _chunks(
        self,
        query_start_loc: np.ndarray,
        seq_lens: np.ndarray,
        block_table: np.ndarray,
        block_size: int,
        window: int | None,
    ) -> Iterator[PromptChunk]:
        query_lens = np.diff(query_start_loc)
        # The first query of a request is the one that sees farthest back.
        first_positions = seq_lens - query_lens
        starts = np.zeros_like(seq_lens) if window is None else np.maximum(0, first_positions - window + 1)
        for request in np.flatnonzero(query_lens > 1):
            key_positions = np.arange(starts[request], seq_lens[request])
            query_positions = np.arange(first_positions[request], seq_lens[request])[:, None]
            mask = None
            if first_positions[request] > 0 or (window is not None and window < query_lens[request]):
                visible = key_positions <= query_positions
                if window is not None:
                    visible &= key_positions > query_positions - window
                mask = self._additive(visible)
            slots = _slots(block_table[request], key_positions, block_size)
            first, last = query_start_loc[request : request + 2].tolist()
            yield PromptChunk(first, last, torch.from_numpy(slots), mask)

    def _additive(self, visible: np.ndarray) -> torch.Tensor:
        return torch.zeros(visible.shape, dtype=self.dtype).masked_fill_(torch.from_numpy(~visible), float("-inf"))


def _slots(block_table: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    blocks = np.take_along_axis(block_table, positions // block_size, axis=-1)
    return blocks.astype(np.int64) * block_size + positions % block_size


def _attend_chunk(
    spec: AttentionSpec, query: torch.Tensor, tokens: torch.Tensor, chunk: PromptChunk, out: torch.Tensor
) -> None:
    gathered = tokens.index_select(0, chunk.slots)
    keys, values = (gathered[None, :, side].transpose(1, 2) for side in (0, 1))
    queries = query[None, chunk.first : chunk.last].transpose(1, 2)
    result = _attention(spec, queries, keys, values, chunk.mask, is_causal=chunk.mask is None)
    out[chunk.first : chunk.last] = result[0].transpose(0, 1)


def _attention(
    spec: AttentionSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
) -> torch.Tensor:
    """Dense attention, query [batch, heads, queries, head_dim], key and value [batch, KV heads, keys, head_dim]."""
    if spec.soft_cap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, scale=spec.scale, enable_gqa=True
        )
    repeats = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    scores = torch.matmul(query.float(), key.transpose(-1, -2).float()) * spec.scale
    scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    if is_causal:
        scores = scores + torch.full(scores.shape[-2:], float("-inf")).triu_(1)
    if mask is not None:
        scores = scores + mask
    return torch.matmul(scores.softmax(dim=-1).to(value.dtype), value)
