"""Attention by value: for compilers that must see the cache as an input of the graph (XLA).

Reading ``layer.kv_cache`` here is code that Dynamo inlines, so the cache becomes a graph input that is mutated: binding
another cache of the same shape is seen and needs no new graph. Shapes are static: every row gathers the same number of
places. Same meaning as ``ops.attention.attend``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from compiled_engine.context import CacheLayer, KVCacheSpec, token_slots
from compiled_engine.errors import ForwardContextError
from compiled_engine.ops.attention import AttentionSpec


class ByValueLayer(CacheLayer):
    """One attention layer whose cache is read by traced code: its mathematics and its cache."""

    def __init__(self, spec: AttentionSpec, cache_spec: KVCacheSpec) -> None:
        super().__init__(spec.layer_name, cache_spec)
        self.attention_spec = spec


@dataclass(frozen=True)
class PagedStep:
    """One cache group's view of a step, on the host, padding included: it comes last, as requests of one token.

    query_start_loc: int32 [num_requests + 1].   seq_lens: int32 [num_requests].   block_table: int32 [num_requests,
    max_blocks].   slot_mapping: int64 [num_tokens].   num_padding_requests: how many of the requests are padding.
    """

    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray
    slot_mapping: torch.Tensor
    num_padding_requests: int = 0


class ByValueAttention(Protocol):
    """How attention is computed by traced code that reads the caches from the layers."""

    def host_inputs(self, step: PagedStep, sliding_window: int | None) -> tuple[torch.Tensor, ...]:
        """What the layers of a cache group read in a step: tensors whose shapes the number of tokens alone decides."""
        ...

    def attend(
        self,
        layer: ByValueLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        inputs: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """Write K/V into ``layer.kv_cache`` in place and attend; see ``attend_by_value``. Called by traced code."""
        ...

    def working_bytes(self, spec: AttentionSpec, num_tokens: int) -> int:
        """Bytes that one layer takes for a while in a step of ``num_tokens``, beside its inputs and its output."""
        ...


@dataclass(frozen=True)
class GatherInputs:
    """What each token of a step writes and sees, for the layers of one cache group.

    slot_mapping: int64 [num_tokens].   context_slots: int64 [num_tokens, length], the slots of the places that a token
    may see; places beyond point at one that it sees.   visible: bool [num_tokens, length].
    """

    slot_mapping: torch.Tensor
    context_slots: torch.Tensor
    visible: torch.Tensor


def gather_inputs(
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    block_table: np.ndarray,
    slot_mapping: torch.Tensor,
    block_size: int,
    length: int,
    sliding_window: int | None = None,
) -> GatherInputs:
    """Lay out ``length`` places for every token of the step described by the int32 arrays (see ``AttentionMetadata``).

    Raises ``ForwardContextError`` when some token sees more than ``length`` places.
    """
    query_lens = np.diff(query_start_loc)
    owner = np.repeat(np.arange(len(query_lens)), query_lens)
    rows = np.arange(len(owner)) - query_start_loc[:-1][owner]
    positions = (seq_lens - query_lens)[owner] + rows
    starts = np.zeros_like(positions) if sliding_window is None else np.maximum(0, positions - sliding_window + 1)
    if (longest := int((positions - starts).max(initial=-1)) + 1) > length:
        raise ForwardContextError(f"a token sees {longest} places, this graph gathers {length}: use a longer one")
    offsets = np.arange(length)
    visible = offsets <= (positions - starts)[:, None]
    places = starts[:, None] + np.where(visible, offsets, 0)
    blocks = block_table[owner[:, None], places // block_size].astype(np.int64)
    slots = blocks * block_size + places % block_size
    return GatherInputs(slot_mapping, torch.from_numpy(slots), torch.from_numpy(visible))


class GatherAttention:
    """A ``ByValueAttention`` of plain tensor operations: each token gathers what it sees, as long as the longest may.

    For devices without a paged kernel. It moves ``max_model_len`` (or the window) K/V pairs for every token of a step.
    ``donate``: called on each cache before it is updated.
    """

    def __init__(self, block_size: int, max_model_len: int, donate: Callable[[torch.Tensor], None]) -> None:
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._donate = donate

    def host_inputs(self, step: PagedStep, sliding_window: int | None) -> tuple[torch.Tensor, ...]:
        """See ``ByValueAttention``: the fields of ``GatherInputs``."""
        inputs = gather_inputs(
            step.query_start_loc,
            step.seq_lens,
            step.block_table,
            step.slot_mapping,
            self._block_size,
            self._length(sliding_window),
            sliding_window,
        )
        return inputs.slot_mapping, inputs.context_slots, inputs.visible

    def attend(
        self,
        layer: ByValueLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        inputs: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """See ``ByValueAttention``."""
        if layer.writes_cache:
            self._donate(layer.kv_cache)
        return attend_by_value(layer, query, key, value, GatherInputs(*inputs))

    def working_bytes(self, spec: AttentionSpec, num_tokens: int) -> int:
        """See ``ByValueAttention``: the gathered K/V, in float32 too, and the scores twice."""
        gathered = 2 * spec.num_kv_heads * spec.head_dim * 4
        return num_tokens * self._length(spec.sliding_window) * 2 * (gathered + spec.num_heads * 4)

    def _length(self, sliding_window: int | None) -> int:
        return self._max_model_len if sliding_window is None else min(sliding_window, self._max_model_len)


def attend_by_value(
    layer: ByValueLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, inputs: GatherInputs
) -> torch.Tensor:
    """Write this step's K/V into ``layer.kv_cache`` in place and attend over what each token sees.

    query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim]; returns the shape of
    ``query``. To be called from a function that is compiled, or eagerly.
    """
    spec = layer.attention_spec
    tokens = token_slots(layer.kv_cache)
    if layer.writes_cache:
        tokens.index_copy_(0, inputs.slot_mapping, torch.stack((key, value), dim=1))
    gathered = tokens[inputs.context_slots]
    grouped = query.view(query.shape[0], spec.num_kv_heads, -1, spec.head_dim)
    scores = torch.einsum("thgd,tchd->thgc", grouped.float(), gathered[:, :, 0].float()) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    scores = scores.masked_fill(~inputs.visible[:, None, None, :], float("-inf"))
    out = torch.einsum("thgc,tchd->thgd", scores.softmax(dim=-1), gathered[:, :, 1].float())
    return out.reshape(query.shape).to(query.dtype)
