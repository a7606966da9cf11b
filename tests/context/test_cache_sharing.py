"""Layers that share a cache: what is refused, and how it is reported."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compiled_engine.context import (
    CacheKind,
    CacheLayer,
    ContextState,
    KVCacheSpec,
    StaticForwardContext,
    allocate_kv_caches,
    bind_kv_cache,
    declared_specs,
    resolve_shared,
    sharing_roots,
)
from compiled_engine.errors import BindError

SPEC = KVCacheSpec(4, 2, 8, torch.float32)


def sharer(target: str, **changes: object) -> KVCacheSpec:
    return replace(SPEC, shares_with=target, **changes)  # type: ignore[arg-type]


def seal_faults(specs: dict[str, KVCacheSpec | None]) -> tuple[str, ...]:
    context = StaticForwardContext()
    for name, spec in specs.items():
        context.register(name, CacheLayer(name, spec))
    with pytest.raises(BindError, match="cannot seal the context") as refused:
        context.seal()
    assert context.state is ContextState.OPEN
    return refused.value.faults


@pytest.mark.parametrize(
    ("specs", "fault"),
    [
        ({"a": sharer("a")}, "layer 'a' shares its own cache"),
        ({"a": sharer("b"), "b": sharer("a")}, "layers share caches in a cycle: 'a' -> 'b' -> 'a'"),
        ({"a": sharer("b")}, "layer 'a' shares the cache of 'b', which is no registered layer"),
        ({"b": None, "a": sharer("b")}, "layer 'a' shares the cache of 'b', which declares that it needs none"),
        ({"a": sharer("b"), "b": SPEC}, "layer 'a' shares the cache of 'b', which is registered after it"),
        (
            {"b": SPEC, "a": sharer("b", kind=CacheKind.CROSS)},
            "layer 'a' cannot share the cache of 'b': kind cross against full",
        ),
        (
            {"b": SPEC, "a": sharer("b", kind=CacheKind.SLIDING_WINDOW, sliding_window=4)},
            "layer 'a' cannot share the cache of 'b': kind sliding_window against full, sliding_window 4 against None",
        ),
        (
            {"b": SPEC, "a": sharer("b", block_size=8)},
            "layer 'a' cannot share the cache of 'b': block_size 8 against 4",
        ),
        (
            {"b": SPEC, "a": sharer("b", page_padding=8)},
            "layer 'a' cannot share the cache of 'b': page_padding 8 against 0",
        ),
        (
            {"b": SPEC, "a": sharer("b", dtype=torch.bfloat16)},
            "layer 'a' cannot share the cache of 'b': dtype torch.bfloat16 against torch.float32",
        ),
    ],
)
def test_one_fault_of_sharing(specs: dict[str, KVCacheSpec | None], fault: str) -> None:
    assert seal_faults(specs) == (fault,)


def test_all_faults_of_sharing_are_in_one_error() -> None:
    faults = seal_faults(
        {
            "into the cycle": sharer("x"),
            "x": sharer("y"),
            "y": sharer("z"),
            "z": sharer("x"),
            "me": sharer("me"),
            "unknown": sharer("nobody"),
            "wide": sharer("owner", head_dim=16),
            "owner": SPEC,
        }
    )
    assert faults == (
        "layers share caches in a cycle: 'x' -> 'y' -> 'z' -> 'x'",
        "layer 'me' shares its own cache",
        "layer 'into the cycle' shares the cache of 'x', which is registered after it",
        "layer 'unknown' shares the cache of 'nobody', which is no registered layer",
        "layer 'wide' shares the cache of 'owner', which is registered after it",
        "layer 'wide' cannot share the cache of 'owner': head_dim 16 against 8",
    )


def test_specs_alone_may_come_in_any_order() -> None:
    specs = {"a": sharer("b"), "b": sharer("c"), "c": SPEC}
    assert sharing_roots(specs) == {"a": "c", "b": "c", "c": "c"}
    with pytest.raises(BindError, match="cycle"):
        sharing_roots({"a": sharer("b"), "b": sharer("a")})
    with pytest.raises(BindError, match="cycle"):
        resolve_shared("a", {"a": sharer("b"), "b": sharer("c"), "c": sharer("b")})
    with pytest.raises(BindError, match="no layer with a cache"):
        resolve_shared("a", {"a": sharer("b")})
    with pytest.raises(BindError, match="head_dim"):
        allocate_kv_caches({"a": SPEC, "b": sharer("a", head_dim=2)}, 1)


def test_a_spec_changed_after_sealing_is_found_at_bind() -> None:
    context = StaticForwardContext()
    for name, spec in {"a": SPEC, "b": sharer("a")}.items():
        context.register(name, CacheLayer(name, spec))
    context.seal()
    caches = allocate_kv_caches(declared_specs(context), 1)
    context["b"].spec = sharer("b")
    with pytest.raises(BindError, match="shares its own cache"):
        bind_kv_cache(caches, context)
    context["b"].spec = SPEC
    with pytest.raises(BindError, match="overlap in memory"):
        bind_kv_cache(caches, context)
    assert context.state is ContextState.SEALED


def test_sharers_that_disagree_are_found_without_their_owners_cache() -> None:
    context = StaticForwardContext()
    for name, spec in {"a": SPEC, "b": sharer("a"), "c": sharer("b")}.items():
        context.register(name, CacheLayer(name, spec))
    context.seal()
    one, other = (torch.zeros(SPEC.shape(1)) for _ in range(2))
    with pytest.raises(BindError) as refused:
        bind_kv_cache({"b": one, "c": other}, context)
    assert refused.value.faults == (
        "layer 'a' gets no cache",
        "layer 'c' shares the cache of 'a' with 'b' but gets another tensor",
    )
    with pytest.raises(BindError) as refused:
        bind_kv_cache({"b": one, "c": one}, context)
    assert refused.value.faults == ("layer 'a' gets no cache",)
