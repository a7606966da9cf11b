"""Properties of parts of a model: pipeline stages and namespaces."""

from __future__ import annotations

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
    layer_order,
    project_groups,
    unbind_kv_cache,
)
from compiled_engine.testing import (
    ContextSnapshot,
    StorageContents,
    kv_cache_specs,
    kv_caches_for,
    static_forward_contexts,
)


def context_of(specs: dict[str, KVCacheSpec | None]) -> StaticForwardContext:
    context = StaticForwardContext()
    for name, spec in specs.items():
        context.register(name, CacheLayer(name, spec))
    return context


@given(
    specs=st.dictionaries(st.integers(0, 40).map("model.layers.{}.attn".format), st.none() | kv_cache_specs()),
    num_stages=st.integers(1, 4),
    data=st.data(),
)
def test_stages_partition_a_model(specs: dict[str, KVCacheSpec | None], num_stages: int, data: st.DataObject) -> None:
    """Property: for any partition of the layers into stages, the union of bound names is all of them and no name is
    bound twice. Every stage gives its layers the group numbers and page size of the whole model, and a stage's list is
    the part of the whole model's list that it holds."""
    stage_of = {name: data.draw(st.integers(0, num_stages - 1)) for name in specs}
    whole = context_of(specs)
    whole.seal()
    groups = cache_groups(whole)
    whole_order = layer_order(declared_specs(whole))
    bound: list[str] = []
    for stage in range(num_stages):
        local = {name: spec for name, spec in specs.items() if stage_of[name] == stage}
        context = context_of(local)
        context.seal(groups=groups)
        caches = allocate_kv_caches(declared_specs(context), 1)
        runner_list: list[torch.Tensor] = []
        bind_kv_cache(caches, context, runner_list)
        held = [name for name, layer in context.items() if layer.is_bound]
        bound += held
        assert [id(cache) for cache in runner_list] == [id(caches[name]) for name in whole_order if name in held]
        assert all(context[name].group == whole[name].group for name in held)
        assert all(context[name].spec == whole[name].spec for name in held)
        assert [group.index for group in context.groups] == [group.index for group in groups]
        assert context.groups == project_groups(groups, context)
        assert sorted(name for group in context.groups for name in group.layer_names) == sorted(held)
    assert sorted(bound) == sorted(name for name, spec in specs.items() if spec is not None)
    assert len(set(bound)) == len(bound)


@given(parts=st.lists(static_forward_contexts(sealed=False), min_size=2, max_size=3), data=st.data())
def test_namespaces_are_isolated(parts: list[StaticForwardContext], data: st.DataObject) -> None:
    """Property: what happens to one namespace (bind, unbind, write, close) changes no other, and the whole shows all.

    Layer names may be the same in all of them.
    """
    engine = StaticForwardContext()
    namespaces = {}
    for number, part in enumerate(parts):
        namespace = namespaces[f"model{number}"] = engine.namespace(f"model{number}")
        for name, layer in part.items():
            namespace.register(name, CacheLayer(name, layer.spec))
        namespace.seal()
    assert list(engine) == [f"{part}/{name}" for part, namespace in namespaces.items() for name in namespace]
    caches = {}
    for part, namespace in namespaces.items():
        caches[part] = data.draw(kv_caches_for(namespace))
        bind_kv_cache(caches[part], namespace)
    for part, namespace in namespaces.items():
        for name, layer in namespace.items():
            assert engine[f"{part}/{name}"] is layer

    chosen = data.draw(st.sampled_from(sorted(namespaces)))
    others = {part: namespace for part, namespace in namespaces.items() if part != chosen}
    before = {part: ContextSnapshot.of(namespace) for part, namespace in others.items()}
    contents = StorageContents(cache for part in others for cache in caches[part].values())
    for cache in caches[chosen].values():
        cache.fill_(1)
    unbind_kv_cache(namespaces[chosen])
    bind_kv_cache(caches[chosen], namespaces[chosen])
    epoch = engine.epoch
    namespaces[chosen].close()
    assert engine.epoch == epoch + 1
    assert {part: ContextSnapshot.of(namespace) for part, namespace in others.items()} == before
    assert contents.changed_bytes() == set()
    assert list(engine) == [f"{part}/{name}" for part, namespace in others.items() for name in namespace]
    assert set(engine.namespaces) == set(others)

    engine.close()
    assert all(namespace.state is ContextState.CLOSED for namespace in namespaces.values())
    assert len(engine) == 0
