"""What can be compared of a file: a recorded run, a graph plan, or a key of stored graphs with its components."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from compiled_engine.compile.graphs.bindings import Role
from compiled_engine.compile.plan import GraphPlan, PieceStep
from compiled_engine.compile.records import BindingRecord, CapturedGraphRecord
from compiled_engine.errors import PlanError
from compiled_engine_debug.recording import Recording, RecordingError
from compiled_engine_debug.runs import read_run

Facts = Mapping[str, Any]
"""Item to value, which is plain data; a mapping is compared field by field."""

IGNORED_SETTINGS = ("record",)
"""Settings that name the recording itself."""

_DIGITS = 16


@dataclass(frozen=True)
class Contents:
    """One file. ``sections``: by name; a file has those of which it tells anything.

    ``bindings``: of every captured graph, by its name, the tensors that it uses. ``launches``: of every captured graph
    their names. ``piece_order``: the pieces as they run, each with the attention that it comes before. ``lookup``:
    what the start's search for stored graphs led to, "hit" or "miss"; None: it did not search, or that is not known.
    """

    name: str
    sections: Mapping[str, Facts]
    bindings: Mapping[str, Facts] = field(default_factory=dict)
    launches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    piece_order: tuple[tuple[str, str], ...] = ()
    lookup: str | None = None


def read_contents(path: Path) -> Contents:
    """What ``path`` holds. Raises ``RecordingError`` or ``BundleError`` for a file that cannot be read as any."""
    data = _single_object(path)
    if data is None or data.get("kind") == "header":
        return contents_of(read_run(path))
    if isinstance(data.get("components"), dict):
        return Contents(str(path), {"components of the store key": data["components"]})
    try:
        plan = GraphPlan.from_json(json.dumps(data))
    except PlanError as error:
        problem = f"{error}; give a recording, a graph plan, or what `compiled-engine graphs explain --json` printed"
        raise RecordingError(path, None, problem) from error
    return Contents(str(path), _plan_sections(plan), piece_order=_piece_order(plan))


def contents_of(recording: Recording) -> Contents:
    """What can be compared of ``recording``: its start, not its steps."""
    header, plan = recording.header, recording.plan
    settings = {name: value for name, value in header.config.items() if name not in IGNORED_SETTINGS}
    sections: dict[str, Facts] = {"versions": {"engine": header.engine, **header.versions}, "settings": settings}
    if header.model is not None:
        sections["model"] = asdict(header.model)
    if plan is not None:
        sections |= _plan_sections(plan)
    sections["weights"] = {
        weight.name: {"dtype": weight.dtype, "shape": weight.shape, "num_bytes": weight.num_bytes}
        for weight in recording.weights
    }
    sections["caches"] = {
        cache.layer: {
            "group": cache.group,
            "shape": cache.shape,
            "dtype": cache.dtype,
            "shares_with": cache.shares_with,
        }
        for cache in recording.caches
    }
    sections["declared graphs"] = {key.key: key.kind for key in recording.keys}
    sections["captured graphs"] = _captured(recording.graphs)
    lookups = [phase.note for phase in recording.phases if phase.name == "graphs"]
    return Contents(
        name=str(recording.path),
        sections=sections,
        bindings=_bindings(recording),
        launches={_graph_name(graph): graph.launches for graph in recording.graphs},
        piece_order=() if plan is None else _piece_order(plan),
        lookup=lookups[-1] if lookups else None,
    )


def _plan_sections(plan: GraphPlan) -> dict[str, Facts]:
    counts = Counter(step.piece for step in (*plan.steps, plan.head) if isinstance(step, PieceStep))
    return {
        "attention layers": {layer.layer_name: asdict(layer) for layer in plan.layers},
        "pieces": {f"piece {key[:_DIGITS]}: places": count for key, count in counts.items()},
        "passes": {f"{name}: fired": count for name, count in plan.passes.items()},
    }


def _piece_order(plan: GraphPlan) -> tuple[tuple[str, str], ...]:
    order: list[tuple[str, str]] = []
    waiting: list[str] = []
    for step in plan.steps:
        if isinstance(step, PieceStep):
            waiting.append(step.piece[:_DIGITS])
        else:
            order += [(piece, f"before attention of {step.layer_name}") for piece in waiting]
            waiting.clear()
    order += [(piece, "after the last attention") for piece in waiting]
    return (*order, (plan.head.piece[:_DIGITS], "the head"))


def _captured(graphs: Iterable[CapturedGraphRecord]) -> Facts:
    by_key: dict[str, dict[str, int]] = {}
    for graph in graphs:
        counts = by_key.setdefault(graph.key, {"graphs": 0, "launches": 0})
        counts["graphs"] += 1
        counts["launches"] += len(graph.launches)
    return by_key


def _graph_name(graph: CapturedGraphRecord) -> str:
    return f"{graph.key}, part {graph.part}"


def _bindings(recording: Recording) -> dict[str, Facts]:
    places = _Places(recording)
    return {
        _graph_name(graph): {
            f"{binding.role} {binding.name}": {
                "place": places.of(binding),
                "shape": binding.shape,
                "stride": binding.stride,
                "dtype": binding.dtype,
                "num_bytes": binding.num_bytes,
            }
            for binding in graph.bindings
        }
        for graph in recording.graphs
    }


class _Places:
    """Addresses as something that is the same in every process: bytes from the beginning of what lies there."""

    def __init__(self, recording: Recording) -> None:
        self._caches = [
            (cache.address, cache.num_bytes, f"the cache of {cache.layer}")
            for cache in recording.caches
            if cache.address is not None and cache.shares_with is None
        ]
        self._weights = [
            (weight.address, weight.num_bytes_at_address, f"the weight {weight.name}")
            for weight in recording.weights
            if weight.address is not None
        ]
        self._lowest: dict[tuple[str, str], int] = {}
        for graph in recording.graphs:
            for binding in graph.bindings:
                subject = (binding.role, binding.name)
                self._lowest[subject] = min(binding.address, self._lowest.get(subject, binding.address))
        self._known: dict[int, str] = {}

    def of(self, binding: BindingRecord) -> str:
        if binding.role == Role.CACHE:
            return self._inside(binding.address, self._caches, "outside of all caches")
        if binding.role == Role.WEIGHT:
            return self._inside(binding.address, self._weights, "outside of all weights")
        offset = binding.address - self._lowest[binding.role, binding.name]
        return f"{offset} bytes from its lowest address in any graph" if offset else "its lowest address in any graph"

    def _inside(self, address: int, blocks: Iterable[tuple[int, int, str]], otherwise: str) -> str:
        if address not in self._known:
            inside = [(begin, name) for begin, size, name in blocks if begin <= address < begin + max(1, size)]
            begin, name = min(inside, default=(address, otherwise))
            self._known[address] = name if address == begin else f"{name}, {address - begin} bytes from its beginning"
        return self._known[address]


def _single_object(path: Path) -> dict[str, Any] | None:
    """The JSON object that is all of a file; None for any other file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # reading it as a recording tells what is wrong, if anything is
    return data if isinstance(data, dict) else None
