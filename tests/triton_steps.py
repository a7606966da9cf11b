"""Steps of ``attention_steps`` run by the Triton backend, in either form of padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st

from attention_steps import Request, Step, decodes, make_step
from compiled_engine.ops.attention import AttentionLaunch, AttentionSpec
from compiled_engine.ops.triton.attention import TritonAttention, TritonAttentionMetadata

CPU = torch.device("cpu")
MANY_MULTIPROCESSORS = 4096
"""Room in the workspace for whatever split a test asks for."""


def backend_for(step: Step) -> TritonAttention:
    """Its workspace holds NaN: what a step does not write there must not matter."""
    backend = TritonAttention([step.spec], step.query.dtype, CPU, MANY_MULTIPROCESSORS)
    for workspace in backend.workspaces().values():
        workspace.fill_(float("nan"))
    return backend


def metadata_for(step: Step, backend: TritonAttention, num_splits: int, empty_requests: int) -> TritonAttentionMetadata:
    """``empty_requests``: requests of padding that have no tokens, as graphs of mixed steps have."""
    lengths = [request.new for request in step.requests]
    starts = np.concatenate([step.query_start_loc, np.repeat(step.query_start_loc[-1:], empty_requests)])
    seq_lens = np.concatenate([step.seq_lens, np.zeros(empty_requests, np.int32)])
    table = np.concatenate([step.block_table, np.zeros((empty_requests, step.block_table.shape[1]), np.int32)])
    launch = AttentionLaunch(max(lengths), max(step.seq_lens.tolist()), num_splits)
    return backend.metadata_over(torch.from_numpy(starts), torch.from_numpy(seq_lens), torch.from_numpy(table), launch)


def with_rows(rows: torch.Tensor, count: int, value: float) -> torch.Tensor:
    """``rows`` and ``count`` more; none: the very tensor, whose strides may matter."""
    if count == 0:
        return rows
    return torch.cat([rows, torch.full((count, *rows.shape[1:]), value, dtype=rows.dtype)])


def run(
    step: Step,
    num_splits: int = 1,
    alibi: torch.Tensor | None = None,
    empty_requests: int = 0,
    loose_rows: int = 0,
    padding: float = float("nan"),
) -> torch.Tensor:
    """Write K/V into the step's cache and attend. ``num_splits`` 1: the kernel for any mix; more: that for decodes.

    ``loose_rows``: rows after the last request's, which belong to none; they hold ``padding`` and are not returned.
    ``out`` starts as NaN: every row of a request must be made, and no other may be.
    """
    backend = backend_for(step)
    metadata = metadata_for(step, backend, num_splits, empty_requests)
    query, key, value = (with_rows(rows, loose_rows, padding) for rows in (step.query, step.key, step.value))
    slots = torch.cat([step.slots, torch.zeros(loose_rows, dtype=torch.int64)])
    out = torch.full(query.shape, float("nan"), dtype=query.dtype)
    layer = backend.for_layer(step.spec, alibi)
    layer.write_and_attend(query, key, value, out, step.cache, slots, metadata, step.sinks)
    num_rows = len(step.query)
    assert out[num_rows:].isnan().all()
    return out[:num_rows]


def with_own_cache(step: Step) -> Step:
    return replace(step, cache=step.cache.clone())


def decode_step(spec: AttentionSpec, cached: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> Step:
    return make_step(spec, [Request(count, 1) for count in cached], 0, 16, dtype, seed)


def slopes(num_heads: int) -> torch.Tensor:
    return torch.linspace(0.02, 0.5, num_heads)


@st.composite
def decode_steps(draw: st.DrawFn, dtype: torch.dtype = torch.float32, max_requests: int = 2) -> Step:
    """Steps of one new token per request."""
    requests = draw(st.lists(decodes, min_size=1, max_size=max_requests))
    num_kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2), (1, 7)]))
    head_dim = draw(st.sampled_from([16, 24, 64, 80, 96, 112, 128, 256]))
    window = draw(st.sampled_from([None, None, 1, 5, 16, 70, 300]))
    soft_cap = draw(st.sampled_from([None, None, 3.0]))
    spec = AttentionSpec("layer", num_kv_heads * group, num_kv_heads, head_dim, head_dim**-0.5, window, soft_cap)
    padding, sinks, seed = draw(st.integers(0, 2)), draw(st.booleans()), draw(st.integers(0, 2**16))
    block_size = draw(st.sampled_from([1, 5, 16, 32, 64, 128]))
    return make_step(spec, requests, padding, block_size, dtype, seed, sinks)
