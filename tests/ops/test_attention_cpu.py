"""The CPU backend against the dense reference, over cached lengths, chunks, windows, block sizes and dtypes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_steps import Request, Step, make_step, steps
from compiled_engine.context import AttentionMetadata, key_cache, token_slots, value_cache
from compiled_engine.ops.attention import AttentionSpec
from compiled_engine.ops.cpu import CpuAttention
from compiled_engine.ops.cpu.attention import CpuAttentionMetadata
from compiled_engine.ops.cpu.build import load_kernels
from kernel_folder import KERNELS


@given(step=steps())
def test_equals_the_reference(step: Step) -> None:
    step.check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@given(data=st.data())
def test_equals_the_reference_in_half_precision(dtype: torch.dtype, data: st.DataObject) -> None:
    data.draw(steps(dtype)).check()


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 70])
def test_decodes_of_very_unlike_lengths(window: int | None, soft_cap: float | None) -> None:
    spec = AttentionSpec("layer", 4, 2, 8, 0.3, window, soft_cap)
    cached = [0, 1, 62, 63, 64, 65, 127, 128, 129, 300, 1100]
    make_step(spec, [Request(n, 1) for n in reversed(cached)], 1, 16, torch.float32, seed=5).check()


@given(step=steps(), poison=st.sampled_from([float("nan"), float("inf"), 1e30]))
def test_what_no_query_sees_cannot_reach_a_row(step: Step, poison: float) -> None:
    """NaN in unused slots, slots before every window, block 0 and all padding rows leaves real rows bit-identical."""
    clean = replace(step, cache=step.cache.clone()).run()[: step.num_real_rows]
    used = step.used_slots()
    kept = token_slots(step.cache)[used].clone()
    step.cache.fill_(poison)
    token_slots(step.cache)[used] = kept
    for tensor in (step.query, step.key, step.value):
        tensor[step.num_real_rows :] = poison
    poisoned = step.run()[: step.num_real_rows]
    assert torch.isfinite(poisoned).all()
    assert torch.equal(clean, poisoned)


@given(step=steps(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_what_is_written_is_read_back_exactly(step: Step, dtype: torch.dtype) -> None:
    query, key, value, cache = (tensor.to(dtype) for tensor in (step.query, step.key, step.value, step.cache))
    before = token_slots(cache.clone())
    replace(step, query=query, key=key, value=value, cache=cache).run()
    block_size = cache.shape[1]
    for row, slot in enumerate(step.slots[: step.num_real_rows].tolist()):
        assert torch.equal(key_cache(cache)[slot // block_size, slot % block_size], key[row])
        assert torch.equal(value_cache(cache)[slot // block_size, slot % block_size], value[row])
    untouched = torch.ones(before.shape[0], dtype=torch.bool)
    untouched[step.slots] = False
    assert torch.equal(token_slots(cache)[untouched], before[untouched])


@given(step=steps())
def test_without_keys_nothing_is_written(step: Step) -> None:
    """What a layer that shares another's cache does."""
    before = step.cache.clone()
    out = step.run(writes=False)
    assert torch.equal(step.cache, before)
    torch.testing.assert_close(out.double(), step.reference(), rtol=2e-5, atol=2e-5)


def test_requests_without_rows_are_passed_over() -> None:
    """A step may name a request for which nothing is scheduled: it has no rows to fill."""
    spec = AttentionSpec("layer", 2, 1, 4, 0.5)
    make_step(spec, [Request(3, 1), Request(4, 0), Request(0, 3)], 0, 2, torch.float32, seed=1).check()


def test_rows_that_are_parts_of_wider_ones() -> None:
    """Queries, keys and values as a merged projection leaves them: columns of one tensor."""
    spec = AttentionSpec("layer", 4, 2, 16, 0.25)
    step = make_step(spec, [Request(70, 1), Request(5, 9)], 0, 4, torch.float32, seed=3)
    merged = torch.cat([step.query, step.key, step.value], dim=1)
    query, key, value = merged.split([4, 2, 2], dim=1)
    expected = replace(step, cache=step.cache.clone()).run()
    assert torch.equal(replace(step, query=query, key=key, value=value).run(), expected)


def test_rows_that_are_not_dense_in_their_last_dimension() -> None:
    spec = AttentionSpec("layer", 4, 2, 16, 0.25)
    step = make_step(spec, [Request(70, 1), Request(5, 9)], 0, 4, torch.float32, seed=3)
    expected = replace(step, cache=step.cache.clone()).run()
    query, key, value = (
        tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (step.query, step.key, step.value)
    )
    assert torch.equal(replace(step, query=query, key=key, value=value).run(), expected)


def test_blocks_may_lie_further_apart_than_they_are_long() -> None:
    spec = AttentionSpec("layer", 4, 2, 16, 0.25)
    step = make_step(spec, [Request(70, 1), Request(5, 9)], 0, 4, torch.float32, seed=3)
    expected = replace(step, cache=step.cache.clone()).run()
    num_blocks, *block = step.cache.shape
    pages = torch.full((num_blocks, step.cache[0].numel() + 24), float("nan"))
    cache = pages[:, :-24].view(num_blocks, *block).copy_(step.cache)
    assert torch.equal(replace(step, cache=cache).run(), expected)
    assert pages[:, -24:].isnan().all()


def test_the_metadata_keeps_what_the_kernel_reads() -> None:
    """Its tensors share the arrays' memory where these are int32 and dense, and hold a copy where they are not."""
    spec = AttentionSpec("layer", 2, 1, 4, 0.5, sliding_window=3)
    step = make_step(spec, [Request(3, 1), Request(0, 3)], 1, 2, torch.float32, seed=1)
    backend = CpuAttention(torch.float32, load_kernels(KERNELS))
    table = step.block_table.astype(np.int64)
    metadata = backend.build_metadata(step.query_start_loc, step.seq_lens, table)
    assert metadata.query_start_loc.tolist() == step.query_start_loc.tolist()
    assert metadata.seq_lens.tolist() == [4, 3, 1]
    assert metadata.block_table.tolist() == step.block_table.tolist()
    assert metadata.block_table.data_ptr() == metadata.step.block_table
    shared = backend.build_metadata(step.query_start_loc, step.seq_lens, step.block_table)
    assert shared.step.block_table == step.block_table.ctypes.data


@pytest.mark.parametrize("fault", ["dtype", "out"])
def test_what_the_kernel_would_misread_is_refused(fault: str) -> None:
    spec = AttentionSpec("layer", 2, 1, 4, 0.5)
    step = make_step(spec, [Request(3, 1), Request(0, 3)], 0, 2, torch.float32, seed=1)
    backend = CpuAttention(torch.float32, load_kernels(KERNELS))
    query = step.query.double() if fault == "dtype" else step.query
    out = torch.empty(4, 2, 8)[..., ::2] if fault == "out" else torch.empty(4, 2, 4)
    metadata = backend.build_metadata(step.query_start_loc, step.seq_lens, step.block_table)
    with pytest.raises(ValueError, match="needs queries and a dense out"):
        backend.for_layer(spec).write_and_attend(query, None, None, out, step.cache, step.slots, metadata)


def test_metadata_of_another_backend_is_refused() -> None:
    foreign = AttentionMetadata(torch.tensor([0, 1]), torch.tensor([1]), torch.tensor([[0]]))
    layer = CpuAttention(torch.float32, load_kernels(KERNELS)).for_layer(AttentionSpec("layer", 1, 1, 4, 0.5))
    query, cache = torch.zeros(1, 1, 4), torch.zeros(1, 1, 2, 1, 4)
    with pytest.raises(TypeError, match="CpuAttentionMetadata"):
        layer.write_and_attend(query, query, query, query.clone(), cache, torch.zeros(1, dtype=torch.int64), foreign)
    assert issubclass(CpuAttentionMetadata, AttentionMetadata)
