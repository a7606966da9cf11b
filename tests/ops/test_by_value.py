"""Attention by value: the same numbers as the reference, and a compiled graph that sees the caches that are bound."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compile_watch import watch_compiles
from compiled_engine.context import (
    StaticForwardContext,
    allocate_kv_caches,
    bind_kv_cache,
    declared_specs,
    key_cache,
    unbind_kv_cache,
    value_cache,
)
from compiled_engine.errors import ForwardContextError
from compiled_engine.ops.attention import AttentionSpec, PagedAttention
from compiled_engine.ops.by_value import GatherInputs, attend_by_value, gather_inputs
from compiled_engine.ops.cpu import CpuAttention
from compiled_engine.ops.cpu.build import load_kernels
from compiled_engine.ops.reference import paged_attention
from kernel_folder import KERNELS

BLOCK_SIZE, HEADS, KV_HEADS, HEAD_DIM = 4, 4, 2, 8


def make_layer(window: int | None = None, soft_cap: float | None = None) -> tuple[StaticForwardContext, PagedAttention]:
    spec = AttentionSpec("layers.0.attn", HEADS, KV_HEADS, HEAD_DIM, 0.3, window, soft_cap)
    layer = PagedAttention(
        spec, spec.cache_spec(BLOCK_SIZE, torch.float32), CpuAttention(torch.float32, load_kernels(KERNELS))
    )
    context = StaticForwardContext()
    context.register(spec.layer_name, layer)
    context.seal()
    return context, layer


def bind_new(context: StaticForwardContext, num_blocks: int, fill: float = 0.0) -> None:
    unbind_kv_cache(context)
    caches = allocate_kv_caches(declared_specs(context), num_blocks)
    for cache in caches.values():
        cache.fill_(fill)
    bind_kv_cache(caches, context)


def step(seq_lens: list[int], query_lens: list[int], window: int | None, length: int) -> tuple[GatherInputs, tuple]:
    """A step whose requests own the blocks 1, 2, ... in turn."""
    blocks = [-(-seq_len // BLOCK_SIZE) for seq_len in seq_lens]
    table = np.zeros((len(seq_lens), max(blocks)), np.int32)
    first = 1
    for row, count in enumerate(blocks):
        table[row, :count] = range(first, first + count)
        first += count
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    slots = [
        int(table[row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
        for row, (seq_len, queries) in enumerate(zip(seq_lens, query_lens, strict=True))
        for position in range(seq_len - queries, seq_len)
    ]
    lens = np.array(seq_lens, np.int32)
    inputs = gather_inputs(starts, lens, table, torch.tensor(slots), BLOCK_SIZE, length, window)
    return inputs, (torch.from_numpy(table), torch.from_numpy(lens), torch.from_numpy(starts))


@given(
    requests=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=4),
    window=st.sampled_from([None, 1, 3, 6]),
    soft_cap=st.sampled_from([None, 2.0]),
    spare=st.integers(0, 5),
)
def test_equals_the_reference(
    requests: list[tuple[int, int]], window: int | None, soft_cap: float | None, spare: int
) -> None:
    """Chunks and decodes, windows, soft caps; unused slots hold NaN, which must reach no row."""
    query_lens = [queries for queries, _ in requests]
    seq_lens = [queries + cached for queries, cached in requests]
    context, layer = make_layer(window, soft_cap)
    bind_new(context, 30, float("nan"))
    inputs, reference_inputs = step(seq_lens, query_lens, window, max(seq_lens) + spare)
    # What earlier steps wrote: every cached position of every request.
    everything, _ = step(seq_lens, seq_lens, window, max(seq_lens))
    shape = (sum(seq_lens), KV_HEADS, HEAD_DIM)
    attend_by_value(layer, torch.zeros(shape[0], HEADS, HEAD_DIM), torch.randn(shape), torch.randn(shape), everything)
    query = torch.randn(sum(query_lens), HEADS, HEAD_DIM)
    key, value = torch.randn(2, sum(query_lens), KV_HEADS, HEAD_DIM)
    out = attend_by_value(layer, query, key, value, inputs)
    expected = paged_attention(
        query, key_cache(layer.kv_cache), value_cache(layer.kv_cache), *reference_inputs, 0.3, window, soft_cap
    )
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_rebinding_is_seen_without_a_new_graph(backend: str) -> None:
    """A compiled function reads the cache from the layer: after unbind and bind it uses the new one, in place."""
    context, layer = make_layer()
    bind_new(context, 8)
    inputs, _ = step([6], [2], None, 8)
    query = torch.randn(2, HEADS, HEAD_DIM)
    key, value = torch.randn(2, 2, KV_HEADS, HEAD_DIM)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *gather: torch.Tensor) -> torch.Tensor:
        return attend_by_value(layer, q, k, v, GatherInputs(*gather))

    compiled = torch.compile(forward, backend=backend, fullgraph=True, dynamic=False)
    arguments = (query, key, value, inputs.slot_mapping, inputs.context_slots, inputs.visible)
    with torch.no_grad():
        first_cache, first = layer.kv_cache, compiled(*arguments)
        kept = first_cache.clone()
        with watch_compiles() as log:
            for fill in (1.0, -2.0, 0.5):
                bind_new(context, 8, fill)
                address = layer.kv_cache.data_ptr()
                out = compiled(*arguments)
                assert layer.kv_cache.data_ptr() == address
                written = layer.kv_cache.view(-1, 2, KV_HEADS, HEAD_DIM)[inputs.slot_mapping]
                torch.testing.assert_close(written, torch.stack((key, value), 1), rtol=0, atol=0)
                again = layer.kv_cache.clone()
                torch.testing.assert_close(out, forward(*arguments), rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(layer.kv_cache, again, rtol=0, atol=0)
                assert not torch.allclose(out, first)
        assert log.events == []
        torch.testing.assert_close(first_cache, kept, rtol=0, atol=0)


def test_more_than_is_gathered_is_refused() -> None:
    with pytest.raises(ForwardContextError, match="sees 6 places, this graph gathers 5"):
        step([6], [1], None, 5)
