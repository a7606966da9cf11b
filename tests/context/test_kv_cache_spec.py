"""Sizes, layout and padding of a KV cache, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compiled_engine.context import (
    CacheKind,
    KVCacheSpec,
    allocate_kv_caches,
    key_cache,
    token_slots,
    unify_page_sizes,
    value_cache,
)
from compiled_engine.errors import ConfigError

SPEC = KVCacheSpec(4, 2, 8, torch.float32)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 0},
        {"num_kv_heads": -1},
        {"head_dim": True},
        {"head_dim": 8.0},
        {"page_padding": -4},
        {"page_padding": 3},
        {"sliding_window": 4},
        {"kind": CacheKind.SLIDING_WINDOW},
        {"kind": CacheKind.SLIDING_WINDOW, "sliding_window": 0},
        {"kind": CacheKind.CROSS, "sliding_window": 2},
    ],
)
def test_sizes_that_cannot_work_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(changes))) if "kind" not in changes else "sliding_window"):
        replace(SPEC, **changes)  # type: ignore[arg-type]


def test_layout_is_that_of_a_contiguous_tensor() -> None:
    cache = torch.zeros(SPEC.shape(3))
    assert cache.stride() == SPEC.stride()
    assert cache[0].nbytes == SPEC.page_bytes == SPEC.padded_page_bytes


def test_padded_layout_is_that_of_blocks_cut_from_wider_rows() -> None:
    spec = replace(SPEC, page_padding=12)
    rows = torch.zeros(3, SPEC.page_bytes // 4 + 3)
    blocks = rows[:, : SPEC.page_bytes // 4].unflatten(1, SPEC.shape(1)[1:])
    cache = allocate_kv_caches({"a": spec}, 3)["a"]
    assert (cache.shape, cache.stride()) == (blocks.shape, blocks.stride())
    assert cache.stride() == spec.stride()
    assert cache.untyped_storage().nbytes() == rows.nbytes == 3 * spec.padded_page_bytes


def test_views_of_keys_values_and_slots() -> None:
    cache = allocate_kv_caches({"a": SPEC}, 3)["a"]
    key_cache(cache)[2, 1] = 1
    value_cache(cache)[2, 1] = 2
    token = token_slots(cache)[2 * SPEC.block_size + 1]
    assert torch.equal(token, torch.stack((torch.ones(2, 8), torch.full((2, 8), 2.0))))
    assert cache.count_nonzero() == token.numel()


def test_padded_pages_have_no_slots() -> None:
    cache = allocate_kv_caches({"a": replace(SPEC, page_padding=4)}, 2)["a"]
    with pytest.raises(ConfigError, match="padded"):
        token_slots(cache)


@pytest.mark.parametrize("num_blocks", [0, -1, 1.5, True])
def test_allocating_no_blocks_is_refused(num_blocks: int) -> None:
    with pytest.raises(ConfigError, match="num_blocks"):
        allocate_kv_caches({"a": SPEC}, num_blocks)


def test_allocated_caches_are_zero_and_writable() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        cache = allocate_kv_caches({"a": replace(SPEC, dtype=dtype)}, 2)["a"]
        assert cache.dtype == dtype
        assert not cache.any()
        cache.fill_(1)
        assert cache.all()


def test_sharers_are_given_their_owners_tensor() -> None:
    specs = {"c": replace(SPEC, shares_with="b"), "b": replace(SPEC, shares_with="a"), "a": SPEC, "d": SPEC}
    caches = allocate_kv_caches(specs, 1)
    assert caches["c"] is caches["b"] is caches["a"]
    assert caches["d"] is not caches["a"]


def test_unifying_page_sizes() -> None:
    small, large = KVCacheSpec(1, 1, 1, torch.float32), KVCacheSpec(1, 1, 5, torch.bfloat16)
    unified = unify_page_sizes({"small": small, "large": large})
    # 20 bytes is a whole number of elements of either type.
    assert {spec.padded_page_bytes for spec in unified.values()} == {20}
    assert unified["small"].page_padding == 12
    assert unify_page_sizes(unified) == unified
    assert unify_page_sizes({"small": small}) == {"small": small}
    assert unify_page_sizes({}) == {}
    assert unify_page_sizes({"small": small}, at_least=18)["small"].padded_page_bytes == 20


def test_a_page_of_odd_size_is_rounded_up_to_whole_elements() -> None:
    specs = {"small": KVCacheSpec(1, 1, 1, torch.float32), "large": KVCacheSpec(1, 1, 3, torch.float16)}
    assert specs["large"].page_bytes == 12
    specs["odd"] = KVCacheSpec(1, 1, 7, torch.float16, page_padding=2)
    assert specs["odd"].padded_page_bytes == 30
    assert {spec.padded_page_bytes for spec in unify_page_sizes(specs).values()} == {32}
