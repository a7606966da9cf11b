"""What ``KVBindingMachine`` needs of the thing it tests, and a ready one for layers without an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from compiled_engine.context import (
    CacheLayer,
    StaticForwardContext,
    allocate_kv_caches,
    bind_kv_cache,
    declared_specs,
    unbind_kv_cache,
)


class BindableRunner(Protocol):
    """Something with cache layers whose caches come and go: a runner, an engine, or ``ContextRunner``.

    It is handed over with its context sealed and nothing bound. Caches must be on a device with addresses.
    """

    @property
    def static_context(self) -> StaticForwardContext:
        """The sealed context of the layers; the same object for the runner's whole life."""
        ...

    def allocate(self, num_blocks: int) -> Mapping[str, torch.Tensor]:
        """New caches of ``num_blocks`` blocks for every layer with a spec. The runner keeps no reference to them."""
        ...

    def bind(self, kv_caches: Mapping[str, torch.Tensor], runner_kv_caches: list[torch.Tensor] | None = None) -> None:
        """Bind with the meaning and the errors of ``bind_kv_cache``."""
        ...

    def unbind(self) -> None:
        """Unbind with the meaning and the errors of ``unbind_kv_cache``."""
        ...

    def write(self, layer_name: str, block: int, offset: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store one token's K and V [num_kv_heads, head_dim] through the layer, the way the layer does it in a step.

        A layer that shares another layer's cache (``writes_cache`` is False) must store nothing.
        """
        ...

    def close(self) -> None:
        """Close the context and drop every cache."""
        ...


class ContextRunner:
    """The ``BindableRunner`` of a sealed context without an engine around it.

    ``write`` is called with (layer, block, offset, key, value) for layers that write their cache; by default the token
    is put into ``layer.kv_cache`` directly. Give the method of your own layer to test it.
    """

    def __init__(
        self,
        static_context: StaticForwardContext,
        *,
        write: Callable[[Any, int, int, torch.Tensor, torch.Tensor], None] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.static_context = static_context
        self._write = _put if write is None else write
        self._device = device

    def allocate(self, num_blocks: int) -> Mapping[str, torch.Tensor]:
        return allocate_kv_caches(declared_specs(self.static_context), num_blocks, self._device)

    def bind(self, kv_caches: Mapping[str, torch.Tensor], runner_kv_caches: list[torch.Tensor] | None = None) -> None:
        bind_kv_cache(kv_caches, self.static_context, runner_kv_caches)

    def unbind(self) -> None:
        unbind_kv_cache(self.static_context)

    def write(self, layer_name: str, block: int, offset: int, key: torch.Tensor, value: torch.Tensor) -> None:
        layer = self.static_context[layer_name]
        if layer.writes_cache:
            self._write(layer, block, offset, key, value)

    def close(self) -> None:
        self.static_context.close()


def _put(layer: CacheLayer, block: int, offset: int, key: torch.Tensor, value: torch.Tensor) -> None:
    layer.kv_cache[block, offset, 0] = key
    layer.kv_cache[block, offset, 1] = value
