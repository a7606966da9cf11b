"""The list that the XLA runner keeps, and what is read from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compiled_engine.context import (
    CacheGeometry,
    CacheLayer,
    KVCacheSpec,
    StaticForwardContext,
    allocate_kv_caches,
    bind_kv_cache,
    cache_geometry,
    declared_specs,
    is_profile_run,
)
from compiled_engine.errors import ContextError

SPEC = KVCacheSpec(4, 2, 8, torch.float32)


def test_a_profile_run_ends_with_binding() -> None:
    context = StaticForwardContext()
    for name in ("layers.10", "layers.2"):
        context.register(name, CacheLayer(name, SPEC))
    context.seal()
    runner_kv_caches: list[torch.Tensor] = []
    assert is_profile_run(runner_kv_caches)
    with pytest.raises(ContextError, match="profile run"):
        cache_geometry(runner_kv_caches)
    caches = allocate_kv_caches(declared_specs(context), 3)
    bind_kv_cache(caches, context, runner_kv_caches)
    assert not is_profile_run(runner_kv_caches)
    assert runner_kv_caches[0] is caches["layers.2"]
    assert cache_geometry(runner_kv_caches) == CacheGeometry(num_blocks=3, block_size=4, num_kv_heads=2)


def test_unlike_caches_have_no_common_geometry() -> None:
    caches = allocate_kv_caches({"a": SPEC, "b": replace(SPEC, head_dim=4)}, 2)
    assert cache_geometry(list(caches.values())) == CacheGeometry(2, 4, 2)
    caches = allocate_kv_caches({"a": SPEC, "b": replace(SPEC, num_kv_heads=1)}, 2)
    with pytest.raises(ContextError, match=r"\(2, 4, 1\), \(2, 4, 2\)"):
        cache_geometry(list(caches.values()))
