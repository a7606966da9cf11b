"""What differs between two starts, and which of it would keep the graphs of one from serving the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from compiled_engine.compile.key import OPT_OUT
from compiled_engine_debug.diff_facts import Contents, Facts

# Versions that are components of the key, and how they are called there. This engine's own sources are hashed.
_VERSION_COMPONENTS = {"torch": "torch.version", "transformers": "model.transformers", "engine": "source.*"}
_MODEL_COMPONENTS = {
    "dtype": "engine.dtype",
    "architecture": "model.*",
    "vocab_size": "model.*",
    "num_layers": "model.*",
}

Unequal = tuple[str, Any, Any]
"""An item with its value in one file and in the other."""


@dataclass(frozen=True)
class Difference:
    """``item`` of ``section`` has the value ``a`` in one file and ``b`` in the other; None: it is not there.

    ``component``: that of the key of stored graphs which this changes; None: none. ``note``: where it shows first.
    """

    section: str
    item: str
    a: Any
    b: Any
    component: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class Comparison:
    """All differences, section by section. ``left_out``: sections that only one of the files has."""

    a: Contents
    b: Contents
    differences: tuple[Difference, ...]
    left_out: tuple[str, ...]

    @property
    def components(self) -> tuple[str, ...]:
        """Components of the key of stored graphs that would differ."""
        return tuple(sorted({item.component for item in self.differences if item.component is not None}))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "a": self.a.name,
            "b": self.b.name,
            "differences": [asdict(difference) for difference in self.differences],
            "key_components": list(self.components),
            "lookups": [self.a.lookup, self.b.lookup],
            "left_out": list(self.left_out),
        }


def compare(a: Contents, b: Contents) -> Comparison:
    """Everything in which ``a`` and ``b`` differ. Launches and bindings are compared in graphs that both captured."""
    differences: list[Difference] = []
    for name in (name for name in a.sections if name in b.sections):
        if name == "pieces":
            differences += _piece_order(a, b)
        differences += _section(name, a.sections[name], b.sections[name])
        if name == "captured graphs":
            differences += _in_graphs(name, {graph: _launches(a, b, graph) for graph in a.launches})
    both = [graph for graph in a.bindings if graph in b.bindings]
    bindings = {graph: _unequal(a.bindings[graph], b.bindings[graph]) for graph in both}
    differences += _in_graphs("bindings", bindings)
    left_out = sorted(set(a.sections) ^ set(b.sections))
    return Comparison(a, b, tuple(differences), tuple(left_out))


def _section(section: str, a: Facts, b: Facts) -> Iterator[Difference]:
    for item, value_a, value_b in _unequal(a, b):
        yield Difference(section, item, value_a, value_b, _component(section, item, value_a, value_b))


def _unequal(a: Facts, b: Facts) -> Iterator[Unequal]:
    """Items with unlike values, in the order of ``a`` and then ``b``; of mappings that both have, only their fields."""
    for item in dict.fromkeys((*a, *b)):
        value_a, value_b = a.get(item), b.get(item)
        if isinstance(value_a, Mapping) and isinstance(value_b, Mapping):
            yield from ((f"{item}: {name}", *values) for name, *values in _unequal(value_a, value_b))
        elif value_a != value_b:
            yield item, value_a, value_b


def _component(section: str, item: str, a: Any, b: Any) -> str | None:
    if section == "components of the store key":
        return item
    if section == "versions":
        return _VERSION_COMPONENTS.get(item)
    if section == "model":
        return _MODEL_COMPONENTS.get(item)
    if section != "settings" or item in OPT_OUT:
        return None
    # Which of several equal GPUs it is makes no difference.
    if item == "device" and str(a).partition(":")[0] == str(b).partition(":")[0]:
        return None
    return f"engine.{item}"


def _piece_order(a: Contents, b: Contents) -> Iterator[Difference]:
    """The first place at which another piece runs."""
    for place, (one, other) in enumerate(zip_longest(a.piece_order, b.piece_order)):
        if one != other:
            texts = [None if ran is None else f"piece {ran[0]} {ran[1]}" for ran in (one, other)]
            yield Difference("pieces", f"first to differ, {place} in order", *texts)
            return


def _launches(a: Contents, b: Contents, graph: str) -> Iterator[Unequal]:
    """The first launch of ``graph`` that differs, where both have captured it."""
    ours = a.launches[graph]
    for place, (one, other) in enumerate(zip_longest(ours, b.launches.get(graph, ours))):
        if one != other:
            yield f"launch {place}", one, other
            return


def _in_graphs(section: str, found: Mapping[str, Iterable[Unequal]]) -> Iterator[Difference]:
    """What was ``found``, by graph; what differs in several graphs alike comes once, with their number."""
    graphs: dict[str, list[str]] = {}
    firsts: dict[str, Unequal] = {}
    for graph, unequal in found.items():
        for difference in unequal:
            graphs.setdefault(repr(difference), []).append(graph)
            firsts.setdefault(repr(difference), difference)
    for same, where in graphs.items():
        more = f" and {len(where) - 1} more graphs" if len(where) > 1 else ""
        yield Difference(section, *firsts[same], note=f"in {where[0]}{more}")
