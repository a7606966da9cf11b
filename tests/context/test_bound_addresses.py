"""What a captured graph remembers of the caches, and when it refuses to replay."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.context import (
    BoundAddresses,
    CacheLayer,
    KVCacheSpec,
    StaticForwardContext,
    addresses,
    allocate_kv_caches,
    bind_kv_cache,
    declared_specs,
    unbind_kv_cache,
)
from compiled_engine.errors import CacheNotBound, ContextError, StaleGraph

SPEC = KVCacheSpec(2, 1, 2, torch.float32)
NAMES = ("layers.0", "layers.1", "layers.2")


def make_context() -> tuple[StaticForwardContext, dict[str, torch.Tensor]]:
    context = StaticForwardContext()
    for name in NAMES:
        context.register(name, CacheLayer(name, SPEC))
    context.register("encoder", CacheLayer("encoder", None))
    context.seal()
    caches = allocate_kv_caches(declared_specs(context), 2)
    bind_kv_cache(caches, context)
    return context, caches


def rebind(context: StaticForwardContext, caches: Mapping[str, torch.Tensor]) -> None:
    unbind_kv_cache(context)
    bind_kv_cache(caches, context)


def test_addresses_of_bound_layers() -> None:
    context, caches = make_context()
    assert addresses(context) == {name: cache.data_ptr() for name, cache in caches.items()}
    unbind_kv_cache(context)
    assert addresses(context) == {}


def test_the_same_places_are_adopted_under_a_new_epoch() -> None:
    context, caches = make_context()
    bound = BoundAddresses(context)
    bound.check()
    assert bound.epoch == 1
    # Other tensors over the same memory: what a graph cares for is the address.
    rebind(context, {name: cache.view(cache.shape) for name, cache in caches.items()})
    assert context.epoch == 3
    bound.check()
    assert bound.epoch == 3
    assert bound.addresses == addresses(context)


def test_a_moved_cache_is_refused_until_it_is_back() -> None:
    context, caches = make_context()
    bound = BoundAddresses(context)
    moved = {**caches, "layers.1": torch.zeros_like(caches["layers.1"])}
    rebind(context, moved)
    for _ in range(2):
        with pytest.raises(StaleGraph) as refused:
            bound.check()
    error = refused.value
    assert (error.name, error.captured, error.present) == (
        "layers.1",
        caches["layers.1"].data_ptr(),
        moved["layers.1"].data_ptr(),
    )
    for part in ("'layers.1'", f"{error.captured:#x}", f"{error.present:#x}"):
        assert part in str(error)
    rebind(context, caches)
    bound.check()
    assert bound.epoch == context.epoch


def test_swapped_caches_are_refused() -> None:
    context, caches = make_context()
    bound = BoundAddresses(context)
    rebind(context, {**caches, "layers.0": caches["layers.2"], "layers.2": caches["layers.0"]})
    with pytest.raises(StaleGraph, match=r"layers\.0"):
        bound.check()


@pytest.mark.parametrize("end", [unbind_kv_cache, StaticForwardContext.close])
def test_without_caches_it_is_refused(end) -> None:  # type: ignore[no-untyped-def]
    context, _ = make_context()
    bound = BoundAddresses(context)
    end(context)
    with pytest.raises(StaleGraph, match="has none now") as refused:
        bound.check()
    assert refused.value.present is None


def test_only_the_layers_of_the_graph_count() -> None:
    context, caches = make_context()
    bound = BoundAddresses(context, ["layers.0", "layers.2"])
    rebind(context, {**caches, "layers.1": torch.zeros_like(caches["layers.1"])})
    bound.check()
    with pytest.raises(KeyError):
        BoundAddresses(context, ["layers.9"])
    unbind_kv_cache(context)
    with pytest.raises(CacheNotBound):
        BoundAddresses(context, ["layers.0"])


def test_a_device_without_addresses_is_refused() -> None:
    context = StaticForwardContext()
    layer = CacheLayer("a", SPEC)
    context.register("a", layer)
    layer._kv_cache = torch.zeros(SPEC.shape(1), device="meta")
    with pytest.raises(ContextError, match="no lasting address"):
        addresses(context)


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 2)), max_size=8))
def test_check_passes_exactly_when_all_is_in_place(moves: list[tuple[str, int]]) -> None:
    """Property: after any sequence of rebinding, the check passes exactly when every cache is where it was captured."""
    context, caches = make_context()
    bound = BoundAddresses(context)
    pools = {name: [caches[name], *(torch.zeros_like(caches[name]) for _ in range(2))] for name in NAMES}
    chosen = dict.fromkeys(NAMES, 0)
    for name, which in moves:
        chosen[name] = which
        rebind(context, {name: pools[name][place] for name, place in chosen.items()})
        if any(chosen.values()):
            with pytest.raises(StaleGraph) as refused:
                bound.check()
            assert chosen[refused.value.name] != 0
        else:
            bound.check()
            assert bound.epoch == context.epoch
