"""Where bound caches lie in memory, and what a captured graph remembers of it."""

from __future__ import annotations

from collections.abc import Iterable

from compiled_engine.errors import ContextError, StaleGraph

from .checks import has_address
from .static_context import StaticForwardContext


def addresses(forward_context: StaticForwardContext) -> dict[str, int]:
    """The address of every bound cache, by layer name. Layers without a cache at the moment are left out.

    Raises ``ContextError`` for a device whose tensors have no lasting address (XLA).
    """
    return {name: _address(name, forward_context) for name, layer in forward_context.items() if layer.is_bound}


class BoundAddresses:
    """What a graph that was captured with caches in place remembers of them.

    A captured graph reads and writes the addresses it saw, whatever is bound when it replays. So it keeps one of these
    from its capture and calls ``check`` before every replay::

        bound = BoundAddresses(static_context)
        ...                                       # capture
        bound.check()                             # before each replay; raises StaleGraph
        graph.replay()

    ``names`` are the layers that the graph uses; by default all that are bound. Raises ``CacheNotBound`` for one that
    is not, ``KeyError`` for one that is not registered.
    """

    def __init__(self, forward_context: StaticForwardContext, names: Iterable[str] | None = None) -> None:
        self._forward_context = forward_context
        self._epoch = forward_context.epoch
        if names is None:
            self._addresses = addresses(forward_context)
        else:
            self._addresses = {name: _address(name, forward_context) for name in names}

    @property
    def epoch(self) -> int:
        """The last epoch at which the caches were found in their places."""
        return self._epoch

    @property
    def addresses(self) -> dict[str, int]:
        """A copy of the addresses at capture, by layer name."""
        return dict(self._addresses)

    def check(self) -> None:
        """Pass if every cache is where it was at capture.

        Under the remembered epoch nothing was bound or unbound since, so nothing is compared. Under another one every
        address is: all equal, the epoch is adopted; any moved or gone, ``StaleGraph`` names the layer and both
        addresses, and the epoch stays, so that the next check compares again.
        """
        epoch = self._forward_context.epoch
        if epoch == self._epoch:
            return
        for name, captured in self._addresses.items():
            layer = self._forward_context.get(name)
            present = _address(name, self._forward_context) if layer is not None and layer.is_bound else None
            if present != captured:
                raise StaleGraph(name, captured, present, changed_by=self._forward_context.changed_by)
        self._epoch = epoch


def _address(name: str, forward_context: StaticForwardContext) -> int:
    cache = forward_context[name].kv_cache
    if not has_address(cache):
        raise ContextError(
            f"the KV cache of layer {name!r} is on {cache.device}, where tensors have no lasting address"
        )
    return cache.data_ptr()
