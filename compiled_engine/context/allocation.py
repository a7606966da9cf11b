"""Allocating the caches of a model: the one place that does it."""

from __future__ import annotations

import mmap
from collections.abc import Mapping

import torch

from compiled_engine.errors import ConfigError

from .sharing import sharing_roots
from .spec import KVCacheSpec


def allocate_kv_caches(
    specs: Mapping[str, KVCacheSpec], num_blocks: int, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """A zeroed cache of ``num_blocks`` blocks for every layer that owns one; sharers get their target's tensor.

    Every owner gets memory of its own. Zeroed, so that a slot that was never written holds a number and never a NaN
    left by an earlier owner. Raises ``ConfigError`` for fewer than one block and ``BindError`` for faulty sharing.
    """
    if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or num_blocks < 1:
        raise ConfigError(f"num_blocks is {num_blocks!r}: give a whole number of at least 1")
    roots = sharing_roots(specs)
    owned = {root: _zeroed(specs[root], num_blocks, torch.device(device)) for root in dict.fromkeys(roots.values())}
    return {name: owned[root] for name, root in roots.items()}


def _zeroed(spec: KVCacheSpec, num_blocks: int, device: torch.device) -> torch.Tensor:
    num_bytes = num_blocks * spec.padded_page_bytes
    if device.type == "cpu":
        # Anonymous pages are zero without being touched, so a large cache costs memory only where it is used.
        pages = mmap.mmap(-1, num_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # A request's blocks lie all over the cache: with small pages, every block would cost page walks.
            pages.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(pages, dtype=spec.dtype)
    else:
        memory = torch.zeros(num_bytes // spec.dtype.itemsize, dtype=spec.dtype, device=device)
    if not spec.page_padding:
        return memory.view(spec.shape(num_blocks))
    return memory.as_strided(spec.shape(num_blocks), spec.stride())
