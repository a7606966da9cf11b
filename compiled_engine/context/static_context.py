"""The static forward context: which layers have caches, under which names, in which state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum

import torch

from compiled_engine.errors import CacheNotBound, ContextStateError, DuplicateLayerError

from .spec import KVCacheSpec


class ContextState(str, Enum):
    """open: layers register. sealed: the set of layers is final. bound: every layer has its cache. closed: the end."""

    OPEN = "open"
    SEALED = "sealed"
    BOUND = "bound"
    CLOSED = "closed"


class CacheLayer:
    """Something that reads a KV cache: base class of attention layers.

    ``spec`` None declares that the layer needs no cache. ``group`` says which block table and slot mapping of a
    step are this layer's.
    """

    group: int = 0

    def __init__(self, layer_name: str, spec: KVCacheSpec | None) -> None:
        self.layer_name = layer_name
        self.spec = spec
        self._kv_cache: torch.Tensor | None = None

    @property
    def kv_cache(self) -> torch.Tensor:
        """The tensor bound to this layer. Raises ``CacheNotBound`` before binding; never an empty tensor."""
        cache = self._kv_cache
        if cache is None:
            raise CacheNotBound(self.layer_name, "no cache declared" if self.spec is None else "unbound")
        return cache

    @property
    def is_bound(self) -> bool:
        return self._kv_cache is not None


class StaticForwardContext(Mapping[str, CacheLayer]):
    """All cache layers of one engine, by name, in registration order.

    Compiled graphs find their caches here instead of getting them as arguments. ``epoch`` counts the bindings and
    unbindings that changed a layer: whoever remembers addresses remembers the epoch with them.
    Caches are set by ``bind_kv_cache`` and ``unbind_kv_cache`` alone.
    """

    def __init__(self) -> None:
        self._layers: dict[str, CacheLayer] = {}
        self._state = ContextState.OPEN
        self._epoch = 0

    @property
    def state(self) -> ContextState:
        return self._state

    @property
    def epoch(self) -> int:
        return self._epoch

    def register(self, name: str, layer: CacheLayer) -> None:
        """Add ``layer`` under ``name``.

        Raises ``DuplicateLayerError`` for an empty or taken name (layers built with an empty prefix collide this
        way: vllm-ascend#4603) and ``ContextStateError`` once the context is sealed.
        """
        self.require(ContextState.OPEN, action=f"register layer {name!r}")
        if not isinstance(name, str) or not name:
            raise DuplicateLayerError(
                f"a {type(layer).__name__} registers with the empty name {name!r}: give its full dotted path"
            )
        if name in self._layers:
            raise DuplicateLayerError(
                f"layer name {name!r} is taken by {_owner(self._layers[name])} and asked for by {_owner(layer)}: "
                "give each layer its full dotted path"
            )
        self._layers[name] = layer

    def seal(self) -> None:
        """End registration. Allowed once, while open."""
        self.require(ContextState.OPEN, action="seal the context")
        self._state = ContextState.SEALED

    def close(self) -> None:
        """Drop every cache and every layer. Idempotent; nothing else is possible afterwards."""
        if self._state is ContextState.CLOSED:
            return
        for layer in self._layers.values():
            layer._kv_cache = None
        self._layers.clear()
        self._epoch += 1
        self._state = ContextState.CLOSED

    def require(self, *allowed: ContextState, action: str) -> None:
        """Raise ``ContextStateError`` unless the context is in one of the ``allowed`` states."""
        if self._state not in allowed:
            wanted = " or ".join(state.value for state in allowed)
            raise ContextStateError(f"cannot {action}: the context is {self._state.value}, it must be {wanted}")

    def _rebind(self, caches: Mapping[str, torch.Tensor | None], state: ContextState) -> None:
        """Set caches and state together; called by the binding functions after every check has passed."""
        changed = [name for name, cache in caches.items() if self._layers[name]._kv_cache is not cache]
        for name in changed:
            self._layers[name]._kv_cache = caches[name]
        self._epoch += bool(changed)
        self._state = state

    def __getitem__(self, name: str) -> CacheLayer:
        return self._layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        return f"StaticForwardContext({len(self._layers)} layers, {self._state.value}, epoch {self._epoch})"


def _owner(layer: CacheLayer) -> str:
    return f"{type(layer).__name__} {layer.layer_name!r} at {id(layer):#x}"
