"""How much memory there is, and how many cache blocks that makes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from compiled_engine.config import EngineConfig
from compiled_engine.context import KVCacheSpec
from compiled_engine.errors import OutOfMemoryError

DEFAULT_CACHE_LIMIT = 4 * 2**30
_FREE_SHARE = 0.5
# Limit and use of a control group, version 2 and version 1.
_CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def available_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes this process can still take: what the machine has free, or less where its control group sets a limit."""
    free = _machine_free(meminfo)
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, used = _number(cgroup / limit_name), _number(cgroup / used_name)
        if limit is not None and used is not None:
            free = min(free, max(0, limit - used))
    return free


def num_cache_blocks(config: EngineConfig, specs: Iterable[KVCacheSpec], max_model_len: int, free: int) -> int:
    """Blocks of the KV cache, the reserved block 0 included.

    ``config.kv_cache_memory`` when it is set, else what ``max_num_seqs`` requests of ``max_model_len`` tokens need, at
    most 4 GiB and at most half of ``free`` bytes. Raises ``OutOfMemoryError`` naming the setting and the amount.
    """
    block_bytes = sum(spec.page_bytes for spec in specs if spec.shares_with is None)
    blocks_per_request = -(-max_model_len // config.block_size)
    if config.kv_cache_memory is not None:
        budget = int(config.kv_cache_memory)
        if budget > free:
            raise OutOfMemoryError(
                f"kv_cache_memory is {budget} bytes, but only {free} are free: lower it to {int(free * _FREE_SHARE)} or less"
            )
    else:
        wanted = (config.max_num_seqs * blocks_per_request + 1) * block_bytes
        budget = min(wanted, DEFAULT_CACHE_LIMIT, int(free * _FREE_SHARE))
    num_blocks = budget // block_bytes
    if num_blocks < 2:
        raise OutOfMemoryError(
            f"the KV cache may take {budget} bytes, and its smallest size is {2 * block_bytes} (two blocks of "
            f"{config.block_size} tokens): raise kv_cache_memory or lower block_size"
        )
    return num_blocks


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
