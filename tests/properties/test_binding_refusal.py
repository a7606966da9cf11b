"""Properties of binding that is refused: totality, atomicity, one error that lists every fault."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from compiled_engine.context import (
    CacheKind,
    CacheLayer,
    KVCacheSpec,
    StaticForwardContext,
    allocate_kv_caches,
    bind_kv_cache,
    declared_specs,
    sharing_roots,
)
from compiled_engine.errors import BindError
from compiled_engine.testing import (
    ContextSnapshot,
    Corruption,
    CorruptionKind,
    corruptions,
    kv_caches_for,
    static_forward_contexts,
)
from compiled_engine.testing.corruptions import possible_corruptions


def refused(
    caches: dict[str, torch.Tensor], context: StaticForwardContext, runner_list: list[torch.Tensor] | None
) -> tuple[str, ...]:
    """Bind, which must raise ``BindError`` and change nothing; the faults."""
    before = ContextSnapshot.of(context)
    held = None if runner_list is None else list(map(id, runner_list))
    with pytest.raises(BindError) as caught:
        bind_kv_cache(caches, context, runner_list)
    assert ContextSnapshot.of(context) == before
    assert held == (None if runner_list is None else list(map(id, runner_list)))
    assert all(fault in str(caught.value) for fault in caught.value.faults)
    return caught.value.faults


# Words by which a fault of each kind is known.
WORDS = {
    CorruptionKind.MISSING: "gets no cache",
    CorruptionKind.UNKNOWN: "is no registered layer",
    CorruptionKind.UNWANTED: "declares that it needs no cache",
    CorruptionKind.NOT_A_TENSOR: "not a tensor",
    CorruptionKind.SHAPE: "shape",
    CorruptionKind.BLOCK_COUNT: "unlike numbers of blocks",
    CorruptionKind.DTYPE: "dtype",
    CorruptionKind.DEVICE: "meta",
    CorruptionKind.PAGE_SIZE: "strides",
    CorruptionKind.UNLIKE_PAGES: "unlike pages",
    CorruptionKind.DUPLICATE: "",
    CorruptionKind.OVERLAP: "overlap in memory",
    CorruptionKind.DETACHED: "gets another tensor",
    CorruptionKind.REBOUND: "is bound to another tensor",
}


@pytest.mark.parametrize("kind", list(CorruptionKind))
@given(data=st.data(), with_list=st.booleans(), bound_before=st.booleans())
def test_single_corruption(data: st.DataObject, kind: CorruptionKind, with_list: bool, bound_before: bool) -> None:
    """Property: each single corruption is refused with an error that names the layer and the fault; nothing changes."""
    pad_pages = False if kind is CorruptionKind.UNLIKE_PAGES else None
    least = 2 if kind in (CorruptionKind.PAGE_SIZE, CorruptionKind.OVERLAP) else 1
    context = data.draw(static_forward_contexts(min_layers=3, pad_pages=pad_pages))
    caches = data.draw(kv_caches_for(context, min_blocks=least))
    if bound_before or kind is CorruptionKind.REBOUND:
        bind_kv_cache(caches, context)
    corruption = data.draw(corruptions(caches, context, kinds=[kind]))
    faults = refused(corruption.kv_caches, context, [] if with_list else None)
    assert any(repr(corruption.layer_name) in fault and WORDS[kind] in fault for fault in faults), faults


@given(data=st.data(), context=static_forward_contexts(min_layers=2))
def test_all_faults_are_in_one_error(data: st.DataObject, context: StaticForwardContext) -> None:
    """Property: with several layers corrupted at once, the one error names every one of them."""
    caches = data.draw(kv_caches_for(context))
    kinds = [
        CorruptionKind.MISSING,
        CorruptionKind.UNKNOWN,
        CorruptionKind.UNWANTED,
        CorruptionKind.NOT_A_TENSOR,
        CorruptionKind.SHAPE,
        CorruptionKind.DTYPE,
        CorruptionKind.DEVICE,
        CorruptionKind.DETACHED,
    ]
    drawn: list[Corruption] = data.draw(st.lists(corruptions(caches, context, kinds=kinds), min_size=2, max_size=4))
    corrupted = dict(caches)
    roots = sharing_roots(declared_specs(context))
    touched: set[str] = set()
    done: dict[str, CorruptionKind] = {}
    for corruption in drawn:
        changed = {name for name in {*caches, *corruption.kv_caches} if _differs(caches, corruption.kv_caches, name)}
        # A tensor of its own is no fault to be seen where the owner's cache, to compare with, is corrupted as well.
        changed |= {roots[name] for name in changed if name in roots}
        if changed & touched:
            continue
        touched |= changed
        done[corruption.layer_name] = corruption.kind
        for name in changed:
            corrupted.pop(name, None)
            if name in corruption.kv_caches:
                corrupted[name] = corruption.kv_caches[name]
    assume(len(done) > 1)
    faults = refused(corrupted, context, [torch.zeros(1)])
    for name, kind in done.items():
        assert any(repr(name) in fault and WORDS[kind] in fault for fault in faults), (name, kind, faults)
    assert any("runner_kv_caches" in fault for fault in faults)
    assert max(Counter(faults).values()) == 1, "a fault is listed twice"


def _differs(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], name: str) -> bool:
    return one.get(name) is not other.get(name)


@given(data=st.data(), context=static_forward_contexts(min_layers=1))
def test_a_list_in_use_is_refused(data: st.DataObject, context: StaticForwardContext) -> None:
    """Property: a runner's list that is not empty is refused, also on a second binding of identical caches."""
    caches = data.draw(kv_caches_for(context))
    assume(caches)
    runner_list: list[torch.Tensor] = []
    bind_kv_cache(caches, context, runner_list)
    assert "runner_kv_caches" in refused(caches, context, runner_list)[0]


# Placed in one storage: two caches at steps of equal pages, as (first byte's element, blocks).
@given(
    first=st.tuples(st.integers(0, 20), st.integers(1, 4)),
    second=st.tuples(st.integers(0, 20), st.integers(1, 4)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dims=st.tuples(st.integers(1, 2), st.integers(1, 2)),
)
def test_views_of_one_storage(
    first: tuple[int, int], second: tuple[int, int], padding: tuple[int, int], dims: tuple[int, int]
) -> None:
    """Property: views of one storage are accepted exactly when their pages are equally large and share no element.

    Which elements a view has is worked out one by one; interleaved pages, where one layer's lie in the other's
    padding, are accepted.
    """
    storage = torch.zeros(120)
    context = StaticForwardContext()
    elements, caches = [], {}
    for name, (start, blocks), gap, dim in zip("ab", (first, second), padding, dims, strict=True):
        kind = CacheKind.FULL if name == "a" else CacheKind.CROSS
        spec = KVCacheSpec(1, 1, dim, torch.float32, kind=kind, page_padding=4 * gap)
        context.register(name, CacheLayer(name, spec))
        caches[name] = storage.as_strided(spec.shape(blocks), spec.stride(), start)
        step = 2 * dim + gap
        elements.append({start + block * step + place for block in range(blocks) for place in range(2 * dim)})
    context.seal(pad_pages=False)
    overlap = bool(elements[0] & elements[1])
    unlike = 2 * dims[0] + padding[0] != 2 * dims[1] + padding[1]
    if not overlap and not unlike:
        bind_kv_cache(caches, context)
        return
    faults = refused(caches, context, None)
    assert any("unlike pages" in fault for fault in faults) == unlike
    if not unlike:
        assert any("overlap" in fault for fault in faults) == overlap


def test_two_storages_over_one_buffer_are_seen() -> None:
    """Tensors made twice from one buffer have unlike storages and yet the same memory."""
    memory = bytearray(256)
    context = StaticForwardContext()
    spec = KVCacheSpec(2, 1, 2, torch.float32)
    for name in "ab":
        context.register(name, CacheLayer(name, spec))
    context.seal()
    caches = {
        name: torch.frombuffer(memory, dtype=torch.float32, offset=offset, count=16).view(spec.shape(2))
        for name, offset in (("a", 0), ("b", 32))
    }
    assert any("overlap" in fault for fault in refused(caches, context, None))


def test_every_corruption_kind_is_possible() -> None:
    """The strategy reaches every kind on one context, so that no property above is empty."""
    context = StaticForwardContext()
    full = KVCacheSpec(2, 1, 2, torch.float32)
    for name, spec in {
        "a": full,
        "b": full,
        "c": KVCacheSpec(2, 2, 2, torch.float32),
        "d": KVCacheSpec(2, 1, 2, torch.float32, shares_with="a"),
        "e": None,
    }.items():
        context.register(name, CacheLayer(name, spec))
    context.seal(pad_pages=False)
    caches = allocate_kv_caches(declared_specs(context), 2)
    bind_kv_cache(caches, context)
    assert set(possible_corruptions(caches, context)) == set(CorruptionKind)
