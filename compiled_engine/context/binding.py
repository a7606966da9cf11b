"""The one function of the whole engine that binds caches to layers, and its opposite."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch

from compiled_engine.errors import BindError

from .checks import block_count_faults, device_faults, memory_faults, tensor_faults
from .layer import ContextState, declared_specs
from .order import layer_order
from .sharing import resolve_shared, sharing_faults
from .spec import KVCacheSpec
from .static_context import StaticForwardContext


def bind_kv_cache(
    kv_caches: Mapping[str, torch.Tensor],
    forward_context: StaticForwardContext,
    runner_kv_caches: list[torch.Tensor] | None = None,
) -> None:
    """Make ``forward_context[name].kv_cache`` the very tensor ``kv_caches[name]``, for every layer with a spec.

    ``runner_kv_caches``, when given, must be empty; it is filled in ascending layer order (see ``layer_order``), a
    shared cache once for each of its layers. Only a runner that keeps a list of caches (XLA) passes it.

    * Total: every layer with a spec gets a cache and no other name is accepted. Shape, strides, dtype, device, number
      of blocks, page sizes of views of one storage, and overlap that no ``shares_with`` declares are checked. All
      faults are reported in one ``BindError``.
    * Atomic: if it raises, no layer, list, state or epoch has changed.
    * Idempotent for identical tensors; another tensor for a bound layer is refused until ``unbind_kv_cache`` ran.

    Raises ``ContextStateError`` for a context that is open or closed, or that holds namespaces: each of those is
    bound on its own.
    """
    forward_context.require(ContextState.SEALED, ContextState.BOUND, action="bind KV caches")
    specs = declared_specs(forward_context)
    faults = [*_name_faults(kv_caches, specs, forward_context), *_runner_list_faults(runner_kv_caches)]
    wanted = {name: cache for name, cache in kv_caches.items() if name in specs}
    sound: dict[str, torch.Tensor] = {}
    for name, cache in wanted.items():
        found = tensor_faults(name, specs[name], cache)
        faults += found
        if not found:
            sound[name] = cache
    tensors = {name: cache for name, cache in wanted.items() if isinstance(cache, torch.Tensor)}
    faults += device_faults(tensors)
    faults += block_count_faults(sound, {name: forward_context[name].group for name in sound})
    faults += sharing_faults({name: layer.spec for name, layer in forward_context.items()})
    faults += _ownership_faults(wanted, sound, specs, forward_context)
    faults += _rebinding_faults(wanted, forward_context)
    if faults:
        raise BindError(faults)
    forward_context._rebind(wanted, ContextState.BOUND, _caller())
    if runner_kv_caches is not None:
        runner_kv_caches.extend(kv_caches[name] for name in layer_order(specs))


def unbind_kv_cache(forward_context: StaticForwardContext) -> None:
    """Take every cache away from its layer; a bound context is sealed afterwards. Does nothing when nothing is bound.

    Raises ``ContextStateError`` for a closed context and for one that holds namespaces.
    """
    forward_context.require(ContextState.OPEN, ContextState.SEALED, ContextState.BOUND, action="unbind KV caches")
    if forward_context.state is ContextState.BOUND:
        forward_context._rebind(dict.fromkeys(forward_context), ContextState.SEALED, _caller())


def _caller() -> str:
    """The source line that called the function of this module that calls this one."""
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


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


def _ownership_faults(
    wanted: Mapping[str, torch.Tensor],
    sound: Mapping[str, torch.Tensor],
    specs: Mapping[str, KVCacheSpec],
    forward_context: StaticForwardContext,
) -> list[str]:
    """Declared sharers must hold their target's tensor, and no two others may overlap in memory."""
    faults = []
    owned: dict[str, tuple[KVCacheSpec, torch.Tensor]] = {}
    holders: dict[str, str] = {}
    for name, cache in wanted.items():
        root = _root(name, specs)
        if root is None:
            continue
        # Without the owner's cache its sharers are compared with each other.
        holder = root if root in wanted else holders.setdefault(root, name)
        if holder == name:
            if name in sound:
                owned[name] = (specs[name], cache)
        elif wanted[holder] is not cache:
            fellow = f" with {holder!r}" if holder != root else ""
            faults.append(f"layer {name!r} shares the cache of {root!r}{fellow} but gets another tensor")
    return faults + memory_faults(owned, forward_context._bound_elsewhere())


def _root(name: str, specs: Mapping[str, KVCacheSpec]) -> str | None:
    """The owner of the cache of ``name``; None where sharing is at fault, which is reported already."""
    try:
        return resolve_shared(name, specs)
    except BindError:
        return None


def _rebinding_faults(wanted: Mapping[str, torch.Tensor], forward_context: StaticForwardContext) -> list[str]:
    return [
        f"layer {name!r} is bound to another tensor: call unbind_kv_cache first"
        for name, cache in wanted.items()
        if forward_context[name].is_bound and forward_context[name].kv_cache is not cache
    ]
