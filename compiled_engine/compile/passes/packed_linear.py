"""Replace ``F.linear`` by the op over packed weights, in the layout that its kernel reads fastest."""

from __future__ import annotations

from dataclasses import replace

import torch

from compiled_engine.compile.capture import CapturedGraph
from compiled_engine.compile.passes.merge_linears import LINEAR, add_weight, linear_arguments, remove_unused_weights
from compiled_engine.ops.cpu.linear import Activation
from compiled_engine.ops.cpu.packing import PACKED_HEAD_BYTES
from compiled_engine.ops.linear import can_pack


def use_packed_linear(captured: CapturedGraph) -> int:
    """Let every linear over a weight of the checkpoint call ``compiled_engine::packed_linear`` with the packed weight.

    A weight that something else reads too (a tied embedding) is kept beside its packed form.
    Returns the number of linears replaced.
    """
    graph = captured.graph_module.graph
    replaced = 0
    for node in graph.find_nodes(op="call_function", target=LINEAR):
        source, weight, bias = linear_arguments(node)
        recipe = captured.weights.get(weight.name)
        example = weight.meta["example_value"]
        if recipe is None or len(recipe.shape) != 2 or not can_pack(example.device, recipe.dtype):
            continue
        head = example.new_empty(PACKED_HEAD_BYTES, dtype=torch.uint8)
        packed = add_weight(captured, replace(recipe, packed=True), head)
        arguments = (source, packed, bias, None, recipe.shape[0], int(Activation.NONE))
        with graph.inserting_before(node):
            call = graph.call_function(torch.ops.compiled_engine.packed_linear.default, arguments)
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        graph.erase_node(node)
        replaced += 1
    remove_unused_weights(captured)
    return replaced
