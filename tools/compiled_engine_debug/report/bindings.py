"""Which memory captured graphs use: a table of graphs and layers, and whether each address is the one in use now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from compiled_engine.compile.graphs.bindings import Role
from compiled_engine.compile.records import BindingRecord, CapturedGraphRecord
from compiled_engine_debug.recording import Recording
from compiled_engine_debug.report.text import address_text

SAME, OTHER, ABSENT, UNKNOWN = "same", "other", "absent", "unknown"
GLYPHS = {SAME: "=", OTHER: "≠", ABSENT: "·", UNKNOWN: "?"}


@dataclass(frozen=True)
class Cell:
    """What a graph has for one layer: the cache's present address, another, none (not bound), or nobody can tell."""

    state: str
    glyph: str
    title: str


@dataclass(frozen=True)
class Row:
    """Graphs that bind every cache alike. ``graphs``: their names; ``moved``: what is at another address, in words."""

    graphs: tuple[str, ...]
    cells: tuple[Cell, ...]
    moved: tuple[str, ...]


@dataclass(frozen=True)
class RoleUse:
    """How many tensors of one role graphs bind, over how many graphs, and how many have not the same address in all."""

    role: str
    num_names: int
    num_graphs: int
    num_differing: int


@dataclass(frozen=True)
class Moved:
    """A tensor that graph ``graph`` has at ``captured``, while the recording has it at ``present``."""

    graph: CapturedGraphRecord
    binding: BindingRecord
    present: int


@dataclass(frozen=True)
class BindingTable:
    """``layers``: all layers with a cache, in order."""

    layers: tuple[str, ...]
    rows: tuple[Row, ...]
    roles: tuple[RoleUse, ...]


def graph_name(graph: CapturedGraphRecord) -> str:
    """``graph`` as messages of the engine name it."""
    return f"{graph.key}, part {graph.part}"


def binding_table(recording: Recording) -> BindingTable | None:
    """Of all captured graphs; None where nothing was captured."""
    if not recording.graphs:
        return None
    layers = {cache.layer: cache.address for cache in recording.caches}
    groups: dict[tuple[tuple[int, tuple[int, ...], str] | None, ...], list[CapturedGraphRecord]] = {}
    for graph in recording.graphs:
        caches = _caches_of(graph)
        bound = (caches.get(layer) for layer in layers)
        places = tuple(None if item is None else (item.address, item.shape, item.dtype) for item in bound)
        groups.setdefault(places, []).append(graph)
    return BindingTable(
        tuple(layers), tuple(_row(graphs, layers) for graphs in groups.values()), tuple(_roles(recording))
    )


def moved_bindings(recording: Recording) -> Iterator[Moved]:
    """Caches and weights that a graph has at another address than the recording tells."""
    present: dict[tuple[str, str], int | None] = {
        (Role.CACHE.value, cache.layer): cache.address for cache in recording.caches
    }
    present |= {(Role.WEIGHT.value, weight.name): weight.address for weight in recording.weights}
    for graph in recording.graphs:
        for binding in graph.bindings:
            address = present.get((binding.role, binding.name))
            if address is not None and address != binding.address:
                yield Moved(graph, binding, address)


def _caches_of(graph: CapturedGraphRecord) -> dict[str, BindingRecord]:
    return {binding.name: binding for binding in graph.bindings if binding.role == Role.CACHE.value}


def _row(graphs: list[CapturedGraphRecord], layers: Mapping[str, int | None]) -> Row:
    caches = _caches_of(graphs[0])
    cells, moved = [], []
    for layer, present in layers.items():
        bound = caches.get(layer)
        if bound is None:
            cells.append(_cell(ABSENT, f"{layer}: not bound"))
        elif present is None:
            cells.append(_cell(UNKNOWN, f"{layer}: {address_text(bound.address)}; where it is now is not recorded"))
        elif bound.address == present:
            cells.append(_cell(SAME, f"{layer}: {address_text(present)}, as now"))
        else:
            text = f"{layer}: captured at {address_text(bound.address)}, now at {address_text(present)}"
            cells.append(_cell(OTHER, text))
            moved.append(text)
    return Row(tuple(map(graph_name, graphs)), tuple(cells), tuple(moved))


def _cell(state: str, title: str) -> Cell:
    return Cell(state, GLYPHS[state], title)


def _roles(recording: Recording) -> Iterator[RoleUse]:
    addresses: dict[str, dict[str, set[int]]] = {}
    graphs: dict[str, set[int]] = {}
    for number, graph in enumerate(recording.graphs):
        for binding in graph.bindings:
            addresses.setdefault(binding.role, {}).setdefault(binding.name, set()).add(binding.address)
            graphs.setdefault(binding.role, set()).add(number)
    for role, names in addresses.items():
        differing = sum(len(places) > 1 for places in names.values())
        yield RoleUse(role, len(names), len(graphs[role]), differing)
