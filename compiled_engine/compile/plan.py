"""The graph plan: a captured model as plain data, ready to be stored and to be run without tracing anything."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch

from compiled_engine.compile.weights import WeightRecipe
from compiled_engine.errors import PlanError
from compiled_engine.ops.attention import AttentionSpec

PLAN_VERSION = 1

INPUT_IDS, POSITIONS, LOGITS_INDICES = "input_ids", "positions", "logits_indices"
"""Names of the model's inputs among a plan's values."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape, strides and dtype of a tensor that enters or leaves a piece.

    A size or stride is a number, or text where it depends on a symbol: ``"s0"`` for the first symbol of the piece.
    """

    shape: tuple[int | str, ...]
    stride: tuple[int | str, ...]
    dtype: torch.dtype


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

    @property
    def launch_name(self) -> str:
        """What its launch is called."""
        return f"piece {self.piece[:12]} ({', '.join(self.outputs)})"


@dataclass(frozen=True)
class AttentionStep:
    """Let the layer ``layer_name`` attend; the plan allocates ``out``, [num_tokens, num_heads, head_dim].

    ``key`` and ``value`` are None for a layer that reads what another layer has stored.
    """

    layer_name: str
    query: str
    key: str | None
    value: str | None
    out: str
    release: tuple[str, ...] = ()

    @property
    def launch_name(self) -> str:
        """What its launch is called."""
        return f"attention of layer {self.layer_name!r}"


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

    @property
    def logits_dtype(self) -> torch.dtype:
        """What the head computes."""
        return next(piece.outputs[0].dtype for piece in self.pieces if piece.key == self.head.piece)

    def to_json(self) -> str:
        """The plan as JSON text; ``from_json`` gives an equal plan back."""
        return json.dumps({"version": PLAN_VERSION, **asdict(self)}, indent=1, default=_dtype_name)

    @classmethod
    def from_json(cls, text: str) -> GraphPlan:
        """Read what ``to_json`` wrote. Raises ``PlanError`` for another version or a malformed text."""
        try:
            data = json.loads(text)
            if data["version"] != PLAN_VERSION:
                raise PlanError(f"the plan has version {data['version']}, this engine reads {PLAN_VERSION}")
            del data["version"]
            return _read(cls, data)
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"this is no graph plan: {type(error).__name__}: {error}") from error


def _dtype_name(value: object) -> str:
    if not isinstance(value, torch.dtype):
        raise TypeError(f"a {type(value).__name__} has no place in a plan")
    return str(value).removeprefix("torch.")


@functools.cache
def _field_types(kind: Any) -> dict[str, Any]:
    """The types of a dataclass's fields; working them out for every step again takes most of the time of reading."""
    return get_type_hints(kind)


def _read(kind: Any, data: Any) -> Any:
    """``data``, as JSON gave it, as a value of the annotated type ``kind``. Raises ``TypeError`` if it is none."""
    if is_dataclass(kind):
        kinds = _field_types(kind)  # type: ignore[arg-type]
        if not isinstance(data, dict) or set(data) != set(kinds):
            raise TypeError(f"{_shown(data)} is no {getattr(kind, '__name__', kind)} with {', '.join(kinds)}")
        return kind(**{name: _read(kinds[name], value) for name, value in data.items()})  # type: ignore[operator]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        for choice in arguments:
            with contextlib.suppress(TypeError):
                return _read(choice, data)
    elif origin is tuple and isinstance(data, list):
        return tuple(_read(arguments[0], item) for item in data)
    elif origin is Mapping and isinstance(data, dict):
        return {name: _read(arguments[1], value) for name, value in data.items()}
    elif kind is torch.dtype and isinstance(data, str) and isinstance(getattr(torch, data, None), torch.dtype):
        return getattr(torch, data)
    elif kind is float and type(data) is int:
        return float(data)
    elif type(data) is kind:
        return data
    raise TypeError(f"{_shown(data)} is no {kind}")


def _shown(data: object) -> str:
    text = repr(data)
    return text if len(text) <= 60 else f"{text[:60]}..."


def check_plan(plan: GraphPlan) -> None:
    """Raise ``PlanError`` unless every step uses what is there when it runs: pieces, weights, layers and values."""
    pieces = {piece.key: piece for piece in plan.pieces}
    weights = {f"weight:{recipe.key}" for recipe in plan.weights}
    layers = {layer.layer_name for layer in plan.layers}
    known = {f"value:{INPUT_IDS}", f"value:{POSITIONS}"}
    for step in plan.steps:
        _check_step(step, pieces, layers, weights | known)
        made = (step.out,) if isinstance(step, AttentionStep) else step.outputs
        known |= {f"value:{name}" for name in made}
        known -= {f"value:{name}" for name in step.release}
    if f"value:{plan.hidden}" not in known:
        raise PlanError(f"no step of the plan leaves its hidden states {plan.hidden!r}")
    _check_step(plan.head, pieces, layers, weights | {f"value:{plan.hidden}", f"value:{LOGITS_INDICES}"})


def _check_step(step: Step, pieces: Mapping[str, PieceSpec], layers: set[str], known: set[str]) -> None:
    if isinstance(step, AttentionStep):
        what = f"attention of {step.layer_name!r}"
        inputs = tuple(f"value:{name}" for name in (step.query, step.key, step.value) if name is not None)
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
