"""Hypothesis strategies for names, specs, contexts and caches. Everything is tiny, so that collisions are common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from hypothesis import strategies as st

from compiled_engine.context import (
    CacheKind,
    CacheLayer,
    KVCacheSpec,
    StaticForwardContext,
    allocate_kv_caches,
    declared_specs,
    sharing_roots,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_WORDS = ("model", "layers", "self_attn", "attn", "encoder", "mixer", "h")


def layer_names() -> st.SearchStrategy[str]:
    """Dotted layer names with no, one or several numbers: ``model.layers.3.self_attn``, ``10``, ``encoder.attn``.

    Numbers are small and also come with leading zeros, so that ties and neighbours such as 2 and 10 are frequent.
    """
    number = st.integers(0, 12).map(str) | st.sampled_from(["00", "01", "010"])
    return st.lists(st.sampled_from(_WORDS) | number, min_size=1, max_size=4).map(".".join)


@st.composite
def kv_cache_specs(draw: st.DrawFn, *, kinds: tuple[CacheKind, ...] = tuple(CacheKind)) -> KVCacheSpec:
    """Specs of one layer that owns its cache, with up to 4 tokens in a block. ``kinds``: which to draw from."""
    kind = draw(st.sampled_from(kinds))
    return KVCacheSpec(
        block_size=draw(st.integers(1, 4)),
        num_kv_heads=draw(st.integers(1, 2)),
        head_dim=draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from(DTYPES)),
        kind=kind,
        sliding_window=draw(st.integers(1, 3)) if kind is CacheKind.SLIDING_WINDOW else None,
    )


@st.composite
def static_forward_contexts(
    draw: st.DrawFn,
    *,
    min_layers: int = 0,
    max_layers: int = 6,
    specs: st.SearchStrategy[KVCacheSpec] | None = None,
    sharing: bool = True,
    without_cache: bool = True,
    sealed: bool = True,
    pad_pages: bool | None = None,
    make_layer: Callable[[str, KVCacheSpec | None], CacheLayer] = CacheLayer,
) -> StaticForwardContext:
    """Contexts with ``min_layers`` to ``max_layers`` layers.

    specs: what owners want (default ``kv_cache_specs()``); layers often have equal specs, as in real models.
    sharing: some layers share an earlier layer's cache, in chains too. without_cache: some layers declare no cache.
    sealed: seal the context, with ``pad_pages`` or, when that is None, with and without.
    make_layer: called with a name and a spec for every layer; give it to test layers of your own.
    """
    names = draw(st.lists(layer_names(), min_size=min_layers, max_size=max_layers, unique=True))
    drawn_specs = kv_cache_specs() if specs is None else specs
    context = StaticForwardContext()
    roles = st.sampled_from(["new", "like"] + ["shares"] * sharing + ["none"] * without_cache)
    for name in names:
        earlier = list(declared_specs(context).items())
        role = draw(roles)
        spec: KVCacheSpec | None
        if role == "none":
            spec = None
        elif role == "new" or not earlier:
            spec = draw(drawn_specs)
        else:
            target, target_spec = draw(st.sampled_from(earlier))
            spec = replace(target_spec, shares_with=target if role == "shares" else None)
        context.register(name, make_layer(name, spec))
    if sealed:
        context.seal(pad_pages=draw(st.booleans()) if pad_pages is None else pad_pages)
    return context


@st.composite
def kv_caches_for(
    draw: st.DrawFn, context: StaticForwardContext, *, min_blocks: int = 1, max_blocks: int = 3
) -> dict[str, torch.Tensor]:
    """Caches that ``bind_kv_cache`` must accept for the sealed ``context``, on the CPU, zeroed.

    Every group gets a number of blocks of its own. Owners have memory of their own or, where all pages are equally
    large, are sometimes views of one storage. The mapping's order is arbitrary.
    """
    specs = declared_specs(context)
    caches: dict[str, torch.Tensor] = {}
    num_blocks: dict[str, int] = {}
    for group in context.groups:
        members = {name: specs[name] for name in group.layer_names if name in specs}
        count = draw(st.integers(min_blocks, max_blocks))
        caches |= allocate_kv_caches(members, count)
        num_blocks |= dict.fromkeys(members, count)
    if len({spec.padded_page_bytes for spec in specs.values()}) == 1 and draw(st.booleans()):
        caches = _in_one_storage(specs, num_blocks)
    return {name: caches[name] for name in draw(st.permutations(list(specs)))}


def _in_one_storage(specs: dict[str, KVCacheSpec], num_blocks: dict[str, int]) -> dict[str, torch.Tensor]:
    """One owner's pages after the other's in a single storage."""
    roots = sharing_roots(specs)
    owners = list(dict.fromkeys(roots.values()))
    page_bytes = specs[owners[0]].padded_page_bytes
    storage = torch.zeros(page_bytes * sum(num_blocks[name] for name in owners), dtype=torch.uint8)
    owned, start = {}, 0
    for name in owners:
        end = start + page_bytes * num_blocks[name]
        spec = specs[name]
        elements = storage[start:end].view(spec.dtype)
        owned[name] = elements.as_strided(spec.shape(num_blocks[name]), spec.stride(), elements.storage_offset())
        start = end
    return {name: owned[root] for name, root in roots.items()}
