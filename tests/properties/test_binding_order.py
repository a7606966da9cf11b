"""Properties of the order of layers, and equality with the function this project's binding grew out of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from compiled_engine.context import (
    CacheLayer,
    KVCacheSpec,
    StaticForwardContext,
    allocate_kv_caches,
    bind_kv_cache,
    declared_specs,
    layer_index,
    layer_order,
)
from compiled_engine.errors import BindError
from compiled_engine.testing import kv_caches_for, layer_names, static_forward_contexts

SPEC = KVCacheSpec(1, 1, 1, torch.float32)


def reference_index(name: str) -> int:
    """The layer index as the function of March 2025 read it: the one whole number between dots."""
    numbers = []
    for part in name.split("."):
        if _is_number(part):
            numbers.append(int(part))
    if len(numbers) != 1:
        raise AssertionError(f"{name!r} has {len(numbers)} numbers")
    return numbers[0]


def reference_bind(
    kv_caches: dict[str, torch.Tensor], context: dict[str, SimpleNamespace], runner_kv_caches: list[torch.Tensor]
) -> None:
    """A model of that function, faults included: half-filled lists, silent left-over layers."""
    assert len(runner_kv_caches) == 0
    by_index: dict[int, list[str]] = {}
    for name in kv_caches:
        by_index.setdefault(reference_index(name), []).append(name)
    for index in sorted(by_index):
        names = by_index[index]
        if len(names) > 1:
            raise NotImplementedError
        runner_kv_caches.append(kv_caches[names[0]])
    for name, cache in kv_caches.items():
        context[name].kv_cache = cache


def sealed_context(names: list[str]) -> StaticForwardContext:
    context = StaticForwardContext()
    for name in names:
        context.register(name, CacheLayer(name, SPEC))
    context.seal()
    return context


# What Python's int takes for a whole number is part of the old function's domain.
_NUMBERS = st.integers(-30, 3000).map(str) | st.sampled_from(["007", "+5", "1_0", " 8", "٣", "-0"])
_WORDS = st.text(st.characters(exclude_characters=".", exclude_categories=["Cs"]), max_size=6) | st.sampled_from(
    ["layers", "self_attn", "a/3", "4/attn", "l2", "2l", "1.5e", ""]
)


def _is_number(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


@st.composite
def reference_domain(draw: st.DrawFn) -> list[str]:
    """Names with one number each, and one name for each number."""
    numbers = draw(st.lists(_NUMBERS, max_size=6, unique_by=int))
    names = []
    for number in numbers:
        before, after = (
            [word for word in draw(st.lists(_WORDS, max_size=2)) if "." not in word and not _is_number(word)]
            for _ in range(2)
        )
        names.append(".".join([*before, number, *after]))
    assume(len(set(names)) == len(names) and all(names))
    return names


@given(names=reference_domain(), data=st.data())
@example(names=["10", "2", "1"], data=None)
def test_equals_the_reference_on_its_whole_domain(names: list[str], data: st.DataObject | None) -> None:
    """Property: one number per name, one name per number: the list and the bound tensors are those of the reference.

    The mapping's order is permuted against the order of registration.
    """
    order = names[::-1] if data is None else data.draw(st.permutations(names))
    caches = {name: torch.zeros(SPEC.shape(1)) for name in order}
    expected_context = {name: SimpleNamespace(kv_cache=torch.tensor([])) for name in names}
    expected_list: list[torch.Tensor] = []
    reference_bind(caches, expected_context, expected_list)

    context = sealed_context(names)
    runner_list: list[torch.Tensor] = []
    bind_kv_cache(caches, context, runner_list)
    assert list(map(id, runner_list)) == list(map(id, expected_list))
    for name in names:
        assert context[name].kv_cache is expected_context[name].kv_cache
        assert layer_index(name) == reference_index(name)


@given(names=st.lists(layer_names(), unique=True, min_size=1, max_size=4))
def test_beats_the_reference_where_it_fails(names: list[str]) -> None:
    """Property: where the reference fails or is silent, ours binds all or refuses all.

    Several names of one number, or names with several or none, are bound. A list that was filled before, a name
    missing from the context, and a layer missing from the mapping are refused and change nothing.
    """
    context = sealed_context(names)
    caches = allocate_kv_caches(declared_specs(context), 1)
    used = [torch.zeros(1)]
    runner_list: list[torch.Tensor] = []
    with pytest.raises(BindError):
        bind_kv_cache(caches, context, used)
    with pytest.raises(BindError):
        bind_kv_cache({**caches, "unknown.99": torch.zeros(SPEC.shape(1))}, context, runner_list)
    with pytest.raises(BindError):
        bind_kv_cache({name: caches[name] for name in names[1:]}, context, runner_list)
    assert len(used) == 1
    assert runner_list == []
    assert not any(layer.is_bound for layer in context.values())
    bind_kv_cache(caches, context, runner_list)
    assert {id(cache) for cache in runner_list} == {id(cache) for cache in caches.values()}


@given(names=st.lists(layer_names(), unique=True, max_size=8), data=st.data())
@example(names=["1", "10", "2"], data=None)
def test_order_depends_on_names_alone(names: list[str], data: st.DataObject | None) -> None:
    """Property: permuting registration or mapping never changes the list; layers "1", "10", "2" come as 1, 2, 10."""
    registered = names[::-1] if data is None else data.draw(st.permutations(names))
    mapped = names if data is None else data.draw(st.permutations(names))
    expected = layer_order(names)
    caches = allocate_kv_caches(dict.fromkeys(names, SPEC), 1)
    runner_list: list[torch.Tensor] = []
    bind_kv_cache({name: caches[name] for name in mapped}, sealed_context(registered), runner_list)
    assert [id(cache) for cache in runner_list] == [id(caches[name]) for name in expected]


@given(names=st.lists(layer_names(), unique=True, max_size=8))
def test_order_rule(names: list[str]) -> None:
    """Property: the first number of each name never falls along the order, and names without one come last."""
    indices = [layer_index(name) for name in layer_order(names)]
    numbered = [index for index in indices if index is not None]
    assert numbered == sorted(numbered)
    assert indices == numbered + [None] * (len(indices) - len(numbered))
    for name, index in zip(layer_order(names), indices, strict=True):
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        assert index == (numbers[0] if numbers else None)


@given(data=st.data(), context=static_forward_contexts())
def test_list_holds_every_layer_of_a_context(data: st.DataObject, context: StaticForwardContext) -> None:
    """Property: for every kind of context the list has one cache per layer with a spec, shared ones repeated."""
    caches = data.draw(kv_caches_for(context))
    runner_list: list[torch.Tensor] = []
    bind_kv_cache(caches, context, runner_list)
    assert [id(cache) for cache in runner_list] == [id(caches[name]) for name in layer_order(caches)]
