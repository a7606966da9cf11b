"""Properties of bound caches: identity, isolation, sharing, idempotence, and the way back."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.context import (
    CacheLayer,
    ContextState,
    KVCacheSpec,
    StaticForwardContext,
    allocate_kv_caches,
    bind_kv_cache,
    cache_groups,
    declared_specs,
    sharing_roots,
    unbind_kv_cache,
)
from compiled_engine.errors import BindError, CacheNotBound
from compiled_engine.testing import (
    ContextSnapshot,
    StorageContents,
    corruptions,
    kv_cache_specs,
    kv_caches_for,
    static_forward_contexts,
)


@given(data=st.data(), context=static_forward_contexts())
def test_identity(data: st.DataObject, context: StaticForwardContext) -> None:
    """Property: ``layer.kv_cache is kv_caches[name]`` for every layer with a spec, and no other layer has a cache."""
    caches = data.draw(kv_caches_for(context))
    bind_kv_cache(caches, context)
    assert context.state is ContextState.BOUND
    assert {name for name, layer in context.items() if layer.is_bound} == set(caches)
    for name, cache in caches.items():
        assert context[name].kv_cache is cache


@given(data=st.data(), context=static_forward_contexts(min_layers=1))
def test_isolation(data: st.DataObject, context: StaticForwardContext) -> None:
    """Property: the alias matrix equals declared sharing, and a write through one layer changes no byte of another.

    Memory is looked at as bytes of whole storages, padding included.
    """
    bind_kv_cache(data.draw(kv_caches_for(context)), context)
    specs = declared_specs(context)
    roots = sharing_roots(specs)
    owned: dict[str, set[int]] = {}
    for value, (name, root) in enumerate(roots.items(), start=1):
        cache = context[name].kv_cache
        owned[root] = _all_bytes(cache)
        before = StorageContents(context[other].kv_cache for other in specs)
        cache.fill_(value)
        assert set() < before.changed_bytes() <= owned[root], f"a write through {name!r} went elsewhere"
    for (one, its_bytes), (other, other_bytes) in itertools.combinations(owned.items(), 2):
        assert not its_bytes & other_bytes, f"{one!r} and {other!r} have bytes in common"
    for one, other in itertools.product(roots, roots):
        assert (context[one].kv_cache is context[other].kv_cache) == (roots[one] == roots[other])


def _all_bytes(cache: torch.Tensor) -> set[int]:
    """Addresses of all bytes of a cache, worked out element by element."""
    size = cache.dtype.itemsize
    places = torch.zeros(cache.shape, dtype=torch.int64)
    for dimension, stride in enumerate(cache.stride()):
        shape = [1] * cache.dim()
        shape[dimension] = -1
        places += (torch.arange(cache.shape[dimension]) * stride * size).reshape(shape)
    return {cache.data_ptr() + place + byte for place in places.flatten().tolist() for byte in range(size)}


@given(data=st.data(), context=static_forward_contexts())
def test_idempotence(data: st.DataObject, context: StaticForwardContext) -> None:
    """Property: binding identical tensors again changes nothing, whatever the mapping's order."""
    caches = data.draw(kv_caches_for(context))
    bind_kv_cache(caches, context)
    before = ContextSnapshot.of(context)
    bind_kv_cache(dict(reversed(caches.items())), context)
    assert ContextSnapshot.of(context) == before


@given(data=st.data(), context=static_forward_contexts())
def test_rebinding_needs_unbinding(data: st.DataObject, context: StaticForwardContext) -> None:
    """Property: other caches are accepted after ``unbind_kv_cache``; each change of a layer counts one epoch."""
    first, second = data.draw(kv_caches_for(context)), data.draw(kv_caches_for(context))
    sealed = ContextSnapshot.of(context)
    change = 1 if first else 0
    bind_kv_cache(first, context)
    assert context.epoch == sealed.epoch + change
    unbind_kv_cache(context)
    assert ContextSnapshot.of(context) == replace(sealed, epoch=sealed.epoch + 2 * change)
    unbind_kv_cache(context)
    assert context.epoch == sealed.epoch + 2 * change
    for layer in context.values():
        with pytest.raises(CacheNotBound):
            _ = layer.kv_cache
    bind_kv_cache(second, context)
    assert context.epoch == sealed.epoch + 3 * change
    assert all(context[name].kv_cache is cache for name, cache in second.items())


@given(data=st.data(), context=static_forward_contexts(min_layers=1))
def test_unbind_after_failure(data: st.DataObject, context: StaticForwardContext) -> None:
    """Property: after a refused binding, unbinding and binding work as if it had not been tried."""
    caches = data.draw(kv_caches_for(context))
    if data.draw(st.booleans()):
        bind_kv_cache(caches, context)
    with pytest.raises(BindError):
        bind_kv_cache(data.draw(corruptions(caches, context)).kv_caches, context)
    unbind_kv_cache(context)
    assert not any(layer.is_bound for layer in context.values())
    bind_kv_cache(caches, context)
    assert all(context[name].kv_cache is cache for name, cache in caches.items())


@given(data=st.data(), spec=kv_cache_specs(), size=st.integers(1, 7))
def test_sharing_forests_resolve_to_roots(data: st.DataObject, spec: KVCacheSpec, size: int) -> None:
    """Property: in a forest of sharers every layer has its root's tensor and group, however long the chain.

    The root is worked out from the drawn parents, not from the specs.
    """
    parents = [data.draw(st.none() | st.integers(0, place - 1) if place else st.none()) for place in range(size)]
    context = StaticForwardContext()
    for place, parent in enumerate(parents):
        target = None if parent is None else f"layers.{parent}"
        context.register(f"layers.{place}", CacheLayer(f"layers.{place}", replace(spec, shares_with=target)))
    context.seal()
    caches = allocate_kv_caches(declared_specs(context), 2)
    bind_kv_cache(caches, context)
    for place in range(size):
        root = place
        while parents[root] is not None:
            root = parents[root]
        layer = context[f"layers.{place}"]
        assert layer.kv_cache is context[f"layers.{root}"].kv_cache
        assert layer.group == context[f"layers.{root}"].group
        assert layer.writes_cache == (place == root)
    assert len({id(cache) for cache in caches.values()}) == parents.count(None)


@given(data=st.data(), spec=kv_cache_specs(), size=st.integers(1, 6))
def test_faulty_sharing_is_refused(data: st.DataObject, spec: KVCacheSpec, size: int) -> None:
    """Property: sealing succeeds exactly when every target is registered before its sharer and is of its kind.

    Targets are drawn freely: none, self, earlier, later, unknown. Where it fails, one error names every such layer,
    and the context is open as before.
    """
    targets = [data.draw(st.none() | st.integers(0, size)) for _ in range(size)]
    unlike = [data.draw(st.integers(0, 4)) == 0 for _ in range(size)]
    context = StaticForwardContext()
    for place, target in enumerate(targets):
        own = replace(
            spec,
            head_dim=spec.head_dim + unlike[place],
            shares_with=None if target is None else f"layers.{target}",
        )
        context.register(f"layers.{place}", CacheLayer(f"layers.{place}", own))
    faulty = [
        place
        for place, target in enumerate(targets)
        if target is not None and (target >= place or unlike[place] != unlike[target])
    ]
    before = ContextSnapshot.of(context)
    if not faulty:
        context.seal()
        return
    with pytest.raises(BindError) as refused:
        context.seal()
    for place in faulty:
        assert any(f"'layers.{place}'" in fault for fault in refused.value.faults), refused.value
    assert ContextSnapshot.of(context) == before


@given(data=st.data(), contexts=st.tuples(static_forward_contexts(), static_forward_contexts()))
def test_groups(data: st.DataObject, contexts: tuple[StaticForwardContext, ...]) -> None:
    """Property: layers are in one group exactly when kind, window and block size are equal; indices are 0, 1, 2...

    Every layer with a spec is in one group, its index is ``layer.group``, and no context's groups depend on another.
    """
    for context in contexts:
        groups = cache_groups(context)
        specs = declared_specs(context)
        assert [group.index for group in groups] == list(range(len(groups)))
        assert sorted(name for group in groups for name in group.layer_names) == sorted(specs)
        for group in groups:
            assert all(context[name].group == group.index for name in group.layer_names)
        for one, other in itertools.combinations(specs, 2):
            alike = all(
                getattr(specs[one], field) == getattr(specs[other], field)
                for field in ("kind", "sliding_window", "block_size")
            )
            assert (context[one].group == context[other].group) == alike


@given(context=static_forward_contexts(pad_pages=True), num_blocks=st.integers(1, 3))
def test_padding_gives_one_page_size(context: StaticForwardContext, num_blocks: int) -> None:
    """Property: after sealing with padding all pages are equally large, none larger than needed; bind takes them."""
    specs = declared_specs(context)
    sizes = {spec.padded_page_bytes for spec in specs.values()}
    assert len(sizes) <= 1
    assert {group.page_bytes for group in context.groups} == sizes
    if specs:
        largest = max(spec.page_bytes for spec in specs.values())
        assert largest <= sizes.pop() < largest + max(spec.dtype.itemsize for spec in specs.values())
    bind_kv_cache(allocate_kv_caches(specs, num_blocks), context)
    for name, spec in specs.items():
        cache = context[name].kv_cache
        assert cache.untyped_storage().nbytes() == num_blocks * spec.padded_page_bytes
        if num_blocks > 1:
            assert cache[1].data_ptr() - cache[0].data_ptr() == spec.padded_page_bytes


def test_engines_in_threads_never_see_each_other() -> None:
    """Property: contexts bound, written and closed in several threads at once keep to themselves."""
    failures: list[BaseException] = []
    start = threading.Barrier(4)

    def engine(number: int) -> None:
        try:
            start.wait()
            for turn in range(20):
                context = StaticForwardContext()
                for name in ("a", "b"):
                    context.register(name, CacheLayer(name, KVCacheSpec(2, 1, 2, torch.float32)))
                context.seal()
                bind_kv_cache(allocate_kv_caches(declared_specs(context), 2), context)
                for layer in context.values():
                    layer.kv_cache.fill_(number * 100 + turn)
                assert all(bool((layer.kv_cache == number * 100 + turn).all()) for layer in context.values())
                assert context.epoch == 1
                context.close()
                assert context.epoch == 2
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=engine, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
