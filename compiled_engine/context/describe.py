"""A context as a table for people and as JSON for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .checks import has_address
from .layer import CacheLayer, ContextState
from .static_context import StaticForwardContext

_NOTHING = "-"


@dataclass(frozen=True)
class LayerDescription:
    """One layer. None where something does not exist: no cache declared, or none bound yet.

    ``page_bytes`` and ``bytes`` include padding. ``address`` is the cache's, ``shares_with`` the declared target.
    ``state`` and ``epoch`` are those of the layer's own namespace.
    """

    layer: str
    kind: str | None
    sliding_window: int | None
    group: int | None
    shape: tuple[int, ...] | None
    dtype: str | None
    page_bytes: int | None
    bytes: int | None
    address: int | None
    shares_with: str | None
    epoch: int
    state: str


@dataclass(frozen=True)
class ContextDescription:
    """What ``describe`` found. ``str()`` of it is a table, ``to_json()`` plain data for ``json.dumps``."""

    state: str
    epoch: int
    namespaces: tuple[str, ...]
    layers: tuple[LayerDescription, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all bound caches; one that is shared counts once, for its owner."""
        return sum(layer.bytes or 0 for layer in self.layers if layer.shares_with is None)

    def to_json(self) -> dict[str, Any]:
        """Plain data with the same names as the fields."""
        data = asdict(self)
        for layer in data["layers"]:
            layer["shape"] = None if layer["shape"] is None else list(layer["shape"])
        return {
            **data,
            "namespaces": list(self.namespaces),
            "layers": list(data["layers"]),
            "total_bytes": self.total_bytes,
        }

    def __str__(self) -> str:
        title = f"{len(self.layers)} layers, {self.total_bytes} bytes, state {self.state}, epoch {self.epoch}"
        if self.namespaces:
            title += f", namespaces {', '.join(self.namespaces)}"
        header = ("layer", "kind", "group", "shape", "dtype", "bytes", "address", "shares with", "epoch", "state")
        rows = [header, *map(_cells, self.layers)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([title, *lines])


def describe(forward_context: StaticForwardContext) -> ContextDescription:
    """A view of every layer of ``forward_context``, in registration order, in any state. Changes nothing."""
    return ContextDescription(
        state=forward_context.state.value,
        epoch=forward_context.epoch,
        namespaces=tuple(forward_context.namespaces),
        layers=tuple(_describe_layers(forward_context, "")),
    )


def _describe_layers(forward_context: StaticForwardContext, prefix: str) -> list[LayerDescription]:
    if not forward_context.namespaces:
        return [_describe_layer(prefix, name, layer, forward_context) for name, layer in forward_context.items()]
    return [
        layer
        for name, part in forward_context.namespaces.items()
        for layer in _describe_layers(part, f"{prefix}{name}/")
    ]


def _describe_layer(
    prefix: str, name: str, layer: CacheLayer, forward_context: StaticForwardContext
) -> LayerDescription:
    spec = layer.spec
    cache = layer.kv_cache if layer.is_bound else None
    grouped = spec is not None and forward_context.state is not ContextState.OPEN
    return LayerDescription(
        layer=prefix + name,
        kind=None if spec is None else spec.kind.value,
        sliding_window=None if spec is None else spec.sliding_window,
        group=layer.group if grouped else None,
        shape=None if cache is None else tuple(cache.shape),
        dtype=None if spec is None else str(spec.dtype).removeprefix("torch."),
        page_bytes=None if spec is None else spec.padded_page_bytes,
        bytes=None if cache is None or spec is None else cache.shape[0] * spec.padded_page_bytes,
        address=cache.data_ptr() if cache is not None and has_address(cache) else None,
        shares_with=None if spec is None or spec.shares_with is None else prefix + spec.shares_with,
        epoch=forward_context.epoch,
        state=forward_context.state.value,
    )


def _cells(layer: LayerDescription) -> tuple[str, ...]:
    kind = layer.kind or "no cache"
    return (
        layer.layer,
        kind if layer.sliding_window is None else f"{kind} {layer.sliding_window}",
        _text(layer.group),
        _NOTHING if layer.shape is None else "x".join(map(str, layer.shape)),
        _text(layer.dtype),
        _text(layer.bytes),
        _NOTHING if layer.address is None else f"{layer.address:#x}",
        _text(layer.shares_with),
        str(layer.epoch),
        layer.state,
    )


def _text(value: object) -> str:
    return _NOTHING if value is None else str(value)
