"""Single checks of tensors to be bound, at their edges."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from compiled_engine.context import CacheLayer, KVCacheSpec, StaticForwardContext, bind_kv_cache
from compiled_engine.context.checks import Pages, device_faults, memory_faults, tensor_faults
from compiled_engine.errors import BindError

SPEC = KVCacheSpec(2, 1, 4, torch.float32)


def sealed_context(*names: str) -> StaticForwardContext:
    context = StaticForwardContext()
    for name in names:
        context.register(name, CacheLayer(name, SPEC))
    context.seal()
    return context


def test_overlap_is_exact_for_pages_at_equal_steps() -> None:
    """Every small placement of two caches, in both orders, against the sets of bytes they have."""
    step = 4
    for start, one_bytes, other_bytes, one_blocks, other_blocks in itertools.product(
        range(18), range(1, step + 1), range(1, step + 1), range(1, 4), range(1, 4)
    ):
        one = Pages("one", 0, one_bytes, step, one_blocks, 0, True)
        other = Pages("other", start, other_bytes, step, other_blocks, 0, True)
        common = _bytes(one) & _bytes(other)
        assert one.overlaps(other) == other.overlaps(one) == bool(common), (one, other)
        assert one.end == max(_bytes(one)) + 1


def _bytes(pages: Pages) -> set[int]:
    return {
        pages.start + block * pages.page_step + place
        for block in range(pages.num_blocks)
        for place in range(pages.page_bytes)
    }


def test_pages_at_unlike_steps_overlap_when_their_ranges_do() -> None:
    wide, narrow = Pages("a", 0, 2, 8, 3, 0, True), Pages("b", 4, 2, 2, 1, 1, True)
    assert wide.overlaps(narrow)
    assert not wide.overlaps(replace(narrow, start=wide.end))


def test_a_dimension_of_one_may_have_any_stride() -> None:
    every_fourth = torch.zeros(SPEC.shape(4))[::4]
    assert every_fourth.stride(0) != SPEC.stride()[0]
    assert tensor_faults("a", SPEC, every_fourth) == []
    assert "strides" in tensor_faults("a", SPEC, torch.zeros(SPEC.shape(8))[::4])[0]


def test_a_transposed_cache_is_refused() -> None:
    shape = SPEC.shape(2)
    cache = torch.zeros(shape[0], shape[2], shape[1], *shape[3:]).transpose(1, 2)
    assert cache.shape == shape
    assert "strides" in tensor_faults("a", SPEC, cache)[0]


@pytest.mark.parametrize("shape", [(), (0, 2, 2, 1, 4), (2, 2, 2, 4), (2, 2, 1, 2, 4), (2, 2, 2, 1, 4, 1)])
def test_shapes_that_are_no_cache(shape: tuple[int, ...]) -> None:
    faults = tensor_faults("a", SPEC, torch.zeros(shape))
    assert len(faults) == 1
    assert f"shape {shape}, expected ('num_blocks', 2, 2, 1, 4)" in faults[0]


def test_sparse_tensors_are_refused() -> None:
    assert "torch.sparse_coo" in tensor_faults("a", SPEC, torch.zeros(SPEC.shape(1)).to_sparse())[0]


def test_several_devices_are_listed_with_their_layers() -> None:
    caches = {"a": torch.zeros(1), "b": torch.zeros(1, device="meta"), "c": torch.zeros(1)}
    assert device_faults(caches) == ["caches lie on several devices, one engine uses one (cpu: 'a', 'c'; meta: 'b')"]
    assert device_faults({"a": caches["a"], "c": caches["c"]}) == []
    context = sealed_context("a", "b")
    with pytest.raises(BindError, match=r"several devices.*cpu: 'a'; meta: 'b'"):
        bind_kv_cache({"a": torch.zeros(SPEC.shape(1)), "b": torch.zeros(SPEC.shape(1), device="meta")}, context)


def test_without_addresses_one_tensor_for_two_layers_is_seen() -> None:
    """As on XLA, where tensors have no address to compare."""
    one, other = (torch.zeros(SPEC.shape(1), device="meta") for _ in range(2))
    assert memory_faults({"a": (SPEC, one), "b": (SPEC, other)}, {}) == []
    assert memory_faults({"a": (SPEC, one), "b": (SPEC, one)}, {}) == [
        "layers 'a' and 'b' get the same tensor without shares_with"
    ]
    assert memory_faults({"a": (SPEC, one)}, {"draft/b": (SPEC, one)}) == [
        "layers 'draft/b' and 'a' get the same tensor without shares_with"
    ]


def test_what_is_bound_elsewhere_is_not_checked_again() -> None:
    cache = torch.zeros(SPEC.shape(1))
    elsewhere = {"x": (SPEC, cache), "y": (SPEC, cache)}
    assert memory_faults({"a": (SPEC, torch.zeros(SPEC.shape(1)))}, elsewhere) == []
    assert len(memory_faults({"a": (SPEC, cache)}, elsewhere)) == 2
