"""The bindings that the nodes of captured graphs prove, against those that the graphs declare."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from compiled_engine.compile.graphs.backend import GraphPart, GraphRecord
from compiled_engine.compile.graphs.bindings import Role
from compiled_engine.compile.graphs.keys import GraphKey
from compiled_engine.errors import CaptureError
from compiled_engine_debug.cuda_bindings.driver import GraphNode, GraphReader
from compiled_engine_debug.cuda_bindings.expected import ExpectedByLaunch, range_of
from compiled_engine_debug.cuda_bindings.parameters import AddressRange, FoundAddress, RangeIndex, find_addresses
from compiled_engine_debug.cuda_bindings.watch import WatchedGraph
from compiled_engine_debug.findings import Finding

DETECTOR = "proven-bindings"


@dataclass(frozen=True)
class Use:
    """An address inside known memory that a node of ``part`` was given.

    ``launch``: what made the node; None where no launch is known to have. ``doubt``: why this may be a number that only
    looks like an address; empty where it is one.
    """

    part: GraphPart
    launch: str | None
    node: GraphNode
    found: FoundAddress
    doubt: str = ""

    @property
    def meant(self) -> tuple[AddressRange, ...]:
        """Of the ranges that contain the address those that begin there; all, where none does."""
        return tuple(item for item in self.found.ranges if item.address == self.found.address) or self.found.ranges

    def __str__(self) -> str:
        by = "" if self.launch is None else f" in {self.launch!r}"
        return (
            f"{self.node.name} (part {self.part.index}, node {self.node.path}{by}) is given "
            f"{' or '.join(map(str, self.meant))}: {self.found.place} is {self.found.address:#x}"
        )


@dataclass(frozen=True)
class UnusedByLaunch:
    """A launch none of whose nodes was given what the plan has it use."""

    part: GraphPart
    launch: str
    role: str
    name: str


@dataclass(frozen=True)
class ProvenBindings:
    """What the graphs of ``key`` declare and what their nodes prove.

    ``uses``: all addresses in known memory. ``weak``: what may be such an address. ``unproven``: declared and never
    given to a node, which may still find it through memory that it reads. ``undeclared``: uses of known memory that no
    binding declares. ``foreign``: uses of declared memory by a launch that the plan gives other memory, and ``unused``
    is what it should have been given. ``unread``: nodes whose arguments could not be read, with their parts.
    """

    key: GraphKey
    uses: tuple[Use, ...]
    weak: tuple[Use, ...]
    unproven: tuple[AddressRange, ...]
    undeclared: tuple[Use, ...]
    foreign: tuple[Use, ...]
    unused: tuple[UnusedByLaunch, ...]
    unread: tuple[tuple[GraphPart, GraphNode], ...]

    @property
    def proven(self) -> frozenset[AddressRange]:
        """All ranges that some node was given an address of."""
        return frozenset(item for use in self.uses for item in use.found.ranges)

    def findings(self) -> tuple[Finding, ...]:
        """Everything that differs or is in doubt, by name."""
        return tuple(self._findings())

    def _findings(self) -> Iterator[Finding]:
        for item in self.unproven:
            message = f"{item} is declared, and no node of the graph is given an address in it"
            yield self._finding(message, _layer_of(item.role, item.name))
        for use in self.undeclared:
            yield self._finding(f"not declared: {use}", _layer_of_use(use), use.node)
        for use in self.foreign:
            yield self._finding(f"another's memory: {use}", _layer_of_use(use), use.node)
        for unused in self.unused:
            message = f"{unused.launch!r} (part {unused.part.index}) is not given {unused.role} {unused.name!r}"
            yield self._finding(message, _layer_of(unused.role, unused.name))
        for use in self.weak:
            yield self._finding(f"weak, {use.doubt}: {use}", _layer_of_use(use), use.node)
        for part, node in self.unread:
            message = f"part {part.index}, node {node.path}: {node.name} cannot be read: {node.unread}"
            yield self._finding(message, None, node)

    def _finding(self, message: str, layer: str | None, node: GraphNode | None = None) -> Finding:
        return Finding(
            detector=DETECTOR,
            message=message,
            step=None,
            layer=layer,
            request=None,
            slot=None,
            key=str(self.key),
            node=None if node is None else f"{node.path} {node.name}",
        )


def prove_bindings(
    records: Iterable[GraphRecord],
    graphs: Mapping[GraphPart, WatchedGraph],
    reader: GraphReader,
    ranges: Sequence[AddressRange],
    expected: ExpectedByLaunch,
) -> tuple[ProvenBindings, ...]:
    """Compare what ``records`` declare with what the ``graphs`` of their parts use, by key.

    The parts of a key are verified and replayed as one, so that each may use what any of them declares. ``ranges``:
    memory that is known beside what is declared, such as all caches and weights. Raises ``CaptureError`` for a part
    that is not among ``graphs``, and ``DriverError``.
    """
    by_key: dict[GraphKey, list[GraphRecord]] = {}
    for record in records:
        if record.part not in graphs:
            raise CaptureError(f"graph {record.part} was captured without a watcher: its nodes are not known")
        by_key.setdefault(record.part.key, []).append(record)
    return tuple(_prove(key, parts, graphs, reader, ranges, expected) for key, parts in by_key.items())


def _prove(
    key: GraphKey,
    records: Sequence[GraphRecord],
    graphs: Mapping[GraphPart, WatchedGraph],
    reader: GraphReader,
    ranges: Sequence[AddressRange],
    expected: ExpectedByLaunch,
) -> ProvenBindings:
    declared = tuple(dict.fromkeys(range_of(binding) for record in records for binding in record.bindings))
    index = RangeIndex(dict.fromkeys((*declared, *ranges)))
    all_uses: list[Use] = []
    unread: list[tuple[GraphPart, GraphNode]] = []
    for record in records:
        watched = graphs[record.part]
        for node in reader.walk(watched.graph):
            all_uses += _uses_of(node, watched, index, reader)
            if node.unread:
                unread.append((record.part, node))
    uses = tuple(use for use in all_uses if not use.doubt)
    proven = {item for use in uses for item in use.found.ranges}
    of_declared = RangeIndex(declared)
    undeclared: list[Use] = []
    accounted: list[Use] = []
    for use in uses:
        (accounted if of_declared.containing(use.found.address) else undeclared).append(use)
    return ProvenBindings(
        key,
        uses,
        weak=tuple(use for use in all_uses if use.doubt),
        unproven=tuple(item for item in declared if item.num_bytes and item not in proven),
        undeclared=tuple(undeclared),
        foreign=tuple(use for use in accounted if _is_foreign(use, expected)),
        unused=tuple(_unused(records, graphs, uses, expected)),
        unread=tuple(unread),
    )


def _uses_of(node: GraphNode, watched: WatchedGraph, index: RangeIndex, reader: GraphReader) -> Iterator[Use]:
    for found in find_addresses(node.parameters, index):
        doubt = ""
        if not found.is_aligned:
            doubt = "not where a pointer is aligned"
        elif not reader.is_allocated(found.address):
            doubt = "not in the driver's memory"
        yield Use(watched.part, watched.launches.get(node.handle), node, found, doubt)


def _is_foreign(use: Use, expected: ExpectedByLaunch) -> bool:
    rule = expected.get(use.launch or "")
    if rule is None:
        return False
    return all(item.role in rule.roles and (item.role, item.name) not in rule.bindings for item in use.meant)


def _unused(
    records: Sequence[GraphRecord],
    graphs: Mapping[GraphPart, WatchedGraph],
    uses: Sequence[Use],
    expected: ExpectedByLaunch,
) -> Iterator[UnusedByLaunch]:
    used: dict[tuple[GraphPart, str | None], set[tuple[str, str]]] = {}
    for use in uses:
        names = used.setdefault((use.part, use.launch), set())
        names.update((item.role, item.name) for item in use.found.ranges)
    for record in records:
        # Where no launch is known to have made any node, ``unproven`` tells all that can be told.
        for launch in record.launches if graphs[record.part].launches else ():
            if launch in expected:
                for role, name in sorted(expected[launch].bindings - used.get((record.part, launch), set())):
                    yield UnusedByLaunch(record.part, launch, role, name)


def _layer_of(role: str, name: str) -> str | None:
    return name if role == Role.CACHE.value else None


def _layer_of_use(use: Use) -> str | None:
    return next((item.name for item in use.meant if item.role == Role.CACHE.value), None)
