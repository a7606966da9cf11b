"""Who owns which cache.

The static forward context names the cache layers of an engine; ``bind_kv_cache`` gives each its tensor; the forward
context of a step tells the layers where this step's tokens are. This room imports torch and nothing else of ours.
"""

from __future__ import annotations

from .binding import allocate_kv_caches, bind_kv_cache, layer_order, unbind_kv_cache
from .forward_context import (
    AttentionMetadata,
    ForwardContext,
    StepKind,
    get_forward_context,
    set_forward_context,
)
from .spec import CacheKind, KVCacheSpec, key_cache, token_slots, value_cache
from .static_context import CacheLayer, ContextState, StaticForwardContext

__all__ = [
    "AttentionMetadata",
    "CacheKind",
    "CacheLayer",
    "ContextState",
    "ForwardContext",
    "KVCacheSpec",
    "StaticForwardContext",
    "StepKind",
    "allocate_kv_caches",
    "bind_kv_cache",
    "get_forward_context",
    "key_cache",
    "layer_order",
    "set_forward_context",
    "token_slots",
    "unbind_kv_cache",
    "value_cache",
]
