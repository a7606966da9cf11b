"""The Triton attention kernels in Triton's interpreter, against the dense reference and against themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_steps import TOLERANCE, Request, Step, make_step, steps
from compiled_engine.context import AttentionMetadata, token_slots
from compiled_engine.errors import ConfigError
from compiled_engine.ops.attention import AttentionLaunch, AttentionSpec
from compiled_engine.ops.triton.attention import TritonAttention
from compiled_engine.ops.triton.split_kv import MAX_KV_SPLITS
from triton_interpreter import mended_interpreter, programs_in_reverse
from triton_steps import (
    CPU,
    backend_for,
    decode_step,
    decode_steps,
    metadata_for,
    run,
    slopes,
    with_own_cache,
)

pytestmark = [
    pytest.mark.usefixtures("_mended"),
    # The interpreter's NumPy warns of infinities and NaN, which these tests put in and which masked lanes make.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
EXAMPLES = 12
NUM_SPLITS = st.sampled_from([2, 3, 7])
SPEC = AttentionSpec("layer", 4, 2, 16, 0.25)


@pytest.fixture(scope="module")
def _mended() -> Iterator[None]:
    with mended_interpreter():
        yield


def check(step: Step, num_splits: int = 1, alibi: torch.Tensor | None = None, **padding: int) -> None:
    tolerance = TOLERANCE[step.query.dtype]
    out = run(step, num_splits, alibi, **padding)[: step.num_real_rows]
    expected = step.reference(alibi)[: step.num_real_rows]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@settings(max_examples=EXAMPLES)
@given(step=steps(max_requests=3), has_alibi=st.booleans(), empty=st.integers(0, 2), loose=st.integers(0, 40))
def test_any_mix_equals_the_reference(step: Step, has_alibi: bool, empty: int, loose: int) -> None:
    alibi = slopes(step.spec.num_heads) if has_alibi else None
    check(step, alibi=alibi, empty_requests=empty, loose_rows=loose)


@pytest.mark.slow
@settings(max_examples=EXAMPLES)
@given(step=decode_steps(), num_splits=NUM_SPLITS, has_alibi=st.booleans(), empty=st.integers(0, 2))
def test_split_decodes_equal_the_reference(step: Step, num_splits: int, has_alibi: bool, empty: int) -> None:
    alibi = slopes(step.spec.num_heads) if has_alibi else None
    check(step, num_splits, alibi, empty_requests=empty)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@settings(max_examples=EXAMPLES // 2)
@given(data=st.data())
def test_half_precision_equals_the_reference(dtype: torch.dtype, data: st.DataObject) -> None:
    check(data.draw(steps(dtype, max_requests=2)))
    check(data.draw(decode_steps(dtype, max_requests=2)), data.draw(NUM_SPLITS))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_every_head_size(head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    spec = AttentionSpec("layer", 6, 2, head_dim, head_dim**-0.5)
    check(make_step(spec, [Request(130, 1), Request(0, 33)], 1, block_size, dtype, seed=head_dim))
    check(make_step(spec, [Request(300, 1), Request(7, 1)], 1, block_size, dtype, seed=head_dim), num_splits=4)


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 2, 5, 8, 33, 71])
def test_every_number_of_queries_to_a_key(group: int) -> None:
    """A tile holds whole tokens; groups of more heads than a tile has rows make it larger."""
    spec = AttentionSpec("layer", 2 * group, 2, 16, 0.25)
    check(make_step(spec, [Request(70, 1), Request(3, 5)], 0, 16, torch.float32, seed=group), loose_rows=3)
    check(decode_step(spec, [70, 3], seed=group), num_splits=2)


def check_that_poison_stays_out(step: Step, num_splits: int, poison: float) -> None:
    """``poison`` in unused slots, slots before every window, block 0 and all padding changes no bit of a real row."""
    clean = run(with_own_cache(step), num_splits, loose_rows=3, padding=0.0)[: step.num_real_rows]
    used = step.used_slots()
    kept = token_slots(step.cache)[used].clone()
    step.cache.fill_(poison)
    token_slots(step.cache)[used] = kept
    for tensor in (step.query, step.key, step.value):
        tensor[step.num_real_rows :] = poison
    poisoned = run(step, num_splits, empty_requests=2, loose_rows=3, padding=poison)[: step.num_real_rows]
    assert torch.isfinite(poisoned).all()
    assert torch.equal(clean, poisoned)


POISONS = st.sampled_from([float("nan"), float("inf"), 1e30])


@pytest.mark.slow
@settings(max_examples=EXAMPLES)
@given(step=steps(max_requests=3), poison=POISONS)
def test_what_no_query_sees_cannot_reach_a_row(step: Step, poison: float) -> None:
    check_that_poison_stays_out(step, 1, poison)


@pytest.mark.slow
@settings(max_examples=EXAMPLES)
@given(step=decode_steps(), poison=POISONS, num_splits=NUM_SPLITS)
def test_what_no_query_sees_cannot_reach_a_split_decode(step: Step, poison: float, num_splits: int) -> None:
    check_that_poison_stays_out(step, num_splits, poison)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_blocks_before_a_window_may_hold_anything(num_splits: int) -> None:
    """A window that starts inside a tile of keys: the rest of the tile may be another request's, or NaN."""
    spec = replace(SPEC, sliding_window=37)
    step = make_step(spec, [Request(100, 1), Request(60, 1)], 1, 16, torch.float32, seed=1)
    check_that_poison_stays_out(step, num_splits, float("nan"))


@pytest.mark.slow
@settings(max_examples=EXAMPLES)
@given(step=steps(max_requests=3), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_request_has_the_same_bits_in_any_batch(step: Step, dtype: torch.dtype) -> None:
    tensors = {name: getattr(step, name).to(dtype) for name in ("query", "key", "value", "cache")}
    step = replace(step, **tensors)
    alone = [run(step.alone(row)) for row in range(step.num_real)]
    assert torch.equal(run(step, empty_requests=1, loose_rows=5)[: step.num_real_rows], torch.cat(alone))


@pytest.mark.slow
@settings(max_examples=EXAMPLES)
@given(step=decode_steps(), num_splits=NUM_SPLITS)
def test_a_split_decode_has_the_same_bits_in_any_batch(step: Step, num_splits: int) -> None:
    alone = [run(step.alone(row), num_splits) for row in range(step.num_real)]
    assert torch.equal(run(step, num_splits)[: step.num_real_rows], torch.cat(alone))


@pytest.mark.slow
@pytest.mark.parametrize("num_splits", [16, 31, MAX_KV_SPLITS])
def test_most_splits_may_have_nothing_to_do(num_splits: int) -> None:
    check(decode_step(SPEC, [0, 15, 16, 300, 700]), num_splits)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_programs_may_run_in_any_order(num_splits: int) -> None:
    """No program writes what another one makes. Three heads to a KV head leave rows of a tile without a token."""
    spec = AttentionSpec("layer", 6, 2, 16, 0.25)
    requests = [Request(30, 1), Request(70, 1)] if num_splits > 1 else [Request(0, 33), Request(9, 24)]
    step = make_step(spec, requests, 0, 16, torch.float32, seed=1)
    expected = run(with_own_cache(step), num_splits, loose_rows=4)
    with programs_in_reverse():
        assert torch.equal(run(step, num_splits, loose_rows=4), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (40, None), (100, 5.0)])
def test_a_chunk_has_the_bits_of_its_tokens_one_by_one(window: int | None, soft_cap: float | None) -> None:
    """Prefill in one go, in chunks of any size, and token by token: the same bits, over tiles of rows and keys."""
    spec = AttentionSpec("layer", 6, 2, 24, 0.25, window, soft_cap)
    whole = make_step(spec, [Request(120, 24)], 0, 16, torch.float32, seed=7, with_sinks=True)
    expected = run(with_own_cache(whole))
    for size in (1, 7, 23):
        step = with_own_cache(whole)
        parts = [run(step.chunk(first, last)) for first, last in pairwise([*range(0, 24, size), 24])]
        assert torch.equal(torch.cat(parts), expected), size


@pytest.mark.parametrize("num_splits", [1, 4])
def test_requests_without_rows_are_passed_over(num_splits: int) -> None:
    step = make_step(SPEC, [Request(90, 1), Request(4, 0), Request(3, 1)], 0, 16, torch.float32, seed=1)
    check(step, num_splits)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_one_launch_serves_other_contents(num_splits: int) -> None:
    """The metadata's tensors are rewritten between steps, as a replayed graph's are, and nothing else is."""
    long = decode_step(SPEC, [200, 90, 3])
    short = decode_step(SPEC, [1, 0], seed=5)
    backend = backend_for(long)
    metadata = metadata_for(long, backend, num_splits, empty_requests=0)
    layer = backend.for_layer(SPEC)
    for step in (long, short, long):
        count = len(step.requests)
        for tensor, array in (
            (metadata.query_start_loc, step.query_start_loc),
            (metadata.seq_lens, step.seq_lens),
            (metadata.block_table, step.block_table),
        ):
            tensor.zero_()
            tensor[tuple(slice(0, size) for size in array.shape)] = torch.from_numpy(array)
        metadata.query_start_loc[count:] = count
        query = torch.cat([step.query, torch.full((3 - count, 4, 16), float("nan"))])
        out = torch.full_like(query, float("nan"))
        layer.write_and_attend(query[:count], step.key, step.value, out[:count], step.cache, step.slots, metadata)
        torch.testing.assert_close(out[:count].double(), step.reference(), rtol=2e-5, atol=2e-5)
        assert out[count:].isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-30, 30.0, 1e4])
@pytest.mark.parametrize("soft_cap", [None, 50.0])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_scores_of_any_size(scale: float, soft_cap: float | None, num_splits: int) -> None:
    """From scores that are all alike to one that outweighs all others."""
    step = decode_step(replace(SPEC, scale=scale, soft_cap=soft_cap), [200, 20], seed=2)
    step = replace(step, sinks=torch.zeros(4))
    torch.testing.assert_close(run(step, num_splits).double(), step.reference(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("sink", [-1e4, 0.0, 80.0])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_sinks_take_their_share(sink: float, num_splits: int) -> None:
    step = decode_step(SPEC, [300, 2], seed=2)
    check(replace(step, sinks=torch.tensor([sink, 0.0, sink, 1.0])), num_splits)


def test_a_query_of_nan_spoils_its_own_row_alone() -> None:
    step = make_step(SPEC, [Request(100, 4)], 0, 16, torch.float32, seed=2)
    clean = run(with_own_cache(step))
    step.query[2, 1] = float("nan")
    out = run(step)
    assert out[2, 1].isnan().all()
    out[2, 1] = clean[2, 1]
    assert torch.equal(out, clean)


@pytest.mark.slow
@pytest.mark.parametrize("num_splits", [1, 4])
def test_rows_and_blocks_may_lie_apart(num_splits: int) -> None:
    """Rows that are columns of a merged projection, heads that lie apart, and pages with padding between them."""
    step = decode_step(SPEC, [150, 40])
    expected = run(with_own_cache(step), num_splits)
    query, key, value = torch.cat([step.query, step.key, step.value], dim=1).split([4, 2, 2], dim=1)
    assert torch.equal(run(replace(with_own_cache(step), query=query, key=key, value=value), num_splits), expected)
    apart = {
        name: getattr(step, name).transpose(0, 1).contiguous().transpose(0, 1) for name in ("query", "key", "value")
    }
    assert torch.equal(run(replace(with_own_cache(step), **apart), num_splits), expected)
    num_blocks, *block = step.cache.shape
    pages = torch.full((num_blocks, step.cache[0].numel() + 24), float("nan"))
    cache = pages[:, :-24].view(num_blocks, *block).copy_(step.cache)
    assert torch.equal(run(replace(step, cache=cache), num_splits), expected)
    assert pages[:, -24:].isnan().all()


@pytest.mark.parametrize("num_splits", [1, 2])
def test_offsets_beyond_32_bits(num_splits: int) -> None:
    """Block 2 starts 2**31 elements into the cache; the pages between are never touched."""
    step = decode_step(SPEC, [20])
    step = replace(step, block_table=np.array([[1, 2]], dtype=np.int32), slots=torch.tensor([2 * 16 + 4]))
    expected = run(with_own_cache(step), num_splits)
    small = step.cache.to(torch.float8_e4m3fn)
    pages = torch.empty(2**31 + small[0].numel(), dtype=torch.float8_e4m3fn)
    cache = pages.as_strided((3, *small.shape[1:]), (2**30, *small.stride()[1:]))
    cache[1:].copy_(small[1:3])
    out = run(replace(step, cache=cache), num_splits)
    torch.testing.assert_close(out, run(replace(step, cache=small), num_splits), rtol=0, atol=0)
    torch.testing.assert_close(out, expected, rtol=0.2, atol=0.2)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_layer_that_shares_a_cache_writes_nothing(num_splits: int) -> None:
    step = decode_step(SPEC, [100, 3])
    before = step.cache.clone()
    backend = backend_for(step)
    out = torch.full_like(step.query, float("nan"))
    metadata = metadata_for(step, backend, num_splits, 0)
    backend.for_layer(SPEC).write_and_attend(step.query, None, None, out, step.cache, step.slots, metadata)
    assert torch.equal(step.cache, before)
    torch.testing.assert_close(out.double(), step.reference(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_an_8_bit_cache_with_scales(num_splits: int) -> None:
    """Against the reference on what the cache holds, times the scales."""
    step = decode_step(SPEC, [100, 30])
    backend = backend_for(step)
    layer = backend.for_layer(SPEC, key_scale=0.5, value_scale=0.02)
    cache = (step.cache / torch.tensor([0.5, 0.02])[:, None, None]).to(torch.float8_e4m3fn)
    out = torch.full_like(step.query, float("nan"))
    metadata = metadata_for(step, backend, num_splits, 0)
    layer.write_and_attend(step.query, step.key, step.value, out, cache, step.slots, metadata)
    held = cache.float() * torch.tensor([0.5, 0.02])[:, None, None]
    torch.testing.assert_close(out.double(), replace(step, cache=held).reference(), rtol=2e-5, atol=2e-5)
    written = token_slots(held)[step.slots]
    torch.testing.assert_close(written, torch.stack([step.key, step.value], 1), rtol=0.07, atol=0.01)


@pytest.mark.parametrize(
    ("num_requests", "max_seq_len", "splits"),
    [(1, 100, 1), (1, 511, 1), (1, 512, 2), (1, 10**6, 32), (8, 10**6, 4), (16, 10**6, 2), (17, 10**6, 1), (9, 600, 2)],
)
def test_splits_fill_the_machine_and_no_more(num_requests: int, max_seq_len: int, splits: int) -> None:
    """Two programs for each of 132 multiprocessors, 8 KV heads, and no less than 256 keys for each."""
    spec = AttentionSpec("layer", 32, 8, 64, 0.125)
    assert TritonAttention([spec], torch.float32, CPU, 132).num_kv_splits(num_requests, max_seq_len) == splits


@given(
    num_requests=st.integers(1, 600),
    max_seq_len=st.integers(1, 10**6),
    num_kv_heads=st.integers(1, 16),
    num_multiprocessors=st.integers(1, 300),
)
def test_chosen_splits_fit_the_workspace(
    num_requests: int, max_seq_len: int, num_kv_heads: int, num_multiprocessors: int
) -> None:
    specs = [AttentionSpec(str(heads), heads * 2, heads, 4, 0.5) for heads in (num_kv_heads, 2 * num_kv_heads)]
    backend = TritonAttention(specs, torch.float32, CPU, num_multiprocessors)
    splits = backend.num_kv_splits(num_requests, max_seq_len)
    assert 1 <= splits <= MAX_KV_SPLITS
    starts, lengths = torch.arange(num_requests + 1, dtype=torch.int32), torch.ones(num_requests, dtype=torch.int32)
    launch = AttentionLaunch(1, max_seq_len, splits, is_uniform=True)
    backend.metadata_over(starts, lengths, torch.zeros(num_requests, 1, dtype=torch.int32), launch)
    if splits > 1:
        needed = num_requests * splits * 4 * num_kv_heads
        assert backend.workspaces()["maxima"].numel() >= needed
        assert backend.workspaces()["totals"].numel() >= needed
        assert backend.workspaces()["results"].numel() >= needed * 4


def test_metadata_of_arrays_and_over_tensors() -> None:
    backend = TritonAttention([SPEC], torch.float32, CPU)
    table = np.array([[1, 2], [3, 0]])
    mixed = backend.build_metadata(np.array([0, 1, 4]), np.array([700, 3]), table)
    assert mixed.launch == AttentionLaunch(3, 700, 1, is_uniform=False)
    decodes = backend.build_metadata(np.array([0, 1, 2]), np.array([700, 3]), table)
    assert decodes.launch == AttentionLaunch(1, 700, 2, is_uniform=True)
    for tensor in (decodes.query_start_loc, decodes.seq_lens, decodes.block_table):
        assert tensor.dtype is torch.int32
    over = backend.metadata_over(mixed.query_start_loc, mixed.seq_lens, mixed.block_table, mixed.launch)
    assert over.query_start_loc is mixed.query_start_loc
    assert over.seq_lens is mixed.seq_lens
    assert over.block_table is mixed.block_table


def test_the_workspace_stays_where_it_is() -> None:
    step = decode_step(SPEC, [300])
    backend = backend_for(step)
    before = {name: tensor.data_ptr() for name, tensor in backend.workspaces().items()}
    for num_splits in (2, 8):
        metadata = metadata_for(step, backend, num_splits, 0)
        out = torch.empty_like(step.query)
        backend.for_layer(SPEC).write_and_attend(step.query, None, None, out, step.cache, step.slots, metadata)
    assert {name: tensor.data_ptr() for name, tensor in backend.workspaces().items()} == before


@pytest.mark.parametrize(
    "launch", [AttentionLaunch(2, 900, 2), AttentionLaunch(1, 900, 33), AttentionLaunch(1, 900, 3)]
)
def test_splits_that_cannot_work_are_refused(launch: AttentionLaunch) -> None:
    backend = TritonAttention([SPEC], torch.float32, CPU, num_multiprocessors=2)
    starts, seq_lens, table = (torch.zeros(size, dtype=torch.int32) for size in ((2,), (1,), (1, 1)))
    with pytest.raises(ConfigError, match="KV splits for 1 requests"):
        backend.metadata_over(starts, seq_lens, table, launch)


def test_what_the_kernels_cannot_compute_is_refused() -> None:
    with pytest.raises(ConfigError, match="float64"):
        TritonAttention([SPEC], torch.float64, CPU)
    with pytest.raises(ConfigError, match="no layers"):
        TritonAttention([], torch.float32, CPU)
    step = decode_step(SPEC, [3])
    backend = backend_for(step)
    metadata = metadata_for(step, backend, 1, 0)
    layer = backend.for_layer(SPEC)
    foreign = AttentionMetadata(metadata.query_start_loc, metadata.seq_lens, metadata.block_table)
    with pytest.raises(TypeError, match="TritonAttentionMetadata"):
        layer.write_and_attend(step.query, None, None, step.query.clone(), step.cache, step.slots, foreign)
    for out in (torch.empty(1, 4, 32)[..., ::2], torch.empty(1, 4, 16, dtype=torch.float16)):
        with pytest.raises(ValueError, match="needs an out of that dtype"):
            layer.write_and_attend(step.query, None, None, out, step.cache, step.slots, metadata)
