"""Layers that read another layer's cache: who owns it in the end, and what is no valid sharing."""

from __future__ import annotations

from collections.abc import Mapping

from compiled_engine.errors import BindError

from .spec import KVCacheSpec

_MUST_AGREE = ("block_size", "num_kv_heads", "head_dim", "dtype", "kind", "sliding_window", "page_padding")


def resolve_shared(name: str, specs: Mapping[str, KVCacheSpec]) -> str:
    """The layer that owns the cache that ``name`` reads: follows ``shares_with`` to its end.

    Raises ``BindError`` for an unknown target or a cycle.
    """
    path = [name]
    while (target := specs[path[-1]].shares_with) is not None:
        if target not in specs:
            raise BindError([f"layer {path[-1]!r} shares the cache of {target!r}, which is no layer with a cache"])
        if target in path:
            raise BindError([_cycle_fault([*path[path.index(target) :], target])])
        path.append(target)
    return path[-1]


def sharing_roots(specs: Mapping[str, KVCacheSpec]) -> dict[str, str]:
    """The owner of every layer's cache, by layer name; owners are their own. Raises ``BindError`` with all faults."""
    if faults := sharing_faults(specs):
        raise BindError(faults)
    return {name: resolve_shared(name, specs) for name in specs}


def sharing_faults(specs: Mapping[str, KVCacheSpec | None], *, check_order: bool = False) -> list[str]:
    """Everything that is wrong with the sharing that ``specs`` declare; empty when all is well.

    A target must be another layer with a cache of the same sizes, type and kind; targets may share in turn, but never
    in a cycle. With ``check_order`` a target must also come before its sharers, so that what they read is written.
    ``None`` stands for a layer that declares no cache.
    """
    faults = _cycle_faults(specs)
    in_cycle = {name for cycle in _cycles(specs) for name in cycle}
    places = {name: place for place, name in enumerate(specs)}
    for name, spec in specs.items():
        target = None if spec is None else spec.shares_with
        if spec is None or target is None:
            continue
        if target not in specs:
            faults.append(f"layer {name!r} shares the cache of {target!r}, which is no registered layer")
            continue
        target_spec = specs[target]
        if target_spec is None:
            faults.append(f"layer {name!r} shares the cache of {target!r}, which declares that it needs none")
            continue
        if check_order and name not in in_cycle and places[target] > places[name]:
            faults.append(f"layer {name!r} shares the cache of {target!r}, which is registered after it")
        faults += _likeness_faults(name, spec, target, target_spec)
    return faults


def _likeness_faults(name: str, spec: KVCacheSpec, target: str, target_spec: KVCacheSpec) -> list[str]:
    unlike = [field for field in _MUST_AGREE if getattr(spec, field) != getattr(target_spec, field)]
    if not unlike:
        return []
    details = ", ".join(f"{field} {_show(spec, field)} against {_show(target_spec, field)}" for field in unlike)
    return [f"layer {name!r} cannot share the cache of {target!r}: {details}"]


def _show(spec: KVCacheSpec, field: str) -> str:
    value = getattr(spec, field)
    return str(getattr(value, "value", value))


def _cycles(specs: Mapping[str, KVCacheSpec | None]) -> list[list[str]]:
    """Each cycle once, from its first layer in the mapping's order."""
    cycles: list[list[str]] = []
    finished: set[str] = set()
    for start in specs:
        path: list[str] = []
        name: str | None = start
        while name is not None and name in specs and name not in finished and name not in path:
            path.append(name)
            spec = specs[name]
            name = None if spec is None else spec.shares_with
        if name in path:
            cycles.append(path[path.index(name) :])
        finished.update(path)
    return cycles


def _cycle_faults(specs: Mapping[str, KVCacheSpec | None]) -> list[str]:
    return [_cycle_fault([*cycle, cycle[0]]) for cycle in _cycles(specs)]


def _cycle_fault(path: list[str]) -> str:
    if len(path) == 2:
        return f"layer {path[0]!r} shares its own cache"
    return f"layers share caches in a cycle: {' -> '.join(map(repr, path))}"
