"""From a tensor that diverged to the piece that made it wrong, and to the node in that piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from compiled_engine.compile.model import CompiledModel
from compiled_engine.compile.opening import CompiledPiece
from compiled_engine.compile.pieces import PieceCompiler
from compiled_engine.compile.pipeline import PlannedGraph
from compiled_engine.compile.plan import AttentionStep, GraphPlan, PieceStep
from compiled_engine.compile.split import Piece
from compiled_engine.ops.cpu.packing import packed_bytes
from compiled_engine_debug.bisect.calls import PieceCall, RealRows, fresh_arguments, symbols_of
from compiled_engine_debug.bisect.nodes import WrongNode, computed_nodes, describe, first_wrong_node, worst
from compiled_engine_debug.bisect.trace import Site, TensorName

_OF_ATTENTION = (TensorName.STORED_KEY, TensorName.STORED_VALUE, TensorName.OUT)


@dataclass(frozen=True)
class Suspect:
    """A rung that diverged, as it ran the step in question. ``compiler``: what made ``pieces``."""

    calls: Sequence[PieceCall]
    pieces: Mapping[str, CompiledPiece]
    compiler: PieceCompiler
    model: CompiledModel


@dataclass(frozen=True)
class Good:
    """The rung it was compared with, in the same step, if that runs pieces too."""

    calls: Sequence[PieceCall]
    model: CompiledModel


@dataclass(frozen=True)
class Culprit:
    """What is wrong. ``piece``: key of the piece, which makes the values ``outputs``; both empty for attention.

    ``node``: the first wrong node, or the one that makes the tensor where none is wrong by itself.
    ``weights``: names of weights that are not those of the rung compared with.
    """

    reason: str
    piece: str = ""
    outputs: tuple[str, ...] = ()
    node: WrongNode | None = None
    weights: tuple[str, ...] = ()


def find_culprit(
    site: Site, planned: PlannedGraph, suspect: Suspect, good: Good | None, rows: RealRows, tolerance: float
) -> Culprit:
    """Which piece, and which of its nodes, made the tensor at ``site`` wrong.

    The pieces of the step are taken in order, up to the one that made the tensor: the operations of its graph are run
    one by one on the arguments that it had, and compared with what it gave back.
    """
    if site.tensor is TensorName.TOKEN:
        return Culprit("the sampler: the token is not the likeliest by the rung's own logits")
    if site.tensor in _OF_ATTENTION:
        return Culprit(_attention_reason(site))
    last = _last_call(site, planned.plan)
    calls = suspect.calls[: last + 1]
    if len(calls) <= last:
        return Culprit("its pieces ran inside a CUDA graph, where their arguments cannot be seen")
    for call in calls:
        if _is_wrong(call, planned.pieces[call.step.piece], call.results, rows, tolerance):
            return _in_piece(call, planned.pieces[call.step.piece], suspect, rows, tolerance)
    maker = calls[last]
    node = _maker_node(site, planned, maker.step)
    if good is not None:
        return _in_arguments(calls, planned, suspect, good, rows, tolerance, node)
    return Culprit(
        "the piece computes what its graph says: the graph (capture or passes) or its weights are wrong",
        maker.step.piece,
        maker.step.outputs,
        node,
    )


def _attention_reason(site: Site) -> str:
    if site.tensor is TensorName.OUT:
        return "attention: what it is given and what is stored agree, so its metadata or its computation is wrong"
    return "the write into the cache: what attention is given agrees, and it is not found in the token's slot"


def _last_call(site: Site, plan: GraphPlan) -> int:
    """Which of the step's calls of pieces makes the tensor at ``site``."""
    steps = [step for step in plan.steps if isinstance(step, PieceStep)]
    if site.tensor is TensorName.LOGITS:
        return len(steps)
    value = _value_name(site, plan)
    return next(index for index, step in enumerate(steps) if value in step.outputs)


def _value_name(site: Site, plan: GraphPlan) -> str:
    """The plan's name of the tensor at ``site``."""
    if site.tensor is TensorName.LOGITS:
        return plan.head.outputs[0]
    if site.tensor is TensorName.HIDDEN:
        return plan.hidden
    attention = next(step for step in plan.steps if isinstance(step, AttentionStep) and step.layer_name == site.layer)
    names = {TensorName.QUERY: attention.query, TensorName.KEY: attention.key, TensorName.VALUE: attention.value}
    name = names[site.tensor]
    if name is None:
        raise ValueError(f"the plan makes no {site}")
    return name


def _maker_node(site: Site, planned: PlannedGraph, step: PieceStep) -> WrongNode | None:
    """The node of the step's piece that makes the tensor at ``site``."""
    position = step.outputs.index(_value_name(site, planned.plan))
    output = planned.pieces[step.piece].graph_module.graph.output_node()
    made = output.args[0][position]  # type: ignore[index]
    return describe(made, step.inputs) if isinstance(made, torch.fx.Node) else None


def _is_wrong(call: PieceCall, piece: Piece, results: Sequence[torch.Tensor], rows: RealRows, tolerance: float) -> bool:
    """Whether ``results`` are not what the piece's operations, one by one, make of the call's arguments."""
    with torch.inference_mode():
        expected = piece.graph_module(*fresh_arguments(call))
    symbols = symbols_of(call.step, piece.spec.inputs)
    specs = piece.spec.outputs
    return worst(rows.of(results, specs, symbols), rows.of(expected, specs, symbols)).relative > tolerance


def _in_piece(call: PieceCall, piece: Piece, suspect: Suspect, rows: RealRows, tolerance: float) -> Culprit:
    with torch.inference_mode():
        again = suspect.pieces[call.step.piece](fresh_arguments(call))
    if not _is_wrong(call, piece, again, rows, tolerance):
        reason = "the piece is right when it is called again: its results were overwritten, or computed from others"
        return Culprit(reason, call.step.piece, call.step.outputs)
    # Like pieces are one piece; this is what the call in question is given.
    piece = replace(piece, inputs=call.step.inputs)
    node = first_wrong_node(piece, suspect.compiler, lambda: fresh_arguments(call), tolerance)
    return Culprit("the compiled piece does not compute what its graph says", call.step.piece, call.step.outputs, node)


def _in_arguments(
    calls: Sequence[PieceCall],
    planned: PlannedGraph,
    suspect: Suspect,
    good: Good,
    rows: RealRows,
    tolerance: float,
    node: WrongNode | None,
) -> Culprit:
    """The first piece that is given other values, or other weights, than in the rung compared with."""
    for call, theirs in zip(calls, good.calls, strict=False):
        piece = planned.pieces[call.step.piece]
        where = (call.step.piece, call.step.outputs)
        weights = tuple(
            name
            for name in (item.removeprefix("weight:") for item in call.step.inputs if item.startswith("weight:"))
            if not _same_weight(suspect.model.weights[name], good.model.weights[name])
        )
        if weights:
            first = _first_reader(piece, call.step, weights)
            return Culprit("a weight of the piece is another one", *where, node=first, weights=weights)
        symbols = symbols_of(call.step, piece.spec.inputs)
        ours = rows.of(call.arguments, piece.spec.inputs, symbols)
        others = rows.of(theirs.arguments, piece.spec.inputs, symbols)
        for name, value, expected in zip(call.step.inputs, ours, others, strict=True):
            if name.startswith("value:") and worst([value], [expected]).relative > tolerance:
                return Culprit(f"the piece is right, and is given another {name.removeprefix('value:')!r}", *where)
    return Culprit(
        "every piece computes what its graph says, from the same values and weights",
        calls[-1].step.piece,
        calls[-1].step.outputs,
        node,
    )


def _first_reader(piece: Piece, step: PieceStep, weights: Sequence[str]) -> WrongNode | None:
    """The first node that reads one of ``weights``."""
    placeholders = piece.graph_module.graph.find_nodes(op="placeholder")
    readers = {
        user
        for placeholder, name in zip(placeholders, step.inputs, strict=True)
        if name.removeprefix("weight:") in weights
        for user in placeholder.users
    }
    return next((describe(node, step.inputs) for node in computed_nodes(piece) if node in readers), None)


def _same_weight(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(_all_of(ours), _all_of(theirs))


def _all_of(weight: torch.Tensor) -> torch.Tensor:
    """A weight's numbers; of a packed one, which graphs see the head of, all of its bytes."""
    if weight.dtype is torch.uint8:
        return weight.as_strided((packed_bytes(weight),), (1,))
    return weight
