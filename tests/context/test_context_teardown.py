"""After close no cache is alive: proved by weak references, without help from the garbage collector."""

from __future__ import annotations

import gc
import mmap
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_engine.context import (
    BoundAddresses,
    CacheLayer,
    ForwardContext,
    KVCacheSpec,
    StaticForwardContext,
    allocate_kv_caches,
    allocation,
    bind_kv_cache,
    declared_specs,
    describe,
    set_forward_context,
    unbind_kv_cache,
)
from compiled_engine.errors import BindError
from compiled_engine.testing import static_forward_contexts


class Memory(mmap.mmap):
    """Memory that can be watched. Every one that was made is in ``made``, by weak reference."""

    made: list[weakref.ref[Memory]] = []  # noqa: RUF012

    def __new__(cls, *arguments: Any) -> Memory:
        memory = super().__new__(cls, *arguments)
        cls.made.append(weakref.ref(memory))
        return memory


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Only reference counts free anything while a test runs."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Memory]]:
    monkeypatch.setattr(allocation.mmap, "mmap", Memory)
    Memory.made.clear()
    return Memory.made


def alive(references: list[weakref.ref[Any]]) -> int:
    return sum(reference() is not None for reference in references)


def test_close_frees_caches_and_their_memory(no_collector: None, watched: list[weakref.ref[Memory]]) -> None:
    engine = StaticForwardContext()
    parts = [engine.namespace("target"), engine.namespace("draft")]
    tensors = []
    for part in parts:
        for name, target in (("a", None), ("b", None), ("c", "a")):
            part.register(name, CacheLayer(name, KVCacheSpec(4, 2, 8, torch.float32, shares_with=target)))
        part.seal()
        caches = allocate_kv_caches(declared_specs(part), 2)
        tensors += [weakref.ref(cache) for cache in caches.values()]
        bind_kv_cache(caches, part)
        del caches
    layers = [weakref.ref(layer) for layer in engine.values()]
    bound = BoundAddresses(engine)
    view = describe(engine)
    step = ForwardContext(engine, (), (), 1, 1)
    with set_forward_context(step):
        pass
    assert len(watched) == 4, "memory is taken for owners alone"
    assert (alive(tensors), alive(watched), alive(layers)) == (6, 4, 6)
    parts[1].close()
    assert (alive(tensors), alive(watched), alive(layers)) == (3, 2, 3)
    engine.close()
    assert (alive(tensors), alive(watched), alive(layers)) == (0, 0, 0)
    # What stays is what was looked at, and it holds no cache.
    assert len(bound.addresses) == len(view.layers) == 6
    assert len(step.static_context) == 0


def test_unbinding_frees_caches(no_collector: None, watched: list[weakref.ref[Memory]]) -> None:
    context = StaticForwardContext()
    context.register("a", CacheLayer("a", KVCacheSpec(4, 2, 8, torch.float32)))
    context.seal()
    for _ in range(3):
        bind_kv_cache(allocate_kv_caches(declared_specs(context), 2), context)
        assert alive(watched) == 1
        unbind_kv_cache(context)
        assert alive(watched) == 0


def test_a_refused_binding_keeps_nothing(no_collector: None, watched: list[weakref.ref[Memory]]) -> None:
    context = StaticForwardContext()
    for name in "ab":
        context.register(name, CacheLayer(name, KVCacheSpec(4, 2, 8, torch.float32)))
    context.seal()
    caches = allocate_kv_caches(declared_specs(context), 2)
    del caches["b"]
    with pytest.raises(BindError):
        bind_kv_cache(caches, context)
    del caches
    assert alive(watched) == 0


def test_layers_that_outlive_their_context_hold_no_cache(watched: list[weakref.ref[Memory]]) -> None:
    layer = CacheLayer("a", KVCacheSpec(4, 2, 8, torch.float32))
    context = StaticForwardContext()
    context.register("a", layer)
    context.seal()
    bind_kv_cache(allocate_kv_caches(declared_specs(context), 2), context)
    context.close()
    assert not layer.is_bound
    assert alive(watched) == 0


@settings(max_examples=30)
@given(context=static_forward_contexts(), num_blocks=st.integers(1, 2), rebindings=st.integers(0, 2))
def test_no_cache_outlives_its_context(context: StaticForwardContext, num_blocks: int, rebindings: int) -> None:
    """Property: for every kind of context and after any number of rebindings, close leaves no cache alive."""
    tensors = []
    for _ in range(rebindings + 1):
        caches = allocate_kv_caches(declared_specs(context), num_blocks)
        tensors += [weakref.ref(cache) for cache in caches.values()]
        unbind_kv_cache(context)
        bind_kv_cache(caches, context)
        del caches
    assert alive(tensors) == len(declared_specs(context))
    context.close()
    assert alive(tensors) == 0
