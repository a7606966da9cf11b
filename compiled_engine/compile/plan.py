"""The graph plan: a captured model as plain data, ready to be stored and to be run without tracing anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from compiled_engine.compile.weights import WeightRecipe
from compiled_engine.errors import PlanError
from compiled_engine.ops.attention import AttentionSpec

PLAN_VERSION = 1


@dataclass(frozen=True)
class TensorSpec:
    """Shape, strides and dtype of a tensor that enters or leaves a piece.

    A size or stride is a number, or text where it depends on a symbol: ``"s0"`` for the first symbol of the piece.
    """

    shape: tuple[int | str, ...]
    stride: tuple[int | str, ...]
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass(frozen=True)
class PieceSpec:
    """A stretch of graph between attentions. ``key``: hash of what it computes; equal pieces have equal keys.

    ``code`` is the piece's generated Python text, for people who debug.
    """

    key: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    code: str


@dataclass(frozen=True)
class PieceStep:
    """Run the piece ``piece`` on values and weights; ``outputs`` name the values it makes.

    Inputs are ``"value:NAME"`` or ``"weight:KEY"``. ``release`` names the values that nothing reads afterwards.
    """

    piece: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    release: tuple[str, ...] = ()


@dataclass(frozen=True)
class AttentionStep:
    """Let the layer ``layer_name`` attend; the plan allocates ``out``, [num_tokens, num_heads, head_dim]."""

    layer_name: str
    query: str
    key: str
    value: str
    out: str
    release: tuple[str, ...] = ()


Step = PieceStep | AttentionStep


@dataclass(frozen=True)
class GraphPlan:
    """A whole model: ``steps`` turn ``input_ids`` and ``positions`` into ``hidden``; ``head`` turns ``hidden`` and
    ``logits_indices`` into logits. ``passes`` tells how often each pass fired."""

    layers: tuple[AttentionSpec, ...]
    weights: tuple[WeightRecipe, ...]
    pieces: tuple[PieceSpec, ...]
    steps: tuple[Step, ...]
    head: PieceStep
    hidden: str
    vocab_size: int
    passes: Mapping[str, int]

    def to_json(self) -> str:
        """The plan as JSON text; ``from_json`` gives an equal plan back."""
        data = {
            "version": PLAN_VERSION,
            "layers": [layer.to_json() for layer in self.layers],
            "weights": [recipe.to_json() for recipe in self.weights],
            "pieces": [asdict(piece) for piece in self.pieces],
            "steps": [asdict(step) for step in self.steps],
            "head": asdict(self.head),
            "hidden": self.hidden,
            "vocab_size": self.vocab_size,
            "passes": dict(self.passes),
        }
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str) -> GraphPlan:
        """Read what ``to_json`` wrote. Raises ``PlanError`` for another version or a malformed text."""
        try:
            data = json.loads(text)
            if data["version"] != PLAN_VERSION:
                raise PlanError(f"the plan has version {data['version']}, this engine reads {PLAN_VERSION}")
            return cls(
                layers=tuple(AttentionSpec(**layer) for layer in data["layers"]),
                weights=tuple(WeightRecipe.from_json(recipe) for recipe in data["weights"]),
                pieces=tuple(_piece_from_json(piece) for piece in data["pieces"]),
                steps=tuple(_step_from_json(step) for step in data["steps"]),
                head=_piece_step(data["head"]),
                hidden=data["hidden"],
                vocab_size=data["vocab_size"],
                passes=data["passes"],
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(f"this is no graph plan: {type(error).__name__}: {error}") from error


def _piece_from_json(data: Mapping[str, Any]) -> PieceSpec:
    tensors = {
        side: tuple(TensorSpec(tuple(t["shape"]), tuple(t["stride"]), t["dtype"]) for t in data[side])
        for side in ("inputs", "outputs")
    }
    return PieceSpec(data["key"], tensors["inputs"], tensors["outputs"], data["code"])


def _piece_step(data: Mapping[str, Any]) -> PieceStep:
    return PieceStep(data["piece"], *(tuple(data[name]) for name in ("inputs", "outputs", "release")))


def _step_from_json(data: Mapping[str, Any]) -> Step:
    if "piece" in data:
        return _piece_step(data)
    return AttentionStep(**(dict(data) | {"release": tuple(data["release"])}))


def check_plan(plan: GraphPlan) -> None:
    """Raise ``PlanError`` unless every step uses what is there when it runs: pieces, weights, layers and values."""
    pieces = {piece.key: piece for piece in plan.pieces}
    weights = {f"weight:{recipe.key}" for recipe in plan.weights}
    layers = {layer.layer_name for layer in plan.layers}
    known = {"value:input_ids", "value:positions"}
    for step in plan.steps:
        _check_step(step, pieces, layers, weights | known)
        made = (step.out,) if isinstance(step, AttentionStep) else step.outputs
        known |= {f"value:{name}" for name in made}
        known -= {f"value:{name}" for name in step.release}
    if f"value:{plan.hidden}" not in known:
        raise PlanError(f"no step of the plan leaves its hidden states {plan.hidden!r}")
    _check_step(plan.head, pieces, layers, weights | {f"value:{plan.hidden}", "value:logits_indices"})


def _check_step(step: Step, pieces: Mapping[str, PieceSpec], layers: set[str], known: set[str]) -> None:
    if isinstance(step, AttentionStep):
        what = f"attention of {step.layer_name!r}"
        inputs = tuple(f"value:{name}" for name in (step.query, step.key, step.value))
        if step.layer_name not in layers:
            raise PlanError(f"a step attends in layer {step.layer_name!r}, which is not among the plan's layers")
    else:
        what, inputs = f"piece {step.piece[:12]!r}", step.inputs
        if step.piece not in pieces:
            raise PlanError(f"a step runs {what}, which is not among the plan's pieces")
        spec = pieces[step.piece]
        if (len(step.inputs), len(step.outputs)) != (len(spec.inputs), len(spec.outputs)):
            raise PlanError(f"a step gives {what} another number of inputs or outputs than it has")
    if missing := [name for name in inputs if name not in known]:
        raise PlanError(f"{what} reads what is not there when it runs: {', '.join(missing[:8])}")
