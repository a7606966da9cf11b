"""Addresses as places: a region of memory and an offset into it, so that what is equal or overlaps still is."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from compiled_engine.compile.graphs.bindings import Role
from compiled_engine_debug.recording import Recording

NULL = "null"
"""The place of address 0, that of a tensor without memory."""

_UNKNOWN = "unknown"
_FIRST_BASE = 1 << 40
_ALIGNMENT = 256
_GAP = 1 << 20


@dataclass(frozen=True)
class Region:
    """A stretch of memory. ``misalignment``: its first address modulo 256.

    ``name``: what begins there, such as ``cache:model.layers.0.self_attn``, ``weight:NAME`` or ``input:positions``.
    What overlaps it in memory belongs to it. ``unknown-N``: a cache or weight that a graph uses where none is now.
    """

    name: str
    num_bytes: int
    misalignment: int


class RegionMap:
    """Regions at addresses. ``regions`` are in ascending order of ``bases``, have distinct names and do not overlap."""

    def __init__(self, regions: Iterable[Region], bases: Iterable[int]) -> None:
        self.regions = tuple(regions)
        self.bases = tuple(bases)
        self._base_of = {region.name: base for region, base in zip(self.regions, self.bases, strict=True)}

    @classmethod
    def laid_out(cls, regions: Sequence[Region]) -> RegionMap:
        """``regions`` at addresses of their own, the same every time. Raises ``ValueError`` where names repeat."""
        if len({region.name for region in regions}) < len(regions):
            raise ValueError("two regions have one name")
        bases: list[int] = []
        end = _FIRST_BASE
        for region in regions:
            bases.append(end + region.misalignment)
            end = -(-(bases[-1] + region.num_bytes + _GAP) // _ALIGNMENT) * _ALIGNMENT
        return cls(regions, bases)

    def place(self, address: int) -> str:
        """``address`` as text: ``REGION+0xOFFSET``. Raises ``ValueError`` for an address outside of all regions."""
        if address == 0:
            return NULL
        index = bisect_right(self.bases, address) - 1
        if index < 0 or address >= self.bases[index] + self.regions[index].num_bytes:
            raise ValueError(f"{address:#x} is in no region")
        return f"{self.regions[index].name}+{address - self.bases[index]:#x}"

    def address(self, place: str) -> int:
        """The address of what ``place`` wrote. Raises ``ValueError`` for another text."""
        if place == NULL:
            return 0
        name, plus, offset = place.rpartition("+")
        if not plus or name not in self._base_of:
            raise ValueError(f"{place!r} is no place in a known region")
        return self._base_of[name] + int(offset, 16)


def regions_of(recording: Recording) -> RegionMap:
    """The regions of all addresses in ``recording``, where they were."""
    extents = sorted((item for item in _extents(recording) if item.begin != 0), key=lambda item: item.order)
    clusters: list[tuple[int, int, str]] = []
    for item in extents:
        if clusters and item.begin < clusters[-1][1]:
            begin, end, name = clusters[-1]
            clusters[-1] = (begin, max(end, item.end), name)
        else:
            clusters.append((item.begin, item.end, item.name))
    names = _distinct(name for _, _, name in clusters)
    regions = [
        Region(name, end - begin, begin % _ALIGNMENT) for name, (begin, end, _) in zip(names, clusters, strict=True)
    ]
    return RegionMap(regions, [begin for begin, _, _ in clusters])


@dataclass(frozen=True)
class _Extent:
    begin: int
    num_bytes: int
    rank: int
    name: str

    @property
    def end(self) -> int:
        return self.begin + max(1, self.num_bytes)

    @property
    def order(self) -> tuple[int, int, str]:
        return (self.begin, self.rank, self.name)


def _extents(recording: Recording) -> Iterator[_Extent]:
    for cache in recording.caches:
        if cache.address is not None:
            rank = 0 if cache.shares_with is None else 1
            yield _Extent(cache.address, cache.num_bytes, rank, f"cache:{cache.layer}")
    for weight in recording.weights:
        if weight.address is not None:
            yield _Extent(weight.address, weight.num_bytes_at_address, 2, f"weight:{weight.name}")
    for graph in recording.graphs:
        for binding in graph.bindings:
            if binding.role in (Role.CACHE.value, Role.WEIGHT.value):
                yield _Extent(binding.address, 1, 4, _UNKNOWN)
            else:
                yield _Extent(binding.address, binding.num_bytes, 3, f"{binding.role}:{binding.name}")


def _distinct(names: Iterable[str]) -> Iterator[str]:
    """``names``, of which those that are unknown, or taken, get a number."""
    taken: set[str] = set()
    num_unknown = 0
    for name in names:
        if name == _UNKNOWN or name in taken:
            num_unknown += 1
            name = f"{_UNKNOWN}-{num_unknown}"
        taken.add(name)
        yield name
