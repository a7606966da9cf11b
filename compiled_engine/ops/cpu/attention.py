"""Paged attention on CPU: gather the cached tokens of a step, then torch's attention on them.

Requests with one new token are batched, those of similar length together, so that little of a batch is padding; the
query heads of one KV head are treated as query rows, so GQA repeats nothing. Requests with several new tokens
(prompt chunks) run one by one. Masked places of a batch point at the request's own first visible token: they are
finite whatever the rest of the cache holds, so nothing outside a request can reach its result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from compiled_engine.context import AttentionMetadata, token_slots
from compiled_engine.ops.attention import AttentionSpec


@dataclass(frozen=True)
class DecodeBatch:
    """Requests with one query each. rows: int64 [n], their token rows. slots: int64 [n * length], what they see.
    mask: [n, 1, 1, length], 0 or -inf; None when every place is visible."""

    rows: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True)
class PromptChunk:
    """One request with several queries, rows ``first`` to ``last``. slots: int64 [length], what any of them sees.
    mask: [last - first, length], 0 or -inf; None when it is exactly the lower triangle."""

    first: int
    last: int
    slots: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True)
class GatherPlan:
    """All requests of a step, as the layers with one particular window see them."""

    decodes: tuple[DecodeBatch, ...]
    chunks: tuple[PromptChunk, ...]


@dataclass(frozen=True)
class CpuAttentionMetadata(AttentionMetadata):
    """``plans``: one per sliding window that occurs among the layers of the group."""

    plans: Mapping[int | None, GatherPlan]


class CpuAttention:
    """The CPU's ``AttentionBackend``. ``dtype`` is that of queries and caches."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def build_metadata(
        self,
        query_start_loc: np.ndarray,
        seq_lens: np.ndarray,
        block_table: np.ndarray,
        block_size: int,
        sliding_windows: Sequence[int | None],
    ) -> CpuAttentionMetadata:
        """See ``AttentionBackend``. The arrays are int32; the metadata's tensors share their memory."""
        plans = {
            window: self._gather_plan(query_start_loc, seq_lens, block_table, block_size, window)
            for window in set(sliding_windows)
        }
        return CpuAttentionMetadata(
            query_start_loc=torch.from_numpy(query_start_loc),
            seq_lens=torch.from_numpy(seq_lens),
            block_table=torch.from_numpy(block_table),
            plans=plans,
        )

    def write_kv(self, kv_cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """See ``AttentionBackend``."""
        token_slots(kv_cache).index_copy_(0, slots, torch.stack((key, value), dim=1))

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
        plan = metadata.plans[spec.sliding_window]
        tokens = token_slots(kv_cache)
        for batch in plan.decodes:
            _attend_decodes(spec, query, tokens, batch, out)
        for chunk in plan.chunks:
            _attend_chunk(spec, query, tokens, chunk, out)

    def _gather_plan(
        self,
        query_start_loc: np.ndarray,
        seq_lens: np.ndarray,
        block_table: np.ndarray,
        block_size: int,
        window: int | None,
    ) -> GatherPlan:
        query_lens = np.diff(query_start_loc)
        # The first query of a request is the one that sees farthest back.
        first_positions = seq_lens - query_lens
        starts = np.zeros_like(seq_lens) if window is None else np.maximum(0, first_positions - window + 1)
        lengths = seq_lens - starts
        decodes = []
        for members in _similar_lengths(np.flatnonzero(query_lens == 1), lengths):
            offsets = np.arange(lengths[members].max())
            visible = offsets < lengths[members, None]
            positions = starts[members, None] + np.where(visible, offsets, 0)
            slots = _slots(block_table[members], positions, block_size)
            mask = None if visible.all() else self._additive(visible)[:, None, None, :]
            rows = torch.from_numpy(query_start_loc[members].astype(np.int64))
            decodes.append(DecodeBatch(rows, torch.from_numpy(slots.reshape(-1)), mask))
        chunks = []
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
            chunks.append(PromptChunk(first, last, torch.from_numpy(slots), mask))
        return GatherPlan(tuple(decodes), tuple(chunks))

    def _additive(self, visible: np.ndarray) -> torch.Tensor:
        return torch.zeros(visible.shape, dtype=self.dtype).masked_fill_(torch.from_numpy(~visible), float("-inf"))


def _slots(block_table: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    blocks = np.take_along_axis(block_table, positions // block_size, axis=-1)
    return blocks.astype(np.int64) * block_size + positions % block_size


def _similar_lengths(members: np.ndarray, lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Split ``members`` into groups whose longest is at most 64 tokens, or twice the shortest."""
    members = members[np.argsort(lengths[members], kind="stable")]
    start = 0
    while start < len(members):
        limit = max(64, 2 * lengths[members[start]])
        stop = start + int(np.searchsorted(lengths[members[start:]], limit, side="right"))
        yield members[start:stop]
        start = stop


def _attend_decodes(
    spec: AttentionSpec, query: torch.Tensor, tokens: torch.Tensor, batch: DecodeBatch, out: torch.Tensor
) -> None:
    count = batch.rows.shape[0]
    grouped = query.index_select(0, batch.rows).view(count, spec.num_kv_heads, -1, spec.head_dim)
    gathered = tokens.index_select(0, batch.slots).view(count, -1, *tokens.shape[1:])
    keys, values = gathered[:, :, 0].transpose(1, 2), gathered[:, :, 1].transpose(1, 2)
    mask = None if batch.mask is None else batch.mask.expand(count, 1, grouped.shape[2], -1)
    result = _attention(spec, grouped, keys, values, mask, is_causal=False)
    out.index_copy_(0, batch.rows, result.reshape(count, spec.num_heads, spec.head_dim))


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
