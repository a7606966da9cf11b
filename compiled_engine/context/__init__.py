"""Who owns which cache.

The static forward context names the cache layers of an engine; ``bind_kv_cache`` gives each its tensor; the forward
context of a step tells the layers where this step's tokens are. This room imports torch and nothing else of ours.
"""

from __future__ import annotations

from .addresses import BoundAddresses, addresses
from .allocation import allocate_kv_caches
from .binding import bind_kv_cache, unbind_kv_cache
from .describe import ContextDescription, LayerDescription, describe
from .forward_context import (
    AttentionMetadata,
    ForwardContext,
    StepKind,
    get_forward_context,
    set_forward_context,
)
from .groups import CacheGroup, project_groups, unify_page_sizes
from .layer import CacheLayer, ContextState, declared_specs
from .order import layer_index, layer_order
from .runner_list import CacheGeometry, cache_geometry, is_profile_run
from .sharing import resolve_shared, sharing_roots
from .spec import CacheKind, KVCacheSpec, key_cache, token_slots, value_cache
from .static_context import StaticForwardContext, cache_groups

__all__ = [
    "AttentionMetadata",
    "BoundAddresses",
    "CacheGeometry",
    "CacheGroup",
    "CacheKind",
    "CacheLayer",
    "ContextDescription",
    "ContextState",
    "ForwardContext",
    "KVCacheSpec",
    "LayerDescription",
    "StaticForwardContext",
    "StepKind",
    "addresses",
    "allocate_kv_caches",
    "bind_kv_cache",
    "cache_geometry",
    "cache_groups",
    "declared_specs",
    "describe",
    "get_forward_context",
    "is_profile_run",
    "key_cache",
    "layer_index",
    "layer_order",
    "project_groups",
    "resolve_shared",
    "set_forward_context",
    "sharing_roots",
    "token_slots",
    "unbind_kv_cache",
    "unify_page_sizes",
    "value_cache",
]
