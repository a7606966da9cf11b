"""From a tensor that diverged to the piece that made it wrong, and to the node in that piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from compiled_engine.compile.model import CompiledModel
from compiled_engine.compile.opening import CompiledPiece
from compiled_engine.compile.pieces import PieceCompiler
from compiled_engine.compile.pipeline import PlannedGraph
from compiled_engine.compile.plan import GraphPlan, PieceStep
from compiled_engine.compile.split import Piece
from compiled_engine.ops.cpu.packing import packed_bytes
from compiled_engine_debug.bisect.calls import PieceCall, RealRows, fresh_arguments, symbols_of
from compiled_engine_debug.bisect.compare import Limits
from compiled_engine_debug.bisect.nodes import WrongNode, computed_nodes, describe, first_wrong_node, worst
from compiled_engine_debug.bisect.passes import find_wrong_pass
from compiled_engine_debug.bisect.runners import CapturedModel
from compiled_engine_debug.bisect.sites import value_name, value_sites
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
    ``weights``: names of weights that are not those of the rung compared with, or of the checkpoint.
    """

    reason: str
    piece: str = ""
    outputs: tuple[str, ...] = ()
    node: WrongNode | None = None
    weights: tuple[str, ...] = ()


def find_culprit(
    site: Site, model: CapturedModel, suspect: Suspect, good: Good | None, rows: RealRows, limits: Limits
) -> Culprit:
    """Which piece, and which of its nodes, made the tensor at ``site`` wrong.

    The pieces of the step are taken in order, up to the one that made the tensor: the operations of its graph are run
    one by one on the arguments that it had, and compared with what it gave back. Where all are right, the weights are
    looked at, then what pieces were given. ``good`` None: the rung was compared with transformers, so the weights are
    compared with the checkpoint's, and the graph with itself before each pass.
    """
    if site.tensor is TensorName.TOKEN:
        return Culprit("the sampler: the token is not the likeliest by the rung's own logits")
    if site.tensor in _OF_ATTENTION:
        return Culprit(_attention_reason(site))
    planned = model.planned
    last = _last_call(site, planned.plan)
    calls = suspect.calls[: last + 1]
    if len(calls) <= last:
        return Culprit("its pieces ran inside a CUDA graph, where their arguments cannot be seen")
    for call in calls:
        if _is_wrong(call, planned.pieces[call.step.piece], call.results, rows, limits.tolerance):
            return _in_piece(call, planned.pieces[call.step.piece], suspect, rows, limits.tolerance)
    weights = _checkpoint_weights(calls, model) if good is None else good.model.weights
    if (culprit := _in_weights(calls, planned, suspect.model.weights, weights)) is not None:
        return culprit
    if good is None:
        return _in_graph(site, model, calls, limits)
    if (culprit := _in_arguments(calls, planned, good, rows, limits)) is not None:
        return culprit
    reason = "every piece computes what its graph says, from the same values and weights"
    return _at_maker(reason, site, planned, calls)


def _attention_reason(site: Site) -> str:
    if site.tensor is TensorName.OUT:
        return "attention: what it is given and what is stored agree, so its metadata or its computation is wrong"
    return "the write into the cache: what attention is given agrees, and it is not found in the token's slot"


def _last_call(site: Site, plan: GraphPlan) -> int:
    """Which of the step's calls of pieces makes the tensor at ``site``."""
    steps = [step for step in plan.steps if isinstance(step, PieceStep)]
    if site.tensor is TensorName.LOGITS:
        return len(steps)
    value = value_name(site, plan)
    return next(index for index, step in enumerate(steps) if value in step.outputs)


def _maker_node(site: Site, planned: PlannedGraph, step: PieceStep) -> WrongNode | None:
    """The node of the step's piece that makes the tensor at ``site``."""
    position = step.outputs.index(value_name(site, planned.plan))
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


def _checkpoint_weights(calls: Sequence[PieceCall], model: CapturedModel) -> dict[str, torch.Tensor]:
    """The weights that ``calls`` are given, read again."""
    names = {name for call in calls for name in _weight_names(call)}
    return model.weights(recipe for recipe in model.planned.plan.weights if recipe.key in names)


def _weight_names(call: PieceCall) -> list[str]:
    return [name.removeprefix("weight:") for name in call.step.inputs if name.startswith("weight:")]


def _in_weights(
    calls: Sequence[PieceCall],
    planned: PlannedGraph,
    weights: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
) -> Culprit | None:
    """The first piece with a weight that is not the ``expected`` one to the bit."""
    for call in calls:
        other = tuple(name for name in _weight_names(call) if not _same_weight(weights[name], expected[name]))
        if other:
            node = _first_reader(planned.pieces[call.step.piece], call.step, other)
            return Culprit(
                "a weight of the piece is another one", call.step.piece, call.step.outputs, node=node, weights=other
            )
    return None


def _in_graph(site: Site, model: CapturedModel, calls: Sequence[PieceCall], limits: Limits) -> Culprit:
    """The pass that made the graph wrong; where none did, the graph as it was captured."""
    wrong = find_wrong_pass(site, model, calls, limits.of(site))
    if wrong is None:
        reason = "the piece computes what its graph says, and no pass changed that: the captured graph is wrong"
        return _at_maker(reason, site, model.planned, calls)
    maker = calls[-1].step
    return Culprit(
        f"the pass {wrong.name!r} changed what the graph computes", maker.piece, maker.outputs, node=wrong.node
    )


def _at_maker(reason: str, site: Site, planned: PlannedGraph, calls: Sequence[PieceCall]) -> Culprit:
    """``reason``, with the last of ``calls`` and the node in it that makes the tensor at ``site``."""
    maker = calls[-1].step
    return Culprit(reason, maker.piece, maker.outputs, _maker_node(site, planned, maker))


def _in_arguments(
    calls: Sequence[PieceCall], planned: PlannedGraph, good: Good, rows: RealRows, limits: Limits
) -> Culprit | None:
    """The first piece that is given other values than in the rung compared with."""
    sites = value_sites(planned.plan)
    for call, theirs in zip(calls, good.calls, strict=False):
        piece = planned.pieces[call.step.piece]
        symbols = symbols_of(call.step, piece.spec.inputs)
        ours = rows.of(call.arguments, piece.spec.inputs, symbols)
        others = rows.of(theirs.arguments, piece.spec.inputs, symbols)
        limit = _limit_of(call.step, sites, limits)
        for name, value, expected in zip(call.step.inputs, ours, others, strict=True):
            if name.startswith("value:") and worst([value], [expected]).relative > limit:
                reason = f"the piece is right, and is given another {name.removeprefix('value:')!r}"
                return Culprit(reason, call.step.piece, call.step.outputs)
    return None


def _limit_of(step: PieceStep, sites: Mapping[str, Site], limits: Limits) -> float:
    """What the values that a piece is given may differ by: as much as those that it reads or makes at some site.

    Rounding errors are not measured inside the model, where most values between pieces are.
    """
    names = [*(name.removeprefix("value:") for name in step.inputs), *step.outputs]
    return max((limits.of(sites[name]) for name in names if name in sites), default=limits.tolerance)


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
