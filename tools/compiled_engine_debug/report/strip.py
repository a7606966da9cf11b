"""The model as a strip: the steps of its plan in order, each with what people want to know when they choose it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from compiled_engine.compile.graphs.bindings import Role
from compiled_engine.compile.plan import AttentionStep, GraphPlan, PieceSpec, PieceStep, TensorSpec
from compiled_engine.compile.records import CacheRecord, WeightRecord, dtype_name
from compiled_engine.ops.attention import AttentionSpec
from compiled_engine_debug.recording import Recording
from compiled_engine_debug.report.generated import Sources
from compiled_engine_debug.report.text import address_text, bytes_text, count_text, shape_text

NUM_COLOURS = 8


@dataclass(frozen=True)
class PieceKind:
    """One piece of the plan. ``letter``: its name in the strip; ``count``: how often the plan runs it."""

    key: str
    letter: str
    colour: int
    count: int
    num_weight_bytes: int
    is_head: bool


@dataclass(frozen=True)
class Block:
    """One step in the strip. ``style``: its class in the page; ``label`` is on it; ``title`` is read out."""

    style: str
    label: str
    title: str
    piece: str | None


@dataclass(frozen=True)
class Strip:
    """The strip. ``details``: plain data for the page's script, one item for each block, code and generated code by
    piece.
    """

    kinds: tuple[PieceKind, ...]
    blocks: tuple[Block, ...]
    num_layers: int
    num_windows: int
    passes: tuple[tuple[str, int], ...]
    details: dict[str, Any]


def strip(recording: Recording, generated: Mapping[str, Sources] | None = None) -> Strip | None:
    """The recorded plan; None where there is none. ``generated``: what ``generated_code`` found."""
    return None if recording.plan is None else _StripMaker(recording, recording.plan, generated or {}).make()


class _StripMaker:
    def __init__(self, recording: Recording, plan: GraphPlan, generated: Mapping[str, Sources]) -> None:
        self._generated = generated
        self._plan = plan
        self._pieces = {piece.key: piece for piece in plan.pieces}
        self._specs = {spec.layer_name: spec for spec in plan.layers}
        self._weights = {weight.name: weight for weight in recording.weights}
        self._caches = {cache.layer: cache for cache in recording.caches}
        self._bound = _num_graphs_by_address(recording)
        self._steps = (*plan.steps, plan.head)
        self._kinds = self._find_kinds()

    def make(self) -> Strip:
        windows = [spec for spec in self._plan.layers if spec.sliding_window is not None]
        return Strip(
            kinds=tuple(self._kinds.values()),
            blocks=tuple(self._blocks()),
            num_layers=len(self._plan.layers),
            num_windows=len(windows),
            passes=tuple((name, count) for name, count in self._plan.passes.items() if count),
            details={
                "steps": [
                    self._attention(step) if isinstance(step, AttentionStep) else self._piece(step)
                    for step in self._steps
                ],
                "code": {key: self._pieces[key].code for key in self._kinds},
                "generated": {key: list(self._generated.get(key, ())) for key in self._kinds},
            },
        )

    def _find_kinds(self) -> dict[str, PieceKind]:
        runs = [step for step in self._steps if isinstance(step, PieceStep)]
        counts = Counter(step.piece for step in runs)
        first = {step.piece: step for step in reversed(runs)}
        return {
            key: PieceKind(
                key=key,
                letter=_letters(place),
                colour=place % NUM_COLOURS,
                count=count,
                num_weight_bytes=sum(weight.num_bytes for weight in self._weights_of(first[key])),
                is_head=key == self._plan.head.piece,
            )
            for place, (key, count) in enumerate(counts.items())
        }

    def _weights_of(self, step: PieceStep) -> Iterator[WeightRecord]:
        for name in step.inputs:
            if weight := self._weights.get(name.removeprefix("weight:")):
                yield weight

    def _blocks(self) -> Iterator[Block]:
        layer = 0
        for step in self._steps:
            if isinstance(step, PieceStep):
                kind = self._kinds[step.piece]
                title = f"piece {kind.letter}, runs {kind.count}x" + (", the head" if step is self._plan.head else "")
                yield Block(f"piece-{kind.colour}", kind.letter, title, step.piece)
            else:
                window = self._specs[step.layer_name].sliding_window
                title = f"attention of {step.layer_name}" + ("" if window is None else f", window {window}")
                yield Block("attention" if window is None else "attention window", str(layer), title, None)
                layer += 1

    def _piece(self, step: PieceStep) -> dict[str, Any]:
        piece, kind = self._pieces[step.piece], self._kinds[step.piece]
        head = " (the head)" if step is self._plan.head else ""
        return {
            "title": f"Piece {kind.letter}{head}",
            "facts": [
                ["key", piece.key],
                ["repeats", f"runs {kind.count}x in a step of the model"],
                ["weights", bytes_text(sum(weight.num_bytes for weight in self._weights_of(step)))],
            ],
            "weights": _table("Weights", self._weight_rows(step, piece)),
            "values": [
                _table("Inputs", self._value_rows(step, piece)),
                _table("Outputs", [_row(name, spec) for name, spec in zip(step.outputs, piece.outputs, strict=True)]),
            ],
            "code": piece.key,
        }

    def _weight_rows(self, step: PieceStep, piece: PieceSpec) -> list[list[str]]:
        rows = []
        for name, spec in zip(step.inputs, piece.inputs, strict=True):
            kind, _, key = name.partition(":")
            if kind != "weight":
                continue
            weight = self._weights.get(key)
            size = None if weight is None else weight.num_bytes
            rows.append([*_row(key, spec), bytes_text(size)])
        return rows

    def _value_rows(self, step: PieceStep, piece: PieceSpec) -> list[list[str]]:
        return [
            _row(name.partition(":")[2], spec)
            for name, spec in zip(step.inputs, piece.inputs, strict=True)
            if name.startswith("value:")
        ]

    def _attention(self, step: AttentionStep) -> dict[str, Any]:
        spec, cache = self._specs[step.layer_name], self._caches.get(step.layer_name)
        values = [("query", step.query), ("key", step.key), ("value", step.value), ("output", step.out)]
        reads = f"reads the cache of {spec.shares_with}"
        return {
            "title": f"Attention of {step.layer_name}",
            "facts": [*_spec_facts(spec), *([name, text or reads] for name, text in values)],
            "binding": [["cache", "not recorded"]] if cache is None else self._cache_facts(cache),
            "code": None,
        }

    def _cache_facts(self, cache: CacheRecord) -> list[list[str]]:
        graphs = self._bound.get(cache.layer, Counter())
        same = graphs[cache.address] if cache.address is not None else 0
        facts = [
            ["layer", cache.layer],
            ["group", str(cache.group)],
            ["address", address_text(cache.address)],
            ["shape", shape_text(cache.shape)],
            ["dtype", cache.dtype],
            ["size", bytes_text(cache.num_bytes)],
            ["graphs", f"{count_text(same)} bind this address, {count_text(graphs.total() - same)} another one"],
        ]
        if cache.shares_with is not None:
            facts.insert(1, ["shares with", cache.shares_with])
        return facts


def _num_graphs_by_address(recording: Recording) -> Mapping[str, Counter[int]]:
    """Of every layer, how many captured graphs have its cache at which address."""
    found: dict[str, Counter[int]] = {}
    for graph in recording.graphs:
        for binding in graph.bindings:
            if binding.role == Role.CACHE.value:
                found.setdefault(binding.name, Counter())[binding.address] += 1
    return found


def _spec_facts(spec: AttentionSpec) -> list[list[str]]:
    window = "all positions" if spec.sliding_window is None else f"{spec.sliding_window} positions"
    facts = [
        ["heads", f"{spec.num_heads}, of keys and values {spec.num_kv_heads}"],
        ["head size", str(spec.head_dim)],
        ["scale", f"{spec.scale:g}"],
        ["sees", window],
    ]
    return facts if spec.soft_cap is None else [*facts, ["soft cap", f"{spec.soft_cap:g}"]]


def _table(title: str, rows: list[list[str]]) -> dict[str, Any]:
    return {"title": title, "head": ["name", "shape", "dtype", "size"][: len(rows[0]) if rows else 0], "rows": rows}


def _row(name: str, spec: TensorSpec) -> list[str]:
    return [name, shape_text(spec.shape), dtype_name(spec.dtype)]


def _letters(place: int) -> str:
    """A, B, ... Z, AA, AB, ..."""
    text = ""
    place += 1
    while place:
        place, digit = divmod(place - 1, 26)
        text = chr(ord("A") + digit) + text
    return text
