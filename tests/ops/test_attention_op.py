"""The by-name op: it finds its layer and its cache through the step's context, and refuses what does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from compiled_engine.context import (
    CacheLayer,
    ForwardContext,
    StaticForwardContext,
    StepKind,
    allocate_kv_caches,
    bind_kv_cache,
    key_cache,
    set_forward_context,
    unbind_kv_cache,
    value_cache,
)
from compiled_engine.errors import CacheNotBound, ForwardContextError
from compiled_engine.ops.attention import AttentionSpec, PagedAttention
from compiled_engine.ops.cpu import CpuAttention
from compiled_engine.ops.cpu.build import load_kernels
from compiled_engine.ops.reference import paged_attention
from kernel_folder import KERNELS

BLOCK_SIZE, NUM_BLOCKS, NAME = 4, 6, "model.layers.0.self_attn"
SPEC = AttentionSpec(NAME, num_heads=4, num_kv_heads=2, head_dim=8, scale=0.3)
# Two requests: a prompt of three tokens in block 2, a decode at position 4, the first of its second block.
START_LOC, SEQ_LENS = np.array([0, 3, 4], np.int32), np.array([3, 5], np.int32)
BLOCK_TABLE = np.array([[2, 0], [3, 1]], np.int32)
SLOTS = torch.tensor([8, 9, 10, 4])


@pytest.fixture
def context() -> StaticForwardContext:
    context = StaticForwardContext()
    backend = CpuAttention(torch.float32, load_kernels(KERNELS))
    context.register(NAME, PagedAttention(SPEC, SPEC.cache_spec(BLOCK_SIZE, torch.float32), backend))
    context.register("cacheless", CacheLayer("cacheless", None))
    context.seal()
    return context


def new_caches() -> dict[str, torch.Tensor]:
    spec = SPEC.cache_spec(BLOCK_SIZE, torch.float32)
    caches = allocate_kv_caches({NAME: spec}, NUM_BLOCKS)
    for cache in caches.values():
        cache.normal_()
    return caches


@contextmanager
def step(context: StaticForwardContext, kind: StepKind = StepKind.REAL) -> Iterator[None]:
    metadata = CpuAttention(torch.float32, load_kernels(KERNELS)).build_metadata(START_LOC, SEQ_LENS, BLOCK_TABLE)
    with set_forward_context(
        ForwardContext(context, (metadata,), (SLOTS,), num_tokens=4, num_padded_tokens=4, step_kind=kind)
    ):
        yield


def inputs(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    query = torch.randn(rows, 4, 8)
    return query, torch.randn(rows, 2, 8), torch.randn(rows, 2, 8), torch.full_like(query, float("nan"))


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, name: str = NAME) -> None:
    torch.ops.compiled_engine.attention(query, key, value, out, name)


def test_writes_then_attends_with_the_layers_own_cache(context: StaticForwardContext) -> None:
    caches = new_caches()
    bind_kv_cache(caches, context)
    query, key, value, out = inputs()
    with step(context):
        attention(query, key, value, out)
    cache = caches[NAME]
    assert torch.equal(key_cache(cache).flatten(0, 1)[SLOTS], key)
    assert torch.equal(value_cache(cache).flatten(0, 1)[SLOTS], value)
    tensors = map(torch.from_numpy, (BLOCK_TABLE, SEQ_LENS, START_LOC))
    expected = paged_attention(query, key_cache(cache), value_cache(cache), *tensors, SPEC.scale)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_binding_other_caches_is_seen_at_the_next_call(context: StaticForwardContext) -> None:
    first, second = new_caches(), new_caches()
    query, key, value, _ = inputs()
    results = []
    for caches in (first, second, first):
        bind_kv_cache(caches, context)
        out = torch.empty_like(query)
        with step(context):
            attention(query, key, value, out)
        results.append(out)
        unbind_kv_cache(context)
    assert torch.equal(results[0], results[2])
    # The prompt sees its own tokens alone, the decode what its cache held before.
    torch.testing.assert_close(results[0][:3], results[1][:3])
    assert not torch.allclose(results[0][3], results[1][3])


def test_an_unbound_layer_is_named(context: StaticForwardContext) -> None:
    with step(context), pytest.raises(CacheNotBound, match=NAME):
        attention(*inputs())
    bind_kv_cache(new_caches(), context)
    unbind_kv_cache(context)
    with step(context), pytest.raises(CacheNotBound, match=NAME):
        attention(*inputs())


def test_outside_a_step_there_is_no_context(context: StaticForwardContext) -> None:
    bind_kv_cache(new_caches(), context)
    with pytest.raises(ForwardContextError, match="no forward context"):
        attention(*inputs())
    with step(context):
        attention(*inputs())
    with pytest.raises(ForwardContextError, match="no forward context"):
        attention(*inputs())


def test_an_unknown_layer_is_named(context: StaticForwardContext) -> None:
    with step(context), pytest.raises(ForwardContextError, match=r"model\.layers\.1\.self_attn"):
        attention(*inputs(), name="model.layers.1.self_attn")


def test_a_layer_of_another_kind_is_refused(context: StaticForwardContext) -> None:
    with step(context), pytest.raises(ForwardContextError, match="'cacheless' is a CacheLayer"):
        attention(*inputs(), name="cacheless")


@pytest.mark.parametrize("rows", [3, 5])
def test_another_number_of_rows_than_slots_is_refused_before_anything_is_written(
    context: StaticForwardContext, rows: int
) -> None:
    caches = new_caches()
    bind_kv_cache(caches, context)
    before = caches[NAME].clone()
    with step(context), pytest.raises(ForwardContextError, match=rf"{rows} rows.* has 4"):
        attention(*inputs(rows))
    assert torch.equal(caches[NAME], before)


def test_a_profile_step_needs_no_cache_and_touches_none(context: StaticForwardContext) -> None:
    query, key, value, out = inputs(7)
    with step(context, StepKind.PROFILE):
        attention(query, key, value, out)
    assert torch.equal(out, torch.zeros_like(out))
    caches = new_caches()
    bind_kv_cache(caches, context)
    before = caches[NAME].clone()
    with step(context, StepKind.PROFILE):
        attention(query, key, value, out)
    assert torch.equal(caches[NAME], before)


def test_the_schema_says_that_out_alone_is_written() -> None:
    schema = torch.ops.compiled_engine.attention.default._schema
    written = [argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    assert written == ["out"]
    assert [argument.name for argument in schema.arguments] == ["query", "key", "value", "out", "layer_name"]
    assert not schema.returns


def test_the_op_keeps_its_schema_while_it_runs(context: StaticForwardContext) -> None:
    """torch's own check: nothing but ``out`` changes among the arguments, and the fake agrees with the real op."""
    bind_kv_cache(new_caches(), context)
    query, key, value, _ = inputs()
    with step(context):
        torch.library.opcheck(
            torch.ops.compiled_engine.attention.default,
            (query, key, value, torch.zeros_like(query), NAME),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_the_spec_asks_for_the_cache_that_its_window_needs() -> None:
    windowed = AttentionSpec("layer", 4, 2, 8, 0.3, sliding_window=16)
    assert windowed.cache_spec(4, torch.bfloat16).sliding_window == 16
    assert SPEC.cache_spec(4, torch.bfloat16).sliding_window is None
    assert SPEC.cache_spec(4, torch.bfloat16).shape(7) == (7, 4, 2, 2, 8)
