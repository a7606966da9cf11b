"""Cache allocation and the one function of the whole engine that binds caches to layers."""

from __future__ import annotations

import itertools
import math
import mmap
import re
from collections.abc import Mapping, Sequence

import torch

from compiled_engine.errors import BindError, ConfigError

from .spec import KVCacheSpec
from .static_context import ContextState, StaticForwardContext


def allocate_kv_caches(
    specs: Mapping[str, KVCacheSpec], num_blocks: int, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """A zeroed cache of ``num_blocks`` blocks for every layer that owns one; sharers get their target's tensor.

    Zeroed, so that a slot that was never written holds a number and never a NaN left by an earlier owner.
    """
    if num_blocks < 1:
        raise ConfigError(f"num_blocks is {num_blocks}: give at least 1")
    roots = {name: resolve_shared(name, specs) for name in specs}
    owned = {
        root: _zeroed(specs[root].shape(num_blocks), specs[root].dtype, torch.device(device))
        for root in dict.fromkeys(roots.values())
    }
    return {name: owned[root] for name, root in roots.items()}


def _zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Anonymous pages are zero without being touched, so a large cache costs memory only where it is used.
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def resolve_shared(name: str, specs: Mapping[str, KVCacheSpec]) -> str:
    """The layer that owns the cache that ``name`` reads: follows ``shares_with`` to its end.

    Raises ``BindError`` for an unknown target or a cycle.
    """
    seen = [name]
    while (target := specs[seen[-1]].shares_with) is not None:
        if target not in specs:
            raise BindError([f"layer {seen[-1]!r} shares the cache of {target!r}, which is no layer with a cache"])
        if target in seen:
            raise BindError([f"layers share caches in a cycle: {' -> '.join([*seen, target])}"])
        seen.append(target)
    return seen[-1]


def bind_kv_cache(
    kv_caches: Mapping[str, torch.Tensor],
    forward_context: StaticForwardContext,
    runner_kv_caches: list[torch.Tensor] | None = None,
) -> None:
    """Make ``forward_context[name].kv_cache`` the very tensor ``kv_caches[name]``, for every layer with a spec.

    ``runner_kv_caches``, when given, must be empty; it is filled in ascending layer order (see ``layer_order``).
    Only a runner that keeps a list of caches (XLA) passes it.

    Total: every layer with a spec gets a cache and no other name is accepted; shape, dtype, device and undeclared
    overlap are checked and all faults are reported in one ``BindError``. Atomic: if it raises, nothing has changed.
    Idempotent for identical tensors; another tensor for a bound layer is refused until ``unbind_kv_cache`` ran.
    Raises ``ContextStateError`` for a closed context.
    """
    forward_context.require(ContextState.OPEN, ContextState.SEALED, ContextState.BOUND, action="bind KV caches")
    specs = {name: layer.spec for name, layer in forward_context.items() if layer.spec is not None}
    faults = [*_name_faults(kv_caches, specs, forward_context), *_runner_list_faults(runner_kv_caches)]
    known = {name: cache for name, cache in kv_caches.items() if name in specs}
    faults += _tensor_faults(known, specs)
    faults += _sharing_faults(known, specs)
    for name, cache in known.items():
        layer = forward_context[name]
        if layer.is_bound and layer.kv_cache is not cache:
            faults.append(f"layer {name!r} is bound to another tensor: call unbind_kv_cache first")
    if faults:
        raise BindError(faults)
    forward_context._rebind(known, ContextState.BOUND)
    if runner_kv_caches is not None:
        runner_kv_caches.extend(kv_caches[name] for name in layer_order(list(specs)))


def unbind_kv_cache(forward_context: StaticForwardContext) -> None:
    """Take every cache away from its layer; the context is sealed afterwards. Does nothing when nothing is bound."""
    forward_context.require(ContextState.OPEN, ContextState.SEALED, ContextState.BOUND, action="unbind KV caches")
    if forward_context.state is ContextState.BOUND:
        forward_context._rebind(dict.fromkeys(forward_context), ContextState.SEALED)


def layer_order(names: Sequence[str]) -> list[str]:
    """``names`` in ascending layer order.

    The layer index is the first whole dotted component of a name that is a number (``model.layers.7.self_attn`` -> 7).
    Ties, gaps and several caches of one index are allowed; ties keep the given order, names without a number come last.
    """
    return sorted(names, key=_layer_index)


def _layer_index(name: str) -> tuple[bool, int]:
    match = re.search(r"(?:^|[./])(\d+)(?=[./]|$)", name)
    return (match is None, int(match[1]) if match else 0)


def _name_faults(
    kv_caches: Mapping[str, torch.Tensor], specs: Mapping[str, KVCacheSpec], forward_context: StaticForwardContext
) -> list[str]:
    faults = [f"layer {name!r} gets no cache" for name in specs if name not in kv_caches]
    for name in kv_caches:
        if name not in forward_context:
            faults.append(f"{name!r} is no registered layer")
        elif name not in specs:
            faults.append(f"layer {name!r} declares that it needs no cache, but gets one")
    return faults


def _runner_list_faults(runner_kv_caches: list[torch.Tensor] | None) -> list[str]:
    if runner_kv_caches:
        return [f"runner_kv_caches already holds {len(runner_kv_caches)} caches: pass an empty list"]
    return []


def _tensor_faults(kv_caches: Mapping[str, torch.Tensor], specs: Mapping[str, KVCacheSpec]) -> list[str]:
    faults = []
    devices = {str(cache.device) for cache in kv_caches.values() if isinstance(cache, torch.Tensor)}
    if len(devices) > 1:
        faults.append(f"caches lie on several devices ({', '.join(sorted(devices))}): one engine uses one")
    for name, cache in kv_caches.items():
        spec = specs[name]
        if not isinstance(cache, torch.Tensor):
            faults.append(f"layer {name!r}: the cache is a {type(cache).__name__}, not a tensor")
            continue
        expected = spec.shape(cache.shape[0] if cache.dim() else 0)
        if tuple(cache.shape) != expected or cache.shape[0] < 1:
            faults.append(f"layer {name!r}: shape {tuple(cache.shape)}, expected {('num_blocks', *expected[1:])}")
        elif not cache.is_contiguous():
            faults.append(f"layer {name!r}: the cache is not contiguous (strides {cache.stride()})")
        if cache.dtype != spec.dtype:
            faults.append(f"layer {name!r}: dtype {cache.dtype}, expected {spec.dtype}")
    return faults


def _sharing_faults(kv_caches: Mapping[str, torch.Tensor], specs: Mapping[str, KVCacheSpec]) -> list[str]:
    """Declared sharers must hold their target's tensor, and no two others may overlap in memory."""
    faults: list[str] = []
    owned: dict[str, torch.Tensor] = {}
    for name, cache in kv_caches.items():
        try:
            root = resolve_shared(name, specs)
        except BindError as error:
            faults += error.faults
            continue
        if root == name:
            owned[name] = cache
        elif root in kv_caches and kv_caches[root] is not cache:
            faults.append(f"layer {name!r} shares the cache of {root!r} but gets another tensor")
    spans = sorted(
        (cache.data_ptr(), cache.data_ptr() + cache.nbytes, name)
        for name, cache in owned.items()
        if isinstance(cache, torch.Tensor) and cache.is_contiguous() and cache.device.type != "meta"
    )
    for (_, end, name), (start, _, other) in itertools.pairwise(spans):
        if start < end:
            faults.append(f"layers {name!r} and {other!r} overlap in memory without shares_with")
    return faults
