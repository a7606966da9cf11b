"""Storing keys and values with the Triton kernel, for every type of cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_engine.context import token_slots
from compiled_engine.ops.triton.cache_write import write_to_cache
from triton_interpreter import mended_interpreter

pytestmark = pytest.mark.usefixtures("_mended")
FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def _mended() -> Iterator[None]:
    with mended_interpreter():
        yield


@settings(max_examples=30)
@given(
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    cache_dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, FP8]),
    block_size=st.sampled_from([1, 5, 16]),
    heads=st.sampled_from([(1, 8), (2, 24), (3, 80), (16, 96)]),
    data=st.data(),
)
def test_each_token_goes_to_its_slot_and_nothing_else_changes(
    dtype: torch.dtype, cache_dtype: torch.dtype, block_size: int, heads: tuple[int, int], data: st.DataObject
) -> None:
    num_kv_heads, head_dim = heads
    slots = torch.tensor(data.draw(st.lists(st.integers(0, 4 * block_size - 1), unique=True, max_size=6, min_size=1)))
    key, value = torch.randn(2, len(slots), num_kv_heads, head_dim).to(dtype)
    cache = torch.randn(4, block_size, 2, num_kv_heads, head_dim).to(cache_dtype)
    expected = token_slots(cache).float()
    write_to_cache(key, value, cache, slots)
    expected[slots] = torch.stack([key, value], dim=1).to(cache_dtype).float()
    assert torch.equal(token_slots(cache).float(), expected)


def test_scales_divide_and_an_8_bit_cache_holds_its_largest_number_at_most() -> None:
    numbers = torch.tensor([0.0, 1.0, -3.0, 448.0, 449.0, 1e6, -1e6, float("inf")])
    key, value = numbers.view(1, 1, 8), torch.full((1, 1, 8), float("nan"))
    cache = torch.zeros(1, 1, 2, 1, 8, dtype=FP8)
    write_to_cache(key, value, cache, torch.tensor([0]), key_scale=2.0, value_scale=0.5)
    assert cache[0, 0, 0, 0].float().tolist() == [0.0, 0.5, -1.5, 224.0, 224.0, 448.0, -448.0, 448.0]
    assert cache[0, 0, 1, 0].float().isnan().all()


def test_keys_and_values_have_scales_of_their_own() -> None:
    key, value = torch.randn(2, 3, 2, 16)
    cache = torch.zeros(1, 16, 2, 2, 16)
    write_to_cache(key, value, cache, torch.tensor([2, 9, 4]), key_scale=4.0, value_scale=0.25)
    stored = token_slots(cache)[torch.tensor([2, 9, 4])]
    assert torch.equal(stored, torch.stack([key / 4.0, value * 4.0], dim=1))


def test_rows_that_are_parts_of_wider_ones_and_pages_with_padding() -> None:
    """Values as a merged projection leaves them, keys as a rotation does."""
    key, value = torch.randn(5, 2, 16), torch.randn(5, 6, 16)[:, 4:]
    pages = torch.full((3, 4 * 64 + 8), float("nan"))
    cache = pages[:, :-8].view(3, 4, 2, 2, 16)
    slots = torch.tensor([11, 0, 5, 7, 4])
    write_to_cache(key, value, cache, slots)
    for row, slot in enumerate(slots.tolist()):
        assert torch.equal(cache[slot // 4, slot % 4], torch.stack([key[row], value[row]]))
    assert pages[:, -8:].isnan().all()
