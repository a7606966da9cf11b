"""Let a packed linear finish what directly follows it while its result is still in registers.

Three passes, in this order: gated activations (``act(gate) * up`` over one merged linear), plain activations, and the
addition of a residual. Each replaces a product whose only reader is the fused operation.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch.fx import Node

from compiled_engine.compile.capture import CapturedGraph
from compiled_engine.compile.passes.merge_linears import add_weight, remove_unused_weights
from compiled_engine.compile.split import changes_in_place, is_attention
from compiled_engine.ops.cpu.linear import Activation

_GATED = {
    Activation.SILU: Activation.SILU_AND_MULTIPLY,
    Activation.GELU: Activation.GELU_AND_MULTIPLY,
    Activation.GELU_TANH: Activation.GELU_TANH_AND_MULTIPLY,
}
_ADDITIONS = (operator.add, torch.add)
_MULTIPLICATIONS = (operator.mul, torch.mul)


def fuse_gated_activations(captured: CapturedGraph) -> int:
    """``act(first half) * second half`` of one product becomes the product's epilogue. Returns how often."""
    fused = 0
    for node in _calls(captured, _MULTIPLICATIONS):
        for activated, up in (node.args[:2], node.args[1::-1]):
            found = _gated(activated, up)
            if found is not None and _nothing_written_between(captured, found[0], node):
                linear, activation = found
                _replace(captured, node, linear, activation=activation, weight=_in_halves(captured, linear))
                fused += 1
                break
    return fused


def fuse_activations(captured: CapturedGraph) -> int:
    """SiLU or GELU of a whole product becomes the product's epilogue. Returns how often."""
    fused = 0
    for node in list(captured.graph_module.graph.nodes):
        activation = _activation(node)
        if activation is None:
            continue
        linear = node.args[0]
        if _is_plain_linear(linear) and _only_reader(linear, node) and _nothing_written_between(captured, linear, node):
            _replace(captured, node, linear, activation=activation)
            fused += 1
    return fused


def fuse_residuals(captured: CapturedGraph) -> int:
    """``residual + product`` becomes the product's epilogue. Returns how often."""
    fused = 0
    for node in _calls(captured, _ADDITIONS):
        for linear, residual in (node.args[1::-1], node.args[:2]):
            if (
                _is_plain_linear(linear)
                and _only_reader(linear, node)
                and isinstance(residual, Node)
                and _alike(residual, node)
                and _alike(linear, node)
                and _nothing_written_between(captured, linear, node)
            ):
                _replace(captured, node, linear, residual=residual)
                fused += 1
                break
    return fused


def _calls(captured: CapturedGraph, targets: tuple[object, ...]) -> Iterator[Node]:
    """Calls of ``targets`` with exactly two operands and nothing else."""
    for node in list(captured.graph_module.graph.nodes):
        if node.op == "call_function" and node.target in targets and len(node.args) == 2 and not node.kwargs:
            yield node


def _is_plain_linear(node: object) -> bool:
    """Whether ``node`` is a packed linear that does nothing after its product yet."""
    op = torch.ops.compiled_engine.packed_linear.default
    return isinstance(node, Node) and node.target is op and node.args[3] is None and node.args[5] == Activation.NONE


def _only_reader(node: Node, reader: Node) -> bool:
    return list(node.users) == [reader]


def _alike(node: Node, other: Node) -> bool:
    """Whether both are tensors of one shape and dtype: no broadcasting, no promotion."""
    first, second = node.meta.get("example_value"), other.meta.get("example_value")
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    return first.dtype == second.dtype and first.shape == second.shape


def _activation(node: object) -> Activation | None:
    """The activation that ``node`` computes out of place, if it is one that the kernel has."""
    if not isinstance(node, Node) or node.op != "call_function" or node.kwargs.get("inplace") or len(node.args) != 1:
        return None
    if node.target is F.silu:
        return Activation.SILU
    if node.target is F.gelu:
        return {"none": Activation.GELU, "tanh": Activation.GELU_TANH}.get(str(node.kwargs.get("approximate", "none")))
    return None


def _gated(activated: object, up: object) -> tuple[Node, Activation] | None:
    """The linear and the gated activation, where ``activated`` is its activated first half and ``up`` its second."""
    activation = _activation(activated)
    if activation not in _GATED or not isinstance(activated, Node) or not isinstance(up, Node):
        return None
    gate = activated.args[0]
    if not isinstance(gate, Node) or len(gate.users) != 1 or len(up.users) != 1 or len(activated.users) != 1:
        return None
    first, second = _half(gate), _half(up)
    if first is None or second is None or first[0] is not second[0] or (first[1], second[1]) != (0, 1):
        return None
    return first[0], _GATED[activation]


def _half(node: Node) -> tuple[Node, int] | None:
    """The packed linear of whose columns ``node`` is one half, and which; None when others read parts of it too."""
    parent = node.args[0] if node.args else None
    if not isinstance(parent, Node) or len(parent.users) != 2:
        return None
    if node.target is torch.narrow and _is_plain_linear(parent):
        dimension, start, width = node.args[1:]
        return (parent, int(start == width)) if dimension == -1 and parent.args[4] == 2 * width else None  # type: ignore[operator]
    if node.target is operator.getitem and parent.target in ("chunk", torch.chunk):
        linear = parent.args[0]
        arguments = dict(zip(("chunks", "dim"), parent.args[1:], strict=False)) | parent.kwargs
        if arguments == {"chunks": 2, "dim": -1} and _is_plain_linear(linear) and _only_reader(linear, parent):  # type: ignore[arg-type]
            return (linear, node.args[1]) if linear.args[4] % 2 == 0 else None  # type: ignore[union-attr,operator,return-value]
    return None


def _in_halves(captured: CapturedGraph, linear: Node) -> Node:
    """The weight of ``linear``, packed as two parts of equally many rows."""
    weight = linear.args[1]
    recipe = captured.weights[weight.name]  # type: ignore[union-attr]
    return add_weight(captured, replace(recipe, halves=True), weight.meta["example_value"])  # type: ignore[union-attr]


def _nothing_written_between(captured: CapturedGraph, first: Node, last: Node) -> bool:
    """Whether the product may be computed where ``last`` stands: nothing changes a tensor in place before that."""
    node = first.next
    while node is not last:
        if changes_in_place(node) and not is_attention(node):
            return False
        node = node.next
    return True


def _replace(
    captured: CapturedGraph,
    node: Node,
    linear: Node,
    *,
    activation: Activation = Activation.NONE,
    residual: Node | None = None,
    weight: Node | None = None,
) -> None:
    """Compute ``linear`` with an epilogue in the place of ``node``; what only fed ``node`` goes away."""
    graph = captured.graph_module.graph
    source, plain_weight, bias, _, width, _ = linear.args
    width = width if weight is None else width // 2  # type: ignore[operator]
    with graph.inserting_before(node):
        call = graph.call_function(
            linear.target, (source, weight or plain_weight, bias, residual, width, int(activation))
        )  # type: ignore[arg-type]
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    dead = [node]
    while dead:
        gone = dead.pop()
        feeding = gone.all_input_nodes
        graph.erase_node(gone)
        dead += [other for other in feeding if not other.users and other.op != "placeholder" and other not in dead]
    remove_unused_weights(captured)
