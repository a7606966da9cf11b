"""Ways in which a mapping of caches can be wrong, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

import torch
from hypothesis import assume
from hypothesis import strategies as st

from compiled_engine.context import KVCacheSpec, StaticForwardContext, declared_specs


class CorruptionKind(str, Enum):
    """What is wrong. ``bind_kv_cache`` must refuse each."""

    MISSING = "missing"
    """A layer gets no cache."""
    UNKNOWN = "unknown"
    """A cache for a name that no layer has."""
    UNWANTED = "unwanted"
    """A cache for a layer that declares it needs none."""
    NOT_A_TENSOR = "not a tensor"
    SHAPE = "shape"
    """One KV head too many."""
    BLOCK_COUNT = "block count"
    """One block more than the other layers of the group have."""
    DTYPE = "dtype"
    DEVICE = "device"
    """A tensor on device meta, which has no memory."""
    PAGE_SIZE = "page size"
    """Right shape, but the pages are one element further apart than the spec says."""
    UNLIKE_PAGES = "unlike pages"
    """Two layers with pages of unlike sizes view one storage, without overlapping."""
    DUPLICATE = "duplicate"
    """A layer gets the tensor of another that it does not share with."""
    OVERLAP = "overlap"
    """Two layers get tensors that have a block of memory in common."""
    DETACHED = "detached"
    """A layer that shares another's cache gets a tensor of its own."""
    REBOUND = "already bound"
    """A bound layer, and whoever shares with it, gets another tensor. Only for a bound context."""


@dataclass(frozen=True)
class Corruption:
    """A corrupted copy of a mapping; the tensors of the original are untouched. ``layer_name``: must be reported."""

    kind: CorruptionKind
    layer_name: str
    kv_caches: dict[str, torch.Tensor] = field(repr=False)


@st.composite
def corruptions(
    draw: st.DrawFn,
    kv_caches: Mapping[str, torch.Tensor],
    context: StaticForwardContext,
    *,
    kinds: Iterable[CorruptionKind] = tuple(CorruptionKind),
) -> Corruption:
    """One ``Corruption`` of ``kv_caches``, which are good for ``context``.

    Of ``kinds``, those that ``context`` has room for are drawn evenly. With none of them possible the example is
    discarded.
    """
    possible = possible_corruptions(kv_caches, context, kinds)
    assume(possible)
    kind = draw(st.sampled_from(list(possible)))
    return corrupt(kv_caches, context, kind, draw(st.sampled_from(possible[kind])))


def possible_corruptions(
    kv_caches: Mapping[str, torch.Tensor],
    context: StaticForwardContext,
    kinds: Iterable[CorruptionKind] = tuple(CorruptionKind),
) -> dict[CorruptionKind, list[tuple[str, ...]]]:
    """The layers, or pairs of layers, that each of ``kinds`` can be applied to; without the kinds that cannot be."""
    return {kind: found for kind in kinds if (found := _targets(kind, kv_caches, context))}


def corrupt(
    kv_caches: Mapping[str, torch.Tensor], context: StaticForwardContext, kind: CorruptionKind, names: tuple[str, ...]
) -> Corruption:
    """The corruption of this kind at ``names``, which must be one of ``possible_corruptions``."""
    return Corruption(kind, names[0], _CORRUPT[kind](dict(kv_caches), declared_specs(context), *names))


def _targets(
    kind: CorruptionKind, kv_caches: Mapping[str, torch.Tensor], context: StaticForwardContext
) -> list[tuple[str, ...]]:
    """The layers, or pairs of layers, that can be corrupted in this way."""
    specs = declared_specs(context)
    owners = [name for name, spec in specs.items() if spec.shares_with is None]
    pairs = [(name, other) for name in owners for other in owners if name != other]
    several = {name for name in specs if kv_caches[name].shape[0] > 1}
    if kind is CorruptionKind.UNKNOWN:
        return [(_unknown_name(context),)]
    if kind is CorruptionKind.UNWANTED:
        return [(name,) for name in context if name not in specs]
    if kind is CorruptionKind.BLOCK_COUNT:
        return [(name, other) for name, other in pairs if context[name].group == context[other].group]
    if kind is CorruptionKind.PAGE_SIZE:
        return [(name,) for name in owners if name in several]
    if kind is CorruptionKind.UNLIKE_PAGES:
        return [pair for pair in pairs if len({specs[name].padded_page_bytes for name in pair}) == 2]
    if kind is CorruptionKind.DUPLICATE:
        return [*pairs]
    if kind is CorruptionKind.OVERLAP:
        return [
            (name, other)
            for name, other in pairs
            if kv_caches[name].shape == kv_caches[other].shape
            and name in several
            and replace(specs[name], kind=specs[other].kind, sliding_window=specs[other].sliding_window) == specs[other]
        ]
    if kind is CorruptionKind.DETACHED:
        return [(name,) for name, spec in specs.items() if spec.shares_with is not None]
    if kind is CorruptionKind.REBOUND:
        return [(name,) for name in owners if context[name].is_bound]
    return [(name,) for name in specs]


_Caches = dict[str, torch.Tensor]
_Specs = dict[str, KVCacheSpec]


def _unknown_name(context: StaticForwardContext) -> str:
    name = "unknown"
    while name in context:
        name += "_"
    return name


def _new(spec: KVCacheSpec, num_blocks: int, device: torch.device | str) -> torch.Tensor:
    elements = num_blocks * spec.padded_page_bytes // spec.dtype.itemsize
    memory = torch.zeros(elements, dtype=spec.dtype, device=device)
    return memory.as_strided(spec.shape(num_blocks), spec.stride())


def _replace(caches: _Caches, name: str, cache: torch.Tensor) -> _Caches:
    """Another cache for ``name`` and for all layers that share with it."""
    return {other: cache if caches[other] is caches[name] else caches[other] for other in caches}


def _other_spec(change: Callable[[KVCacheSpec], KVCacheSpec]) -> Callable[[_Caches, _Specs, str], _Caches]:
    """A cache of the same number of blocks, made for a changed spec."""

    def corrupt(caches: _Caches, specs: _Specs, name: str) -> _Caches:
        old = caches[name]
        return _replace(caches, name, _new(change(specs[name]), old.shape[0], old.device))

    return corrupt


def _missing(caches: _Caches, specs: _Specs, name: str) -> _Caches:
    return {other: cache for other, cache in caches.items() if other != name}


def _extra(caches: _Caches, specs: _Specs, name: str) -> _Caches:
    return {**caches, name: torch.zeros(1, 1, 2, 1, 1)}


def _not_a_tensor(caches: _Caches, specs: _Specs, name: str) -> _Caches:
    # What a list of per-step caches used to look like.
    return {**caches, name: [caches[name]]}  # type: ignore[dict-item]


def _block_count(caches: _Caches, specs: _Specs, name: str, other: str) -> _Caches:
    return _replace(caches, name, _new(specs[name], caches[name].shape[0] + 1, caches[name].device))


def _other_dtype(spec: KVCacheSpec) -> KVCacheSpec:
    dtype = torch.float64 if spec.dtype != torch.float64 else torch.float32
    return replace(spec, dtype=dtype, page_padding=0)


def _meta(caches: _Caches, specs: _Specs, name: str) -> _Caches:
    return _replace(caches, name, _new(specs[name], caches[name].shape[0], "meta"))


def _unlike_pages(caches: _Caches, specs: _Specs, name: str, other: str) -> _Caches:
    sizes = {each: specs[each].padded_page_bytes * caches[each].shape[0] for each in (name, other)}
    start = -(-sizes[name] // 8) * 8
    memory = torch.zeros(start + sizes[other], dtype=torch.uint8, device=caches[name].device)
    for each, first in ((name, 0), (other, start)):
        view = memory[first : first + sizes[each]].view(specs[each].dtype)
        view = view.as_strided(caches[each].shape, specs[each].stride(), view.storage_offset())
        caches = _replace(caches, each, view)
    return caches


def _duplicate(caches: _Caches, specs: _Specs, name: str, other: str) -> _Caches:
    return _replace(caches, name, caches[other])


def _overlap(caches: _Caches, specs: _Specs, name: str, other: str) -> _Caches:
    num_blocks = caches[name].shape[0]
    memory = _new(specs[name], num_blocks + 1, caches[name].device)
    return _replace(_replace(caches, name, memory[1:]), other, memory[:-1])


def _detached(caches: _Caches, specs: _Specs, name: str) -> _Caches:
    return {**caches, name: _new(specs[name], caches[name].shape[0], caches[name].device)}


_CORRUPT: dict[CorruptionKind, Callable[..., _Caches]] = {
    CorruptionKind.MISSING: _missing,
    CorruptionKind.UNKNOWN: _extra,
    CorruptionKind.UNWANTED: _extra,
    CorruptionKind.NOT_A_TENSOR: _not_a_tensor,
    CorruptionKind.SHAPE: _other_spec(lambda spec: replace(spec, num_kv_heads=spec.num_kv_heads + 1)),
    CorruptionKind.BLOCK_COUNT: _block_count,
    CorruptionKind.DTYPE: _other_spec(_other_dtype),
    CorruptionKind.DEVICE: _meta,
    CorruptionKind.PAGE_SIZE: _other_spec(
        lambda spec: replace(spec, page_padding=spec.page_padding + spec.dtype.itemsize)
    ),
    CorruptionKind.UNLIKE_PAGES: _unlike_pages,
    CorruptionKind.DUPLICATE: _duplicate,
    CorruptionKind.OVERLAP: _overlap,
    CorruptionKind.DETACHED: _detached,
    CorruptionKind.REBOUND: _other_spec(lambda spec: spec),
}
