"""Attention by value: for compilers that must see the cache as an input of the graph (XLA).

Reading ``layer.kv_cache`` here is code that Dynamo inlines, so the cache becomes a graph input that is mutated: binding
another cache of the same shape is seen and needs no new graph. Shapes are static: every row gathers the same number of
places. Same meaning as ``ops.attention.attend``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from compiled_engine.context import token_slots
from compiled_engine.errors import ForwardContextError
from compiled_engine.ops.attention import PagedAttention


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


def attend_by_value(
    layer: PagedAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, inputs: GatherInputs
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
