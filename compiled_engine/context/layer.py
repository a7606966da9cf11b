"""A cache layer, and the states of the context that holds it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import torch

from compiled_engine.errors import CacheNotBound

from .spec import KVCacheSpec


class ContextState(str, Enum):
    """open: layers register. sealed: the set of layers is final. bound: every layer has its cache. closed: the end."""

    OPEN = "open"
    SEALED = "sealed"
    BOUND = "bound"
    CLOSED = "closed"


class CacheLayer:
    """Something that reads a KV cache: base class of attention layers.

    ``spec`` None declares that the layer needs no cache (an encoder's attention, for one). ``group`` says which block
    table and slot mapping of a step are this layer's; it is set when the context is sealed.
    """

    group: int = 0

    def __init__(self, layer_name: str, spec: KVCacheSpec | None) -> None:
        self.layer_name = layer_name
        self.spec = spec
        self._kv_cache: torch.Tensor | None = None
        # State of the context this layer is registered in; None: in none.
        self._context_state: ContextState | None = None

    @property
    def kv_cache(self) -> torch.Tensor:
        """The tensor bound to this layer. Raises ``CacheNotBound`` before binding; never an empty tensor."""
        cache = self._kv_cache
        if cache is None:
            raise CacheNotBound(self.layer_name, self._why_unbound())
        return cache

    @property
    def is_bound(self) -> bool:
        return self._kv_cache is not None

    @property
    def writes_cache(self) -> bool:
        """Whether this layer stores K and V. A layer that shares another's cache only reads what that one wrote."""
        return self.spec is not None and self.spec.shares_with is None

    def _why_unbound(self) -> str:
        if self.spec is None:
            return "no cache declared"
        return "not registered" if self._context_state is None else self._context_state.value


def declared_specs(layers: Mapping[str, CacheLayer]) -> dict[str, KVCacheSpec]:
    """The specs of the layers that want a cache, by name, in the mapping's order."""
    return {name: layer.spec for name, layer in layers.items() if layer.spec is not None}
