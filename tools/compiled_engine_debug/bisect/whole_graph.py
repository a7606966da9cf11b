"""Running a whole captured graph node by node, with what attention gave back in a recorded step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from compiled_engine.compile.capture import CapturedGraph
from compiled_engine.compile.plan import AttentionStep
from compiled_engine.compile.split import SplitGraph


@dataclass(frozen=True)
class RecordedStep:
    """What a step was given, by name of the model's input, and what attention gave back in it, by layer.

    Both as far as they are known: a step may have been recorded up to some piece only.
    """

    inputs: Mapping[str, torch.Tensor]
    outs: Mapping[str, torch.Tensor]


@torch.inference_mode()
def run_up_to(
    last: str, captured: CapturedGraph, split: SplitGraph, weights: Mapping[str, torch.Tensor], step: RecordedStep
) -> dict[Node, Any]:
    """What every node up to the one called ``last`` makes, as it is when it is made.

    ``split``: ``captured`` as it is split; its attention is not run. ``weights``: by key. A node that depends on what
    ``step`` does not have is left out.
    """
    outs = {item.out: step.outs.get(item.layer_name) for item in split.steps if isinstance(item, AttentionStep)}
    values = _placeholders(captured, weights, step)
    made: dict[Node, Any] = {}
    for node in captured.graph_module.graph.nodes:
        if node.op not in ("call_function", "call_method") or any(item not in values for item in node.all_input_nodes):
            continue
        if node.name not in outs:
            values[node] = _call(node, values)
        elif (out := outs[node.name]) is not None:
            values[node] = _call(node, values).copy_(out)
        else:
            continue
        made[node] = _copied(values[node])
        if node.name == last:
            break
    return made


def _call(node: Node, values: Mapping[Node, Any]) -> Any:
    arguments: Any = map_arg(node.args, values.__getitem__)
    keywords: Any = map_arg(node.kwargs, values.__getitem__)
    if node.target in (torch.ops.compiled_engine.attention, torch.ops.compiled_engine.attention.default):
        return None
    if isinstance(node.target, str):
        return getattr(arguments[0], node.target)(*arguments[1:], **keywords)
    return node.target(*arguments, **keywords)


def _placeholders(captured: CapturedGraph, weights: Mapping[str, torch.Tensor], step: RecordedStep) -> dict[Node, Any]:
    """The arguments of the graph: weights, inputs of the model, and sizes, which are read off the inputs."""
    values: dict[Node, Any] = {}
    sizes: dict[Any, int] = {}
    placeholders = captured.graph_module.graph.find_nodes(op="placeholder")
    for node in placeholders:
        if node.name in captured.weights:
            values[node] = weights[captured.weights[node.name].key]
        elif (given := step.inputs.get(captured.inputs.get(node.name, ""))) is not None:
            values[node] = given
            for extent, size in zip(node.meta["example_value"].shape, given.shape, strict=True):
                if isinstance(extent, torch.SymInt):
                    sizes.setdefault(extent.node.expr, size)
    for node in placeholders:
        example = node.meta["example_value"]
        if isinstance(example, torch.SymInt) and example.node.expr in sizes:
            values[node] = sizes[example.node.expr]
    return values


def _copied(value: Any) -> Any:
    """``value``, whose tensors a later node may change in place, as it is now."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return tuple(map(_copied, value)) if isinstance(value, (tuple, list)) else value
