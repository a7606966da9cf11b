"""Two models in one context."""

from __future__ import annotations

import pytest
import torch

from compiled_engine.context import (
    CacheLayer,
    ContextState,
    KVCacheSpec,
    StaticForwardContext,
    allocate_kv_caches,
    bind_kv_cache,
    cache_groups,
    declared_specs,
    unbind_kv_cache,
)
from compiled_engine.errors import BindError, ConfigError, ContextStateError, DuplicateLayerError

SPEC = KVCacheSpec(4, 2, 8, torch.float32)


def fill(part: StaticForwardContext, *names: str) -> dict[str, torch.Tensor]:
    """Register, seal and bind; the caches."""
    for name in names:
        part.register(name, CacheLayer(name, SPEC))
    part.seal()
    caches = allocate_kv_caches(declared_specs(part), 2)
    bind_kv_cache(caches, part)
    return caches


@pytest.fixture
def engine() -> StaticForwardContext:
    context = StaticForwardContext()
    fill(context.namespace("target"), "layers.0", "layers.1")
    fill(context.namespace("draft"), "layers.0")
    return context


def test_the_whole_shows_layers_under_full_names(engine: StaticForwardContext) -> None:
    assert list(engine) == ["target/layers.0", "target/layers.1", "draft/layers.0"]
    assert len(engine) == 3
    assert engine["draft/layers.0"] is engine.namespaces["draft"]["layers.0"]
    assert engine["draft/layers.0"] is not engine["target/layers.0"]
    for name in ("layers.0", "draft", "draft/", "other/layers.0", "draft/layers.1"):
        assert name not in engine


def test_closing_one_leaves_the_other_bound(engine: StaticForwardContext) -> None:
    target, draft = engine.namespaces["target"], engine.namespaces["draft"]
    cache, epoch = target["layers.0"].kv_cache, target.epoch
    draft.close()
    assert (target.state, target.epoch) == (ContextState.BOUND, epoch)
    assert engine["target/layers.0"].kv_cache is cache
    assert list(engine.namespaces) == ["target"]
    with pytest.raises(ContextStateError, match="the namespace 'draft' is closed"):
        draft.register("a", CacheLayer("a", SPEC))
    fill(engine.namespace("draft"), "other")
    assert list(engine) == ["target/layers.0", "target/layers.1", "draft/other"]


def test_unbinding_one_leaves_the_other_bound(engine: StaticForwardContext) -> None:
    unbind_kv_cache(engine.namespaces["target"])
    assert engine.namespaces["target"].state is ContextState.SEALED
    assert engine.namespaces["draft"].state is ContextState.BOUND
    assert engine["draft/layers.0"].is_bound


def test_closing_the_whole_closes_all(engine: StaticForwardContext) -> None:
    parts = list(engine.namespaces.values())
    engine.close()
    assert [part.state for part in parts] == [ContextState.CLOSED] * 2
    assert len(engine) == 0


def test_epoch_of_the_whole_counts_the_changes_of_its_parts(engine: StaticForwardContext) -> None:
    assert engine.epoch == 2
    unbind_kv_cache(engine.namespaces["draft"])
    engine.namespaces["draft"].close()
    assert engine.epoch == 4
    assert engine.namespaces["target"].epoch == 1


def test_the_whole_is_acted_on_by_its_parts(engine: StaticForwardContext) -> None:
    for action in (
        lambda: engine.register("a", CacheLayer("a", SPEC)),
        engine.seal,
        lambda: bind_kv_cache({}, engine),
        lambda: unbind_kv_cache(engine),
        lambda: cache_groups(engine),
    ):
        with pytest.raises(ContextStateError, match="holds the namespaces 'target', 'draft'"):
            action()


@pytest.mark.parametrize("name", ["", "a/b", "/"])
def test_names_of_namespaces(name: str) -> None:
    with pytest.raises(ConfigError, match="without slashes"):
        StaticForwardContext().namespace(name)


def test_a_taken_namespace_is_refused(engine: StaticForwardContext) -> None:
    with pytest.raises(DuplicateLayerError, match="'draft'"):
        engine.namespace("draft")


def test_a_context_with_layers_takes_no_namespace() -> None:
    context = StaticForwardContext()
    context.register("a", CacheLayer("a", SPEC))
    with pytest.raises(ContextStateError, match="layers of its own"):
        context.namespace("draft")


def test_memory_of_another_namespace_is_refused(engine: StaticForwardContext) -> None:
    third = engine.namespace("third")
    third.register("layers.0", CacheLayer("layers.0", SPEC))
    third.seal()
    with pytest.raises(BindError, match=r"'target/layers\.0'.*'layers\.0'|'layers\.0'.*'target/layers\.0'"):
        bind_kv_cache({"layers.0": engine["target/layers.0"].kv_cache}, third)
    with pytest.raises(BindError, match="overlap"):
        bind_kv_cache({"layers.0": engine["draft/layers.0"].kv_cache[1:]}, third)
    unbind_kv_cache(engine.namespaces["target"])
    bind_kv_cache(allocate_kv_caches(declared_specs(third), 1), third)


def test_sharing_ends_at_the_namespace(engine: StaticForwardContext) -> None:
    third = engine.namespace("third")
    spec = KVCacheSpec(4, 2, 8, torch.float32, shares_with="target/layers.0")
    third.register("layers.0", CacheLayer("layers.0", spec))
    with pytest.raises(BindError, match="no registered layer"):
        third.seal()


def test_namespaces_within_namespaces() -> None:
    engine = StaticForwardContext()
    inner = engine.namespace("a").namespace("b")
    caches = fill(inner, "x.0", "y/1")
    assert inner.name == "a/b"
    assert list(engine) == ["a/b/x.0", "a/b/y/1"]
    assert engine["a/b/y/1"].kv_cache is caches["y/1"]
    with pytest.raises(ContextStateError, match="the namespace 'a/b' is bound"):
        inner.seal()
    inner.close()
    assert inner.name == "a/b"
    assert repr(inner) == "StaticForwardContext('a/b', 0 layers, closed, epoch 2)"
    assert engine.epoch == 2
