"""Cutting a piece's graph after a node, and searching for the node that a compiler gets wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import GraphModule, Node

from bisect_ladders import WrongPieces, drop
from compiled_engine.compile.plan import PieceSpec
from compiled_engine.compile.split import Piece
from compiled_engine.models import attention_interface
from compiled_engine_debug.bisect.nodes import computed_nodes, cut_after, first_wrong_node, source_line

SHAPE = (3, 4)


def piece_of(function: Callable[..., object]) -> Piece:
    """``function`` of tensors of ``SHAPE`` as a piece whose nodes know what they make."""
    module = torch.fx.symbolic_trace(function)
    inputs = [torch.rand(SHAPE) + 1 for _ in module.graph.find_nodes(op="placeholder")]

    class Note(torch.fx.Interpreter):
        def run_node(self, n: Node) -> object:
            n.meta["example_value"] = value = super().run_node(n)
            return value

    Note(module).run(*inputs)
    names = tuple(f"value:{index}" for index in range(len(inputs)))
    return Piece(module, PieceSpec("key", (), (), module.code), names, ())


def branches(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Two branches, a tuple whose elements are read far from where it is made, a write in place, a size."""
    first, second = torch.chunk(a * b, 2, dim=1)
    left = (a + b).relu()
    right = b.exp().reshape(b.size(0), -1)
    right.add_(1)
    left = left - right.sin()
    whole = torch.cat((first.neg(), second), dim=1)
    return (left * whole, right.sqrt())


@pytest.mark.parametrize("count", range(1, len(computed_nodes(piece_of(branches)))))
def test_cut_gives_what_the_rest_reads(count: int) -> None:
    """Run from its own nodes up to the cut, each value that is alive is what the whole graph has there."""
    piece = piece_of(branches)
    nodes = computed_nodes(piece)
    inside = nodes[:count]
    alive = [node for node in inside if any(user not in inside for user in node.users)]
    arguments = [torch.rand(SHAPE) + 1 for _ in range(2)]

    class Stop(torch.fx.Interpreter):
        values: dict[Node, object]

        def run_node(self, n: Node) -> object:
            value = super().run_node(n)
            if n in inside:
                self.seen[n] = value
            if n is inside[-1]:
                # What is alive here may be changed in place further on.
                self.kept = {node: _copy(self.seen[node]) for node in alive if node in self.seen}
            return value

    whole = Stop(piece.graph_module)
    whole.seen, whole.kept = {}, {}
    whole.run(*[argument.clone() for argument in arguments])
    expected = [tensor for node in alive for tensor in _tensors_of(whole.kept[node])]

    cut = cut_after(piece, count)

    if cut is None:
        assert expected == []
        return
    found = cut.graph_module(*[argument.clone() for argument in arguments])
    assert len(found) == len(expected)
    for value, reference in zip(found, expected, strict=True):
        assert torch.equal(value, reference)


def _copy(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return tuple(map(_copy, value)) if isinstance(value, (tuple, list)) else value


def _tensors_of(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [item for item in value if isinstance(item, torch.Tensor)] if isinstance(value, tuple) else []


SPOILABLE = [
    node.name
    for node in computed_nodes(piece_of(branches))
    if node.name in ("mul", "add", "relu", "exp", "sin", "sub", "neg", "sqrt", "mul_1")
]


@settings(max_examples=len(SPOILABLE))
@given(st.sampled_from(SPOILABLE))
def test_spoilt_node_is_found_beside_a_right_branch(name: str) -> None:
    piece = piece_of(branches)

    def spoil(node: Node) -> None:
        # Far from right, and of the same shape.
        with node.graph.inserting_after(node):
            wrong = node.graph.call_function(torch.add, (node, 10))
        node.replace_all_uses_with(wrong, delete_user_cb=lambda user: user is not wrong)

    torch.manual_seed(0)
    arguments = [torch.rand(SHAPE) + 1 for _ in range(2)]
    found = first_wrong_node(
        piece, WrongPieces("key", name, spoil), lambda: [argument.clone() for argument in arguments], 1e-4
    )
    assert found.name == name


def test_dropped_node_is_found() -> None:
    piece = piece_of(lambda a, b: (a + b).neg().exp())
    found = first_wrong_node(piece, WrongPieces("key", "neg", drop), lambda: [torch.ones(SHAPE)] * 2, 1e-4)
    assert found.name == "neg"
    assert found.operation == "neg(add)"


def test_source_line_is_the_innermost_frame() -> None:
    module = GraphModule(torch.nn.Module(), torch.fx.Graph())
    node = module.graph.placeholder("a")
    assert source_line(node) == ""
    node.meta["stack_trace"] = (
        '  File "/somewhere/run.py", line 3, in forward\n    model(x)\n'
        '  File "/env/site-packages/models/llama.py", line 64, in forward\n    hidden = x.to(torch.float32)\n    ^^^\n'
    )
    assert source_line(node) == "models/llama.py:64: hidden = x.to(torch.float32)"
    node.meta["stack_trace"] = '  File "/somewhere/run.py", line 3, in forward\n'
    assert source_line(node) == "run.py:3"


def test_source_line_has_no_path_of_the_machine() -> None:
    """Whatever package the file is in, and wherever that is installed."""
    node = torch.fx.Graph().placeholder("a")
    node.meta["stack_trace"] = f'  File "{attention_interface.__file__}", line 7, in forward\n    x = y\n'
    assert source_line(node) == "compiled_engine/models/attention_interface.py:7: x = y"
