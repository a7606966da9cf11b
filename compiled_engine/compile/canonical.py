"""Telling equal pieces apart from unlike ones: a hash of what a piece computes, whatever its nodes are called."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from compiled_engine.compile.plan import TensorSpec


def describe_tensors(
    inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Specs of a piece's example tensors; symbols are renamed s0, s1, ... in the order in which they are met."""
    symbols: dict[Any, Any] = {}

    def extent(value: int | torch.SymInt) -> int | str:
        if not isinstance(value, torch.SymInt):
            return int(value)
        expression = value.node.expr
        for symbol in sorted(expression.free_symbols, key=str):
            symbols.setdefault(symbol, type(symbol)(f"s{len(symbols)}", integer=True, positive=True))
        return str(expression.xreplace(symbols))

    def describe(tensor: torch.Tensor) -> TensorSpec:
        return TensorSpec(tuple(map(extent, tensor.shape)), tuple(map(extent, tensor.stride())), tensor.dtype)

    return tuple(map(describe, inputs)), tuple(map(describe, outputs))


def piece_key(module: GraphModule, inputs: Sequence[TensorSpec]) -> str:
    """Hash (sha256, hexadecimal) of a piece: operations, arguments, and shapes and dtypes of its inputs.

    Names of nodes and of weights do not enter, so the same layer computed from other weights has the same key.
    """
    numbers = {node: f"%{index}" for index, node in enumerate(module.graph.nodes)}
    rows: list[Any] = [repr(list(inputs))]
    for node in module.graph.nodes:
        if node.op != "placeholder":
            arguments = map_arg((node.args, node.kwargs), lambda argument: _Number(numbers[argument]))
            rows.append((node.op, _target_name(node), repr(arguments)))
    return hashlib.sha256(repr(rows).encode()).hexdigest()


class _Number(str):
    """A node's number; shown without quotes, so that no string argument can look like one."""

    def __repr__(self) -> str:
        return str(self)


def _target_name(node: Node) -> str:
    target = node.target
    if isinstance(target, str):
        return target
    name = getattr(target, "__qualname__", None) or str(target)
    return f"{getattr(target, '__module__', '')}.{name}"
