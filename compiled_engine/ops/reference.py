"""The slow dense oracle of paged attention: every kernel on every backend is tested against it."""

from __future__ import annotations

import torch


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the newest tokens of each sequence over all of its cached tokens, in float64.

    query: [num_tokens, num_heads, head_dim]; the queries of sequence ``i`` are rows ``query_start_loc[i]`` to
    ``query_start_loc[i + 1]`` and the last of them is position ``seq_lens[i] - 1``.
    key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim]; ``block_tables`` [num_seqs, max_blocks]
    lists a sequence's blocks. ``sliding_window``: positions that a query sees, its own included. ``sinks``
    [num_heads]: one extra score per head that takes part in the softmax and carries no value. ``alibi`` [num_heads]:
    slope times (key position - query position) is added to the score.
    Returns [num_tokens, num_heads, head_dim] in float64.
    """
    out = torch.zeros(query.shape, dtype=torch.float64)
    block_size = key_cache.shape[1]
    for sequence, (first, last) in enumerate(
        zip(query_start_loc[:-1].tolist(), query_start_loc[1:].tolist(), strict=True)
    ):
        seq_len = int(seq_lens[sequence])
        for row in range(first, last):
            position = seq_len - (last - row)
            start = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            visible = range(start, position + 1)
            places = [(int(block_tables[sequence, p // block_size]), p % block_size) for p in visible]
            keys = torch.stack([key_cache[block, offset] for block, offset in places]).double()
            values = torch.stack([value_cache[block, offset] for block, offset in places]).double()
            distances = torch.tensor([p - position for p in visible], dtype=torch.float64)
            out[row] = _one_query(query[row].double(), keys, values, distances, scale, soft_cap, sinks, alibi)
    return out


def _one_query(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    distances: torch.Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    alibi: torch.Tensor | None,
) -> torch.Tensor:
    num_heads = query.shape[0]
    queries_per_kv = num_heads // keys.shape[1]
    result = torch.empty_like(query)
    for head in range(num_heads):
        scores = keys[:, head // queries_per_kv] @ query[head] * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if alibi is not None:
            scores = scores + alibi[head].double() * distances
        if sinks is not None:
            scores = torch.cat([scores, sinks[head].double()[None]])
        weights = torch.softmax(scores, dim=0)[: len(keys)]
        result[head] = weights @ values[:, head // queries_per_kv]
    return result
