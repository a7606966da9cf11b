"""Replace ``F.linear`` by the backend's op, which reads weights in the layout it was packed into at loading."""

from __future__ import annotations

from dataclasses import replace

import torch

from compiled_engine.compile.capture import CapturedGraph
from compiled_engine.compile.passes.merge_linears import LINEAR, add_weight, linear_arguments, remove_unused_weights
from compiled_engine.ops.linear import can_pack_dtype


def use_backend_linear(captured: CapturedGraph) -> int:
    """Let every linear over a weight of the checkpoint call ``compiled_engine::linear`` with the packed weight.

    A weight that something else reads too (a tied embedding) is kept beside its packed form.
    Returns the number of linears replaced.
    """
    graph = captured.graph_module.graph
    replaced = 0
    for node in graph.find_nodes(op="call_function", target=LINEAR):
        source, weight, bias = linear_arguments(node)
        recipe = captured.weights.get(weight.name)
        if recipe is None or len(recipe.shape) != 2 or not can_pack_dtype(recipe.dtype):
            continue
        packed = add_weight(captured, replace(recipe, packed=True), weight.meta["example_value"])
        with graph.inserting_before(node):
            call = graph.call_function(torch.ops.compiled_engine.linear.default, (source, packed, bias))
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        graph.erase_node(node)
        replaced += 1
    remove_unused_weights(captured)
    return replaced
