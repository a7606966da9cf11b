"""Which pass changed what the captured graph computes, and which of its nodes is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from compiled_engine.compile.capture import CapturedGraph
from compiled_engine.compile.passes import Pass, passes_for, run_passes
from compiled_engine.compile.plan import INPUT_IDS, LOGITS_INDICES, POSITIONS, AttentionStep, GraphPlan
from compiled_engine.compile.split import split_at_attention
from compiled_engine_debug.bisect.calls import PieceCall
from compiled_engine_debug.bisect.compare import difference
from compiled_engine_debug.bisect.nodes import WrongNode, describe
from compiled_engine_debug.bisect.runners import CapturedModel
from compiled_engine_debug.bisect.sites import value_name
from compiled_engine_debug.bisect.trace import Site
from compiled_engine_debug.bisect.whole_graph import RecordedStep, run_up_to


@dataclass(frozen=True)
class WrongPass:
    """The ``name`` of a pass, and the first ``node`` that computes something else after it than before."""

    name: str
    node: WrongNode


@dataclass(frozen=True)
class _Computed:
    """A graph after some passes, and what its nodes make, in order, up to ``last``: the node at the site."""

    captured: CapturedGraph
    values: Mapping[Node, Any]
    last: Node


def find_wrong_pass(site: Site, model: CapturedModel, calls: Sequence[PieceCall], limit: float) -> WrongPass | None:
    """The first pass after which the whole graph computes another tensor at ``site``; None where all keep it.

    The graph is captured again, and computed before and after each pass on the inputs and attention results in
    ``calls``, with the checkpoint's weights. ``limit``: what the tensors may differ by, relative to their scale.
    """
    graphs = _Graphs(site, model, calls)
    passes = passes_for(model.device)
    before = graphs.compute(())
    for number, rewrite in enumerate(passes, start=1):
        after = graphs.compute(passes[:number])
        if not _alike(after.values[after.last], before.values[before.last], limit):
            return WrongPass(rewrite.__name__, _first_unlike(before, after, limit))
        before = after
    return None


class _Graphs:
    """The captured graph after any passes, computed on one recorded step."""

    def __init__(self, site: Site, model: CapturedModel, calls: Sequence[PieceCall]) -> None:
        self._site = site
        self._model = model
        self._sharers = {layer.layer_name for layer in model.planned.plan.layers if layer.shares_with is not None}
        self._step = _recorded(calls, model.planned.plan)
        self._captured = model.capture()
        self._weights: dict[str, torch.Tensor] = {}

    def compute(self, passes: tuple[Pass, ...]) -> _Computed:
        captured = _copy(self._captured)
        run_passes(captured, passes)
        split = split_at_attention(captured, self._sharers)
        last = value_name(self._site, split)
        wanted = {recipe.key: recipe for recipe in captured.weights.values()}
        known = {key: weight for key, weight in self._weights.items() if key in wanted}
        missing = [recipe for key, recipe in wanted.items() if key not in known]
        self._weights = known | self._model.weights(missing)
        values = run_up_to(last, captured, split, self._weights, self._step)
        return _Computed(captured, values, next(node for node in values if node.name == last))


def _recorded(calls: Sequence[PieceCall], plan: GraphPlan) -> RecordedStep:
    values = {
        name.removeprefix("value:"): argument
        for call in calls
        for name, argument in zip(call.step.inputs, call.arguments, strict=True)
        if name.startswith("value:")
    }
    inputs = {name: values[name] for name in (INPUT_IDS, POSITIONS, LOGITS_INDICES) if name in values}
    attentions = [step for step in plan.steps if isinstance(step, AttentionStep)]
    return RecordedStep(inputs, {step.layer_name: values[step.out] for step in attentions if step.out in values})


def _copy(captured: CapturedGraph) -> CapturedGraph:
    """``captured`` for passes to change; nodes keep their names."""
    graph = Graph()
    graph.output(graph.graph_copy(captured.graph_module.graph, {}))
    module = GraphModule(torch.nn.Module(), graph, class_name="Captured")
    return CapturedGraph(module, dict(captured.inputs), dict(captured.weights))


def _first_unlike(before: _Computed, after: _Computed, limit: float) -> WrongNode:
    """The first node of ``after`` that is to blame for what it computes otherwise.

    Nodes are known by name. A pass gives its own nodes new ones: such a node is right where it makes what a node did
    that has gone, one for each that has. Of those that cannot be told, the first that a wrong node reads is named.
    """
    earlier = {node.name: value for node, value in before.values.items()}
    names = {node.name for node in after.values}
    gone = [value for name, value in earlier.items() if name not in names and isinstance(value, torch.Tensor)]
    right: set[Node] = set()
    wrong = after.last
    for node, value in after.values.items():
        if node.name not in earlier:
            place = next((index for index, other in enumerate(gone) if _alike(value, other, limit)), None)
            if place is None:
                continue
            del gone[place]
        elif not _alike(value, earlier[node.name], limit):
            wrong = node
            break
        right.add(node)
    suspects = _read_by(wrong, right)
    first = next(node for node in after.values if node in suspects)
    return describe(first, _placeholder_names(after.captured))


def _read_by(wrong: Node, right: set[Node]) -> set[Node]:
    """``wrong`` and what it is computed from, back to nodes that are right."""
    found, left = {wrong}, [wrong]
    while left:
        for source in left.pop().all_input_nodes:
            if source.op != "placeholder" and source not in right and source not in found:
                found.add(source)
                left.append(source)
    return found


def _placeholder_names(captured: CapturedGraph) -> list[str]:
    names = {name: f"weight:{recipe.key}" for name, recipe in captured.weights.items()}
    names |= {name: f"value:{given}" for name, given in captured.inputs.items()}
    return [names.get(node.name, node.name) for node in captured.graph_module.graph.find_nodes(op="placeholder")]


def _alike(value: Any, other: Any, limit: float) -> bool:
    """Whether two nodes make the same: tensors within ``limit``, equal sizes, tuples of such."""
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        if value.shape != other.shape:
            return False
        return value.numel() == 0 or difference(value, other).relative <= limit
    if isinstance(value, tuple) and isinstance(other, tuple):
        pairs = zip(value, other, strict=False)
        return len(value) == len(other) and all(_alike(mine, its, limit) for mine, its in pairs)
    return type(value) is type(other) and (not isinstance(value, (int, float)) or value == other)
