"""Free memory as the machine and its control group tell it, and the blocks that follow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.config import EngineConfig
from compiled_engine.context import CacheKind, CacheLayer, KVCacheSpec, StaticForwardContext
from compiled_engine.errors import OutOfMemoryError
from compiled_engine.runners.memory import DEFAULT_CACHE_LIMIT, available_memory, size_cache_groups

GIB = 2**30


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:       32000000 kB\nMemFree:          500000 kB\nMemAvailable:    8388608 kB\n")
    return path


def version_2(tmp_path: Path, limit: str, used: str, stat: str | None = None) -> Path:
    root = tmp_path / "cgroup"
    root.mkdir()
    (root / "memory.max").write_text(limit)
    (root / "memory.current").write_text(used)
    if stat is not None:
        (root / "memory.stat").write_text(stat)
    return root


def test_without_a_control_group_the_machine_decides(tmp_path: Path, meminfo: Path) -> None:
    assert available_memory(meminfo, tmp_path / "none") == 8 * GIB


def test_a_limit_below_the_machine_counts(tmp_path: Path, meminfo: Path) -> None:
    assert available_memory(meminfo, version_2(tmp_path, f"{4 * GIB}\n", f"{GIB}\n")) == 3 * GIB


def test_a_limit_above_the_machine_does_not(tmp_path: Path, meminfo: Path) -> None:
    assert available_memory(meminfo, version_2(tmp_path, f"{400 * GIB}\n", f"{GIB}\n")) == 8 * GIB


def test_no_limit_is_written_as_a_word(tmp_path: Path, meminfo: Path) -> None:
    assert available_memory(meminfo, version_2(tmp_path, "max\n", f"{GIB}\n")) == 8 * GIB


def test_file_pages_that_the_kernel_gives_up_do_not_count_as_used(tmp_path: Path, meminfo: Path) -> None:
    """Reading a checkpoint fills the page cache of the group; none of it is lost to us."""
    stat = f"anon {GIB}\nfile {2 * GIB}\ninactive_file {2 * GIB}\nactive_file 0\n"
    assert available_memory(meminfo, version_2(tmp_path, f"{4 * GIB}", f"{3 * GIB}", stat)) == 3 * GIB


def test_use_beyond_the_limit_leaves_nothing(tmp_path: Path, meminfo: Path) -> None:
    assert available_memory(meminfo, version_2(tmp_path, f"{GIB}", f"{2 * GIB}")) == 0


def test_control_groups_of_version_1(tmp_path: Path, meminfo: Path) -> None:
    folder = tmp_path / "cgroup" / "memory"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{2 * GIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{GIB}\n")
    assert available_memory(meminfo, tmp_path / "cgroup") == GIB
    (folder / "memory.stat").write_text(f"cache {GIB}\ninactive_file 1\ntotal_inactive_file {GIB // 2}\n")
    assert available_memory(meminfo, tmp_path / "cgroup") == GIB + GIB // 2
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert available_memory(meminfo, tmp_path / "cgroup") == 8 * GIB


def test_without_meminfo_free_pages_are_counted(tmp_path: Path) -> None:
    assert 0 < available_memory(tmp_path / "none", tmp_path / "none") < 2**50


def test_this_machine_has_some_memory() -> None:
    assert available_memory() > 0


FULL = KVCacheSpec(16, 2, 8, torch.float32)
BLOCK_BYTES = 2 * FULL.page_bytes


def sliding(window: int) -> KVCacheSpec:
    return KVCacheSpec(16, 2, 8, torch.float32, kind=CacheKind.SLIDING_WINDOW, sliding_window=window)


def blocks(
    free: int = 64 * GIB, max_model_len: int = 100, specs: Sequence[KVCacheSpec] = (FULL, FULL), **config: Any
) -> list[int]:
    """Blocks of each cache group, full attention first, then windows from small to large."""
    context = StaticForwardContext()
    for index, spec in enumerate(specs):
        context.register(f"layers.{index}", CacheLayer(f"layers.{index}", spec))
    context.seal()
    sizes = size_cache_groups(EngineConfig(**config), context, max_model_len, free)
    assert [size.sliding_window for size in sizes] == [group.sliding_window for group in context.groups]
    return [size.num_blocks for size in sizes]


def test_the_default_holds_every_request_at_full_length_and_the_reserved_block() -> None:
    assert blocks(max_num_seqs=3, max_model_len=100) == [3 * 7 + 1]
    assert blocks(max_num_seqs=3, max_model_len=96) == [3 * 6 + 1]
    assert blocks(max_num_seqs=1, max_model_len=1) == [2]


def test_the_default_takes_at_most_half_of_the_free_memory_and_four_gib() -> None:
    assert blocks(free=20 * BLOCK_BYTES, max_num_seqs=64) == [10]
    (count,) = blocks(max_num_seqs=10**6, max_model_len=10**6)
    assert DEFAULT_CACHE_LIMIT - 2 * BLOCK_BYTES < count * BLOCK_BYTES <= DEFAULT_CACHE_LIMIT


@pytest.mark.parametrize(("amount", "expected"), [(BLOCK_BYTES * 5, 5), (BLOCK_BYTES * 6 - 1, 5), ("1MiB", 256)])
def test_a_given_amount_is_used(amount: int | str, expected: int) -> None:
    assert blocks(kv_cache_memory=amount) == [expected]


def test_layers_that_share_a_cache_cost_nothing() -> None:
    sharer = KVCacheSpec(16, 2, 8, torch.float32, shares_with="layers.0")
    assert blocks(specs=(FULL, sharer), kv_cache_memory=FULL.page_bytes * 7) == [7]


def test_more_than_is_free_is_refused_with_both_amounts() -> None:
    with pytest.raises(OutOfMemoryError, match=r"kv_cache_memory is 1073741824 bytes.* 1000000 are free"):
        blocks(free=1_000_000, kv_cache_memory="1GiB")


@pytest.mark.parametrize("config", [{"kv_cache_memory": 2 * BLOCK_BYTES - 1}, {}])
def test_less_than_two_blocks_is_refused_with_the_setting(config: dict[str, Any]) -> None:
    with pytest.raises(OutOfMemoryError, match=rf"smallest size is {2 * BLOCK_BYTES}.*kv_cache_memory.*block_size"):
        blocks(free=4 * BLOCK_BYTES - 1, **config)


def test_what_a_window_needs_does_not_grow_with_the_length_of_requests() -> None:
    short = blocks(specs=(FULL, sliding(32)), max_num_seqs=2, max_model_len=1000, max_num_batched_tokens=64)
    long = blocks(specs=(FULL, sliding(32)), max_num_seqs=2, max_model_len=10_000, max_num_batched_tokens=64)
    assert long[0] > 9 * short[0]
    assert long[1] == short[1]
    # A window of 32 lies in three blocks of 16 at most; both requests, this step's tokens and block 0 besides.
    assert short[1] >= 2 * 3 + 64 // 16 + 1


specs_of_a_model = st.lists(
    st.one_of(st.just(FULL), st.builds(sliding, st.sampled_from([1, 16, 100, 4096]))), min_size=1, max_size=6
)


@given(
    free=st.integers(0, 2**36),
    max_model_len=st.integers(1, 5000),
    max_num_seqs=st.integers(1, 500),
    specs=specs_of_a_model,
    memory=st.one_of(st.none(), st.integers(1, 2**34)),
)
def test_blocks_fit_into_their_budget(
    free: int, max_model_len: int, max_num_seqs: int, specs: list[KVCacheSpec], memory: int | None
) -> None:
    try:
        counts = blocks(free, max_model_len, specs, max_num_seqs=max_num_seqs, kv_cache_memory=memory)
    except OutOfMemoryError:
        # Refused only where not even a window and the reserved block of each group would fit.
        longest = max([spec.sliding_window or 16 for spec in specs])
        assert (memory is not None and memory > free) or (memory or free // 2) < len(specs) * FULL.page_bytes * (
            2 + -(-min(longest, max_model_len) // 16) + 1
        )
        return
    windows = sorted({spec.sliding_window for spec in specs}, key=lambda window: window or 0)
    size = 0
    for window, count in zip(windows, counts, strict=True):
        members = sum(spec.sliding_window == window for spec in specs)
        size += count * members * FULL.page_bytes
        assert count >= 2
        if window is None and memory is None:
            # With a size that was asked for, what requests leave over keeps prefixes.
            assert count <= max_num_seqs * -(-max_model_len // 16) + 1
    assert size <= (memory if memory is not None else min(DEFAULT_CACHE_LIMIT, free // 2))
    assert size <= free
