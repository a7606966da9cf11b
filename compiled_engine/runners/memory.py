"""How much memory there is, and how many cache blocks that makes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compiled_engine.config import EngineConfig
from compiled_engine.context import CacheGroup, StaticForwardContext
from compiled_engine.errors import OutOfMemoryError
from compiled_engine.runners.base import CacheGroupLimits

DEFAULT_CACHE_LIMIT = 4 * 2**30
_FREE_SHARE = 0.5
# Limit, use and statistics of a control group, and the statistic that counts cached file pages: version 2, version 1.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def available_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes this process can still take: what the machine has free, or less where its control group sets a limit."""
    free = _machine_free(meminfo)
    for limit_name, used_name, statistics_name, cached_name in _CGROUP_FILES:
        limit, used = _number(cgroup / limit_name), _number(cgroup / used_name)
        if limit is not None and used is not None:
            # Pages of files that were read once count as used, but the kernel gives them up when memory is asked for.
            used = max(0, used - _statistic(cgroup / statistics_name, cached_name))
            free = min(free, max(0, limit - used))
    return free


def size_cache_groups(
    config: EngineConfig, context: StaticForwardContext, max_model_len: int, free: int, most: int | None = None
) -> tuple[CacheGroupLimits, ...]:
    """Blocks of every cache group of a sealed context, the reserved block 0 included.

    Together they take ``config.kv_cache_memory`` when it is set, else what ``max_num_seqs`` requests of
    ``max_model_len`` tokens need, at most ``most`` bytes (None: 4 GiB, and half of ``free`` bytes). What a sliding
    window needs does not grow with the length of requests, so such groups are served first, with at most half of the
    memory where others need the rest. Raises ``OutOfMemoryError`` naming the setting and the amount.
    """
    needs = [_need(config, context, group, max_model_len) for group in context.groups]
    smallest = sum(need.least * need.block_bytes for need in needs)
    wanted = sum(need.most * need.block_bytes for need in needs)
    budget = _budget(config, wanted, free, min(DEFAULT_CACHE_LIMIT, int(free * _FREE_SHARE)) if most is None else most)
    if budget < smallest:
        raise OutOfMemoryError(
            f"the KV cache may take {budget} bytes, and its smallest size is {smallest} with blocks of "
            f"{config.block_size} tokens: raise kv_cache_memory or lower block_size"
        )
    sliding = [need for need in needs if need.group.sliding_window is not None]
    others = [need for need in needs if need.group.sliding_window is None]
    share = budget // 2 if others else budget
    share = min(share, budget - sum(need.least * need.block_bytes for need in others))
    blocks = _divide(sliding, share)
    blocks |= _divide(others, budget - sum(blocks[need.group.index] * need.block_bytes for need in sliding))
    return tuple(CacheGroupLimits(blocks[group.index], group.sliding_window) for group in context.groups)


def smallest_cache_groups(
    config: EngineConfig, context: StaticForwardContext, max_model_len: int
) -> tuple[CacheGroupLimits, ...]:
    """The fewest blocks of every cache group with which anything runs."""
    needs = [_need(config, context, group, max_model_len) for group in context.groups]
    return tuple(CacheGroupLimits(need.least, need.group.sliding_window) for need in needs)


@dataclass(frozen=True)
class _Need:
    """Bytes of one block over a group's layers; ``least`` blocks to run at all, ``most`` that can ever be used."""

    group: CacheGroup
    block_bytes: int
    least: int
    most: int


def _need(config: EngineConfig, context: StaticForwardContext, group: CacheGroup, max_model_len: int) -> _Need:
    specs = [spec for name in group.layer_names if (spec := context[name].spec) is not None]
    block_bytes = sum(spec.padded_page_bytes for spec in specs if spec.shares_with is None)
    per_request = -(-max_model_len // config.block_size)
    least, most = 2, config.max_num_seqs * per_request + 1
    if config.kv_cache_memory is not None:
        # Room beyond what running requests need keeps prefixes for later ones.
        most = max(most, int(config.kv_cache_memory) // block_bytes)
    if group.sliding_window is not None:
        # A window that starts inside a block reaches into one block more.
        window = min(per_request, -(-group.sliding_window // config.block_size) + 1)
        least = window + 1
        in_flight = -(-config.max_num_batched_tokens // config.block_size) + config.max_num_seqs
        most = max(least, min(config.max_num_seqs * per_request, config.max_num_seqs * window + in_flight) + 1)
    return _Need(group, block_bytes, least, most)


def _budget(config: EngineConfig, wanted: int, free: int, most: int) -> int:
    if config.kv_cache_memory is None:
        return min(wanted, most)
    budget = int(config.kv_cache_memory)
    if budget > free:
        raise OutOfMemoryError(f"kv_cache_memory is {budget} bytes, and {free} are free: lower it to at most {most}")
    return budget


def _divide(needs: Sequence[_Need], budget: int) -> dict[int, int]:
    """Blocks by group index: the least for each, and of the rest a share by what each could use."""
    rest = budget - sum(need.least * need.block_bytes for need in needs)
    extra = sum((need.most - need.least) * need.block_bytes for need in needs)
    part = min(1.0, max(0, rest) / extra) if extra else 0.0
    return {need.group.index: need.least + int((need.most - need.least) * part) for need in needs}


def _machine_free(meminfo: Path) -> int:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # no such file outside Linux: the count of free pages is the next best
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _number(path: Path) -> int | None:
    """The number in a control file; None where there is no such file or no limit."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _statistic(path: Path, name: str) -> int:
    """The entry ``name`` of a control group's statistics; 0 where there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split() for line in lines if len(line.split()) == 2)
    return int(values.get(name, 0))
