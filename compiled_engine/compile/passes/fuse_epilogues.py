"""Let a packed linear finish what directly follows it while its result is still in registers.

Three passes, in this order: gated activations (``act(gate) * up`` over one merged linear), plain activations, and the
addition of a residual. Each replaces a product whose only reader is the fused operation.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

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
_OP = torch.ops.compiled_engine.packed_linear.default
_ADDITIONS = (operator.add, torch.add)
_MULTIPLICATIONS = (operator.mul, torch.mul)


@dataclass(frozen=True)
class _Product:
    """A packed linear that does nothing after its product yet. ``width``: its number of columns."""

    node: Node
    source: Node
    weight: Node
    bias: Node | None
    width: int


def fuse_gated_activations(captured: CapturedGraph) -> int:
    """``act(first half) * second half`` of one product becomes the product's epilogue. Returns how often."""
    fused = 0
    for node in _calls(captured, _MULTIPLICATIONS):
        for activated, up in (node.args[:2], node.args[1::-1]):
            found = _gated(activated, up)
            if found is not None and _nothing_written_between(found[0].node, node):
                product, activation = found
                halves = replace(product, weight=_in_halves(captured, product.weight), width=product.width // 2)
                _replace(captured, node, halves, activation=activation)
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
        product = _product(node.args[0], node)
        if product is not None and _nothing_written_between(product.node, node):
            _replace(captured, node, product, activation=activation)
            fused += 1
    return fused


def fuse_residuals(captured: CapturedGraph) -> int:
    """``residual + product`` becomes the product's epilogue. Returns how often."""
    fused = 0
    for node in _calls(captured, _ADDITIONS):
        for linear, residual in (node.args[1::-1], node.args[:2]):
            product = _product(linear, node)
            if product is None or not isinstance(residual, Node) or not _alike(residual, node, product.node):
                continue
            if _nothing_written_between(product.node, node):
                _replace(captured, node, product, residual=residual)
                fused += 1
                break
    return fused


def _calls(captured: CapturedGraph, targets: tuple[object, ...]) -> Iterator[Node]:
    """Calls of ``targets`` with exactly two operands and nothing else."""
    for node in list(captured.graph_module.graph.nodes):
        if node.op == "call_function" and node.target in targets and len(node.args) == 2 and not node.kwargs:
            yield node


def _product(node: object, reader: Node) -> _Product | None:
    """The packed linear ``node``, if ``reader`` alone reads it and it has no epilogue yet."""
    if not isinstance(node, Node) or node.target is not _OP or list(node.users) != [reader]:
        return None
    return _plain(node)


def _plain(node: Node) -> _Product | None:
    source, weight, bias, residual, width, activation = node.args
    if node.target is not _OP or residual is not None or activation != Activation.NONE:
        return None
    return _Product(node, source, weight, bias, width)  # type: ignore[arg-type]


def _alike(*nodes: Node) -> bool:
    """Whether all are tensors of one shape and dtype: no broadcasting, no promotion."""
    values = [node.meta.get("example_value") for node in nodes]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return len(tensors) == len(nodes) and all(
        tensor.dtype == tensors[0].dtype and tensor.shape == tensors[0].shape for tensor in tensors
    )


def _activation(node: object) -> Activation | None:
    """The activation that ``node`` computes out of place, if it is one that the kernel has."""
    if not isinstance(node, Node) or node.op != "call_function" or node.kwargs.get("inplace") or len(node.args) != 1:
        return None
    if node.target is F.silu:
        return Activation.SILU
    if node.target is F.gelu:
        return {"none": Activation.GELU, "tanh": Activation.GELU_TANH}.get(str(node.kwargs.get("approximate", "none")))
    return None


def _gated(activated: object, up: object) -> tuple[_Product, Activation] | None:
    """The product and the gated activation, where ``activated`` is its activated first half and ``up`` its second."""
    activation = _activation(activated)
    if activation not in _GATED or not isinstance(activated, Node) or not isinstance(up, Node):
        return None
    gate = activated.args[0]
    if not isinstance(gate, Node) or len(gate.users) != 1 or len(up.users) != 1 or len(activated.users) != 1:
        return None
    first, second = _half(gate, 0), _half(up, 1)
    return (first, _GATED[activation]) if first is not None and first == second else None


def _half(node: Node, which: int) -> _Product | None:
    """The product of whose columns ``node`` is the first (``which`` 0) or second half; None when it is no half, or
    when more than the two halves is read of it."""
    parent = node.args[0] if node.args else None
    if not isinstance(parent, Node) or len(parent.users) != 2:
        return None
    if node.target is torch.narrow and parent.target is _OP:
        product = _plain(parent)
        if product is None or node.args[1:] != (-1, which * (product.width // 2), product.width / 2):
            return None
        return product
    if node.target is operator.getitem and parent.target in ("chunk", torch.chunk) and node.args[1] == which:
        arguments = dict(zip(("chunks", "dim"), parent.args[1:], strict=False)) | parent.kwargs
        product = _product(parent.args[0], parent)
        return product if arguments == {"chunks": 2, "dim": -1} and product and product.width % 2 == 0 else None
    return None


def _in_halves(captured: CapturedGraph, weight: Node) -> Node:
    """The weight packed as two parts of equally many rows."""
    recipe = captured.weights[weight.name]
    return add_weight(captured, replace(recipe, halves=True), weight.meta["example_value"])


def _nothing_written_between(first: Node, last: Node) -> bool:
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
    product: _Product,
    *,
    activation: Activation = Activation.NONE,
    residual: Node | None = None,
) -> None:
    """Compute ``product`` with an epilogue in the place of ``node``; what only fed ``node`` goes away."""
    graph = captured.graph_module.graph
    arguments: tuple[Any, ...] = (product.source, product.weight, product.bias, residual, product.width)
    with graph.inserting_before(node):
        call = graph.call_function(_OP, (*arguments, int(activation)))
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    dead = [node]
    while dead:
        gone = dead.pop()
        feeding = gone.all_input_nodes
        graph.erase_node(gone)
        dead += [other for other in feeding if not other.users and other.op != "placeholder" and other not in dead]
    remove_unused_weights(captured)
