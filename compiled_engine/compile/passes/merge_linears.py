"""Merge linears that share an input (q, k, v; gate, up): one wide matrix product is faster than several narrow ones."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch.fx import Node

from compiled_engine.compile.capture import CapturedGraph
from compiled_engine.compile.split import changes_in_place, is_attention
from compiled_engine.compile.weights import WeightRecipe

LINEAR = torch.nn.functional.linear


def merge_linears(captured: CapturedGraph) -> int:
    """Replace linears of one input by one linear over their concatenated weights and a narrow view for each.

    Only weights (and biases) straight from the checkpoint are merged; linears with and without bias stay apart, and so
    do those before and after an operation in place, which may have changed their input.
    Returns the number of linears that went away.
    """
    graph = captured.graph_module.graph
    groups: dict[tuple[Node, bool, int], list[Node]] = defaultdict(list)
    writes = 0
    for node in graph.nodes:
        if changes_in_place(node) and not is_attention(node):
            writes += 1
        if node.op == "call_function" and node.target is LINEAR:
            source, weight, bias = linear_arguments(node)
            if all(operand.name in captured.weights for operand in _operands(node)) and _is_matrix(captured, weight):
                groups[source, bias is not None, writes].append(node)
    removed = 0
    for (source, _, _), nodes in groups.items():
        if len(nodes) > 1:
            _merge(captured, source, nodes)
            removed += len(nodes) - 1
    return removed


def linear_arguments(node: Node) -> tuple[Node, Node, Node | None]:
    """Input, weight and bias of a call of ``F.linear``, however they were passed."""
    names = ("input", "weight", "bias")
    arguments = dict(zip(names, node.args, strict=False)) | node.kwargs
    return arguments["input"], arguments["weight"], arguments.get("bias")  # type: ignore[return-value]


def add_weight(captured: CapturedGraph, recipe: WeightRecipe, example: torch.Tensor) -> Node:
    """A placeholder for ``recipe``: the one that is there, else a new one in front of all computation."""
    graph = captured.graph_module.graph
    placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
    for name, known in captured.weights.items():
        if known == recipe:
            return placeholders[name]
    with graph.inserting_after(list(placeholders.values())[-1]):
        node = graph.placeholder("weight")
    # The name of the argument in generated code, which no two may share.
    node.target = node.name
    node.meta["example_value"] = example
    captured.weights[node.name] = recipe
    return node


def remove_unused_weights(captured: CapturedGraph) -> None:
    """Erase weight placeholders that nothing reads any more."""
    graph = captured.graph_module.graph
    for node in graph.find_nodes(op="placeholder"):
        if node.name in captured.weights and not node.users:
            del captured.weights[node.name]
            graph.erase_node(node)


def _is_matrix(captured: CapturedGraph, weight: Node) -> bool:
    return len(captured.weights[weight.name].shape) == 2


def _operands(node: Node) -> list[Node]:
    _, weight, bias = linear_arguments(node)
    return [weight] if bias is None else [weight, bias]


def _merge(captured: CapturedGraph, source: Node, nodes: list[Node]) -> None:
    graph = captured.graph_module.graph
    columns = zip(*(_operands(node) for node in nodes), strict=True)
    operands = [_concatenated(captured, column) for column in columns]
    with graph.inserting_before(nodes[0]):
        merged = graph.call_function(LINEAR, (source, *operands))
        start = 0
        for node in nodes:
            width = int(linear_arguments(node)[1].meta["example_value"].shape[0])
            part = graph.call_function(torch.narrow, (merged, -1, start, width))
            node.replace_all_uses_with(part)
            for user in part.users:
                # A narrow view has gaps between its rows, which not every view can bridge.
                if user.op == "call_method" and user.target == "view":
                    user.target = "reshape"
            start += width
    for node in nodes:
        graph.erase_node(node)
    remove_unused_weights(captured)


def _concatenated(captured: CapturedGraph, operands: tuple[Node, ...]) -> Node:
    recipes = [captured.weights[operand.name] for operand in operands]
    example = torch.cat([operand.meta["example_value"] for operand in operands])
    sources = tuple(source for recipe in recipes for source in recipe.sources)
    return add_weight(captured, WeightRecipe(sources, tuple(example.shape), example.dtype), example)
