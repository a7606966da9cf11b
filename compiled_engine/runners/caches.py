"""The attention layers of a model in a static forward context, and their caches by group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from compiled_engine.context import (
    CacheLayer,
    KVCacheSpec,
    StaticForwardContext,
    allocate_kv_caches,
    bind_kv_cache,
    declared_specs,
    token_slots,
)
from compiled_engine.ops.attention import AttentionSpec
from compiled_engine.runners.base import CacheGroupLimits


def register_attention_layers(
    static_context: StaticForwardContext,
    layers: Iterable[AttentionSpec],
    block_size: int,
    dtype: torch.dtype,
    make_layer: Callable[[AttentionSpec, KVCacheSpec], CacheLayer],
) -> None:
    """Register what ``make_layer`` makes of each of ``layers`` and seal the context, which forms the cache groups."""
    for spec in layers:
        static_context.register(spec.layer_name, make_layer(spec, spec.cache_spec(block_size, dtype)))
    # Every layer owns its memory, so pages of one size would cost memory and gain nothing.
    static_context.seal(pad_pages=False)


def allocate_cache_groups(
    static_context: StaticForwardContext,
    cache_groups: Sequence[CacheGroupLimits],
    device: torch.device | str = "cpu",
) -> dict[str, torch.Tensor]:
    """New, zeroed caches for every layer of a sealed context, by layer name; not bound to anything."""
    specs = declared_specs(static_context)
    caches: dict[str, torch.Tensor] = {}
    for group, limits in zip(static_context.groups, cache_groups, strict=True):
        members = {name: specs[name] for name in group.layer_names}
        caches |= allocate_kv_caches(members, limits.num_blocks, device)
    return caches


def bind_new_caches(
    static_context: StaticForwardContext,
    cache_groups: Sequence[CacheGroupLimits],
    device: torch.device | str = "cpu",
) -> int:
    """Allocate caches for every layer of a sealed context and bind them; returns their bytes."""
    caches = allocate_cache_groups(static_context, cache_groups, device)
    bind_kv_cache(caches, static_context)
    return cache_bytes(caches.values())


def cache_bytes(caches: Iterable[torch.Tensor]) -> int:
    """Bytes of ``caches``, of which a shared one may stand there several times."""
    return sum({id(cache): cache.nbytes for cache in caches}.values())


def scrub_reserved_block(static_context: StaticForwardContext, block_size: int) -> None:
    """Whatever padding left in the reserved block must not outlive the warm-up (vllm#57156)."""
    for layer in static_context.values():
        token_slots(layer.kv_cache)[:block_size].zero_()
