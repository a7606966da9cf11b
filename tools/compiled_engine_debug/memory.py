"""Where the memory of a recorded engine went: weights, caches, graphs and workspaces, and how the sums agree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from compiled_engine.compile.graphs.bindings import Role
from compiled_engine.compile.records import CacheRecord, CapturedGraphRecord, MemoryRecord
from compiled_engine_debug.recording import Recording

# What graphs use that is neither weight nor cache.
_BUFFER_ROLES = (Role.WORKSPACE, Role.METADATA, Role.INPUT, Role.OUTPUT)


class Block(NamedTuple):
    """``num_bytes`` from ``address`` on; None: it has no address to tell."""

    address: int | None
    num_bytes: int


@dataclass(frozen=True)
class Part:
    """One use of memory: ``recorded`` is the engine's own sum, None if it tells none; ``counted`` that of its pieces.

    What lies at the same address counts once.
    """

    name: str
    recorded: int | None
    counted: int

    @property
    def difference(self) -> int | None:
        return None if self.recorded is None else self.counted - self.recorded


@dataclass(frozen=True)
class Tensor:
    """A weight or buffer. ``own_bytes``: those that no tensor before it has counted."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    own_bytes: int


@dataclass(frozen=True)
class Group:
    """Caches of one group and shape, which ``num_layers`` layers read.

    ``shared``: those layers that read what another one stores, with this other one.
    """

    group: int
    num_layers: int
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    shared: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class KeyGraphs:
    """The graphs of one key: what the memory that all graphs share grew by at their capture, and how long that took."""

    key: str
    num_graphs: int
    num_launches: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class Expectation:
    """What the engine expected, or what its parts add up to, against what there was; None: unknown."""

    name: str
    expected: int
    actual: int | None

    @property
    def difference(self) -> int | None:
        return None if self.actual is None else self.actual - self.expected


@dataclass(frozen=True)
class MemoryReport:
    """All of it. ``weights``, ``buffers`` and ``keys``: largest first. ``groups``: by number."""

    parts: tuple[Part, ...]
    expectations: tuple[Expectation, ...]
    groups: tuple[Group, ...]
    keys: tuple[KeyGraphs, ...]
    weights: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]

    @property
    def total(self) -> Part:
        """All parts; an engine that does not tell one of its sums tells no total."""
        recorded = [part.recorded for part in self.parts]
        known = [number for number in recorded if number is not None]
        return Part("total", sum(known) if len(known) == len(recorded) else None, sum(p.counted for p in self.parts))

    def to_json(self) -> dict[str, Any]:
        """Plain data with the same names as the fields."""
        parts = [*self.parts, self.total]
        return {
            **asdict(self),
            "parts": [{**asdict(part), "difference": part.difference} for part in parts],
            "expectations": [{**asdict(item), "difference": item.difference} for item in self.expectations],
        }


def report_memory(recording: Recording) -> MemoryReport:
    """What ``recording`` tells of memory, when the engine was ready."""
    weights = _tensors(
        [(w.name, w.dtype, w.shape) for w in recording.weights],
        [Block(w.address, w.num_bytes) for w in recording.weights],
    )
    groups, keys, buffers = cache_groups(recording.caches), _keys(recording.graphs), _buffers(recording.graphs)
    told = recording.memory
    parts = (
        Part("weights", None if told is None else told.weights, sum(item.own_bytes for item in weights)),
        Part("KV cache", None if told is None else told.kv_cache, sum(group.num_bytes for group in groups)),
        Part("graphs", None if told is None else told.graphs, sum(key.num_bytes for key in keys)),
        Part("workspaces", None if told is None else told.workspaces, sum(item.own_bytes for item in buffers)),
    )
    return MemoryReport(parts, _expectations(told), groups, keys, weights, buffers)


def own_bytes(blocks: Sequence[Block]) -> tuple[int, ...]:
    """Of each block the bytes that no block at a lower address covers, and none before it that begins at the same.

    They add up to the bytes of all blocks together. Blocks without an address cover nothing of each other.
    """
    own = [block.num_bytes for block in blocks]
    known = [(b.address, -b.num_bytes, place) for place, b in enumerate(blocks) if b.address is not None]
    end = 0
    for address, minus_size, place in sorted(known):
        own[place] = max(0, address - minus_size - max(end, address))
        end = max(end, address - minus_size)
    return tuple(own)


def cache_groups(caches: Sequence[CacheRecord]) -> tuple[Group, ...]:
    """``caches`` by group, shape and dtype, in order of the groups' numbers."""
    # Without an address, a shared cache is known by what it declares.
    blocks = [Block(c.address, 0 if c.address is None and c.shares_with else c.num_bytes) for c in caches]
    alike: dict[tuple[int, tuple[int, ...], str], list[tuple[CacheRecord, int]]] = {}
    for cache, own in zip(caches, own_bytes(blocks), strict=True):
        alike.setdefault((cache.group, cache.shape, cache.dtype), []).append((cache, own))
    return tuple(
        Group(
            group=number,
            num_layers=len(members),
            shape=shape,
            dtype=dtype,
            num_bytes=sum(own for _, own in members),
            shared=tuple((c.layer, c.shares_with) for c, _ in members if c.shares_with is not None),
        )
        for (number, shape, dtype), members in sorted(alike.items(), key=lambda item: item[0][0])
    )


def _tensors(facts: Iterable[tuple[str, str, tuple[int, ...]]], blocks: Sequence[Block]) -> tuple[Tensor, ...]:
    """Largest first; ``facts``: name, dtype and shape of each block."""
    tensors = [
        Tensor(name, dtype, shape, block.num_bytes, own)
        for (name, dtype, shape), block, own in zip(facts, blocks, own_bytes(blocks), strict=True)
    ]
    return tuple(sorted(tensors, key=lambda tensor: (-tensor.num_bytes, tensor.name)))


def _keys(graphs: Sequence[CapturedGraphRecord]) -> tuple[KeyGraphs, ...]:
    by_key: dict[str, list[CapturedGraphRecord]] = {}
    for graph in graphs:
        by_key.setdefault(graph.key, []).append(graph)
    keys = [
        KeyGraphs(
            key=key,
            num_graphs=len(parts),
            num_launches=sum(len(part.launches) for part in parts),
            num_bytes=sum(part.num_bytes for part in parts),
            seconds=sum(part.seconds for part in parts),
        )
        for key, parts in by_key.items()
    ]
    return tuple(sorted(keys, key=lambda item: -item.num_bytes))


def _buffers(graphs: Sequence[CapturedGraphRecord]) -> tuple[Tensor, ...]:
    """Inputs, metadata, workspaces and outputs of graphs: of each the largest part that any graph uses."""
    largest: dict[tuple[str, str, int], tuple[int, str, tuple[int, ...]]] = {}
    for graph in graphs:
        for binding in graph.bindings:
            if binding.role in _BUFFER_ROLES:
                place = (binding.role, binding.name, binding.address)
                seen = (binding.num_bytes, binding.dtype, binding.shape)
                largest[place] = max(largest.get(place, seen), seen, key=lambda item: item[0])
    facts = [(f"{role} {name}", dtype, shape) for (role, name, _), (_, dtype, shape) in largest.items()]
    blocks = [Block(place[2], size) for place, (size, _, _) in largest.items()]
    return _tensors(facts, blocks)


def _expectations(told: MemoryRecord | None) -> tuple[Expectation, ...]:
    if told is None:
        return ()
    found = []
    if told.estimated_working is not None:
        name = "set aside for the largest step and graphs; graphs took"
        found.append(Expectation(name, told.estimated_working, told.graphs))
    kept = told.weights + told.kv_cache + told.graphs + told.workspaces
    if told.device_allocated is not None:
        found.append(Expectation("all parts; allocated on the device", kept, told.device_allocated))
    found.append(Expectation("all parts; resident memory of the process", kept, told.resident))
    return tuple(found)
