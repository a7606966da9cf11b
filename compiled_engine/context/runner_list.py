"""The list of caches that a runner keeps when its graphs take caches as arguments (XLA): all that is read from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compiled_engine.errors import ContextError


@dataclass(frozen=True)
class CacheGeometry:
    """Sizes that all caches of a runner's list have in common."""

    num_blocks: int
    block_size: int
    num_kv_heads: int


def is_profile_run(runner_kv_caches: Sequence[torch.Tensor]) -> bool:
    """Whether a step runs to measure memory: the list is empty until ``bind_kv_cache`` has filled it.

    For the runner that keeps a list. Others know it from ``ForwardContext.step_kind``.
    """
    return len(runner_kv_caches) == 0


def cache_geometry(runner_kv_caches: Sequence[torch.Tensor]) -> CacheGeometry:
    """Number and size of blocks and number of KV heads, from caches ``[num_blocks, block_size, 2, heads, head_dim]``.

    Raises ``ContextError`` in a profile run, when there is no cache to read from, and for caches that differ.
    """
    if is_profile_run(runner_kv_caches):
        raise ContextError("runner_kv_caches is empty: bind_kv_cache has not filled it yet, this is a profile run")
    found = sorted({(cache.shape[0], cache.shape[1], cache.shape[3]) for cache in runner_kv_caches})
    if len(found) > 1:
        raise ContextError(
            f"the caches have unlike (num_blocks, block_size, num_kv_heads): {', '.join(map(str, found))}"
        )
    return CacheGeometry(*found[0])
