"""What tests of ragged attention share: a stand-in for the TPU kernel, and steps with what was cached before them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from compiled_engine.context import StaticForwardContext, allocate_kv_caches, bind_kv_cache, declared_specs
from compiled_engine.ops.attention import AttentionSpec
from compiled_engine.ops.by_value import ByValueLayer, PagedStep


def ragged_paged_attention(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    kv_lens: torch.Tensor,
    page_indices: torch.Tensor,
    cu_q_lens: torch.Tensor,
    num_seqs: torch.Tensor,
    *,
    sm_scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """The contract of the TPU kernel in plain operations of static shape, for any device.

    As with the kernel only the first ``num_seqs`` sequences count and rows behind their last token hold rubbish, here
    NaN. Scores that a query must not see get a large negative number added, and what they weigh is read all the same.
    """
    rows = torch.arange(q.shape[0], device=q.device)
    owner = (rows[:, None] >= cu_q_lens[None, 1:]).sum(dim=1).clamp(max=len(kv_lens) - 1)
    positions = (kv_lens[owner] - cu_q_lens[owner + 1] + rows)[:, None]
    gathered = kv_pages[page_indices[owner].long()].flatten(1, 2)
    places = torch.arange(gathered.shape[1], device=q.device)[None, :]
    hidden = places > positions
    if sliding_window is not None:
        hidden = hidden | (places <= positions - sliding_window)
    groups = q.shape[1] * 2 // kv_pages.shape[2]
    keys, values = (gathered[:, :, first::2].repeat_interleave(groups, dim=2) for first in (0, 1))
    scores = torch.einsum("thd,tchd->thc", q, keys) * sm_scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(hidden[:, None, :], -1e30)
    out = torch.einsum("thc,tchd->thd", scores.softmax(dim=-1), values)
    undefined = rows >= cu_q_lens[num_seqs.long()]
    return out.masked_fill(undefined[:, None, None], float("nan"))


def bound_layers(specs: Sequence[AttentionSpec], block_size: int, num_blocks: int) -> list[ByValueLayer]:
    """The layers of these specs with caches of random numbers, those that share another's included."""
    context = StaticForwardContext()
    layers = [ByValueLayer(spec, spec.cache_spec(block_size, torch.float32)) for spec in specs]
    for layer in layers:
        context.register(layer.layer_name, layer)
    context.seal()
    caches = allocate_kv_caches(declared_specs(context), num_blocks)
    for cache in caches.values():
        cache.normal_()
    bind_kv_cache(caches, context)
    return layers


def paged_step(requests: Sequence[tuple[int, int]], num_padding: int, block_size: int) -> PagedStep:
    """A step of requests, each (tokens in the step, tokens cached before), then padding on block 0.

    A request's blocks are 1, 2, ... in descending order, so that no table is the identity.
    """
    query_lens = [tokens for tokens, _ in requests] + [1] * num_padding
    seq_lens = [tokens + cached for tokens, cached in requests] + [1] * num_padding
    used = [-(-length // block_size) for length in seq_lens[: len(requests)]]
    table = np.zeros((len(seq_lens), max(used, default=1)), np.int32)
    next_block = sum(used)
    for row, count in enumerate(used):
        table[row, :count] = range(next_block, next_block - count, -1)
        next_block -= count
    slots = [
        int(table[row, position // block_size]) * block_size + position % block_size
        for row, (tokens, cached) in enumerate(requests)
        for position in range(cached, cached + tokens)
    ]
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    slot_mapping = torch.tensor(slots + [0] * num_padding, dtype=torch.int64)
    return PagedStep(starts, np.array(seq_lens, np.int32), table, slot_mapping, num_padding)
