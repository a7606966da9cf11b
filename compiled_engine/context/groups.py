"""Cache groups: layers that look back alike use one block table, and all groups use pages of one size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from compiled_engine.errors import BindError

from .layer import CacheLayer, declared_specs
from .spec import CacheKind, KVCacheSpec

_KIND_ORDER = {kind: place for place, kind in enumerate(CacheKind)}


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share one block table and one slot mapping in every step.

    ``index`` is the group's place in ``ForwardContext.attention_metadata`` and ``slot_mapping``. ``layer_names`` is
    sorted by name. ``page_bytes`` is what one block of the group's largest layer takes, padding included.
    """

    index: int
    kind: CacheKind
    sliding_window: int | None
    layer_names: tuple[str, ...]
    block_size: int
    page_bytes: int


def group_specs(specs: Mapping[str, KVCacheSpec]) -> tuple[CacheGroup, ...]:
    """The groups of ``specs``: one for each kind, window and block size that occurs.

    Full attention comes first, then sliding windows from small to large, then cross attention: the numbering depends
    on what the layers declare and never on the order in which they were registered. A sharer has its target's kind
    and sizes, so it is in its target's group.
    """
    members: dict[tuple[CacheKind, int | None, int], list[str]] = {}
    for name, spec in specs.items():
        members.setdefault((spec.kind, spec.sliding_window, spec.block_size), []).append(name)
    keys = sorted(members, key=lambda key: (_KIND_ORDER[key[0]], key[1] or 0, key[2]))
    return tuple(
        CacheGroup(
            index=index,
            kind=key[0],
            sliding_window=key[1],
            layer_names=tuple(sorted(members[key])),
            block_size=key[2],
            page_bytes=max(specs[name].padded_page_bytes for name in members[key]),
        )
        for index, key in enumerate(keys)
    )


def unify_page_sizes(specs: Mapping[str, KVCacheSpec], at_least: int = 0) -> dict[str, KVCacheSpec]:
    """``specs`` with every page padded to the size of the largest, or to ``at_least`` bytes where that is more.

    One page size lets a block of memory serve any group. Pages that are equally large already are left as they are.
    """
    if not specs:
        return {}
    # Element sizes are powers of two, so a multiple of the largest is a multiple of all.
    unit = math.lcm(*(spec.dtype.itemsize for spec in specs.values()))
    largest = max(at_least, *(spec.padded_page_bytes for spec in specs.values()))
    page_bytes = -(-largest // unit) * unit
    if all(spec.padded_page_bytes == largest for spec in specs.values()):
        return dict(specs)
    return {name: replace(spec, page_padding=page_bytes - spec.page_bytes) for name, spec in specs.items()}


def project_groups(
    global_groups: Sequence[CacheGroup], forward_context: Mapping[str, CacheLayer]
) -> tuple[CacheGroup, ...]:
    """The groups of a whole model, reduced to the layers that ``forward_context`` (a pipeline stage) holds.

    Every group keeps its index, also when no layer of it is here, so that block tables made for the whole model fit.
    Raises ``BindError`` that lists every local layer which is in no group, or in one of another kind.
    """
    specs = declared_specs(forward_context)
    homes = {name: group for group in global_groups for name in group.layer_names}
    faults = [f"layer {name!r} is in no cache group" for name in specs if name not in homes]
    for name, group in homes.items():
        spec = specs.get(name)
        if spec is not None and (spec.kind, spec.sliding_window, spec.block_size) != (
            group.kind,
            group.sliding_window,
            group.block_size,
        ):
            faults.append(
                f"layer {name!r} ({spec.kind.value}, window {spec.sliding_window}, block size {spec.block_size}) is in "
                f"cache group {group.index} ({group.kind.value}, window {group.sliding_window}, block size "
                f"{group.block_size})"
            )
    if faults:
        raise BindError(faults, action="project cache groups")
    return tuple(
        replace(group, layer_names=tuple(name for name in group.layer_names if name in specs))
        for group in global_groups
    )
