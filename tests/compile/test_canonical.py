"""The key of a piece: blind to names, sensitive to everything that is computed."""

from __future__ import annotations

import operator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from compiled_engine.compile.canonical import describe_tensors, piece_key
from compiled_engine.compile.plan import TensorSpec

INPUTS = (TensorSpec(("s0", 4), (4, 1), torch.float32), TensorSpec((4, 4), (4, 1), torch.float32))

Operation = tuple[tuple[str, Any], tuple[Any, ...], tuple[tuple[str, Any], ...]]
"""What to call (a function, or the name of a method), arguments (``("node", i)`` for results), keyword arguments."""

targets = st.sampled_from(
    [
        ("function", torch.add), ("function", torch.mul), ("function", operator.add), ("function", operator.mul),
        ("function", torch.relu), ("function", torch.nn.functional.relu), ("function", torch.nn.functional.silu),
        ("function", torch.ops.aten.add.Tensor), ("function", torch.ops.aten.add.Scalar),
        ("function", torch.ops.aten.add), ("function", torch.ops.aten.mul), ("method", "add"), ("method", "view"),
        ("method", "relu"),
    ]
)  # fmt: skip
constants = st.one_of(
    st.sampled_from([0, 1, 1.0, True, False, None, 2, -0.0, 0.0, 1e-5, 1e-6, "%0", "1", "none", torch.float32]),
    st.sampled_from([torch.bfloat16, torch.int64, float("inf"), slice(None), slice(0, 1), (1, 2), ((1, 2),), ()]),
    st.integers(-3, 3),
    st.floats(allow_nan=False),
)


@st.composite
def programs(draw: st.DrawFn) -> tuple[Operation, ...]:
    operations: list[Operation] = []
    for index in range(draw(st.integers(1, 4))):
        node = st.tuples(st.just("node"), st.integers(0, 1 + index))
        arguments = draw(st.lists(st.one_of(node, node, constants), min_size=1, max_size=3))
        keywords = draw(st.dictionaries(st.sampled_from(["dim", "alpha"]), st.one_of(node, constants), max_size=2))
        operations.append((draw(targets), tuple(arguments), tuple(keywords.items())))
    return tuple(operations)


def build(program: tuple[Operation, ...], names: list[str]) -> Any:
    """The program as a graph whose nodes are called ``names``; not a real module, because few of these make sense."""
    graph = Graph()
    nodes = [graph.placeholder(names[0]), graph.placeholder(names[1])]

    def argument(value: Any) -> Any:
        return nodes[value[1]] if isinstance(value, tuple) and value[:1] == ("node",) else value

    for (kind, target), arguments, keywords in program:
        call = graph.call_function if kind == "function" else graph.call_method
        node = call(target, tuple(map(argument, arguments)), {key: argument(value) for key, value in keywords})
        node.name = names[len(nodes)]
        nodes.append(node)
    graph.output((nodes[-1],))
    return SimpleNamespace(graph=graph)


def key(program: tuple[Operation, ...], inputs: tuple[TensorSpec, ...] = INPUTS, prefix: str = "n") -> str:
    return piece_key(build(program, [f"{prefix}{index}" for index in range(12)]), inputs)


@given(program=programs(), prefix=st.sampled_from(["value", "x_", "layers_7_attention"]))
def test_names_do_not_enter(program: tuple[Operation, ...], prefix: str) -> None:
    assert key(program) == key(program, prefix=prefix)


@given(first=programs(), second=programs())
def test_equal_keys_mean_equal_programs(first: tuple[Operation, ...], second: tuple[Operation, ...]) -> None:
    # By text: 1, 1.0 and True are equal in Python and unlike in a graph.
    assert (key(first) == key(second)) == (repr(first) == repr(second))


@given(program=programs(), data=st.data())
def test_any_one_change_changes_the_key(program: tuple[Operation, ...], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(program) - 1))
    target, arguments, keywords = program[place]
    edit = data.draw(st.sampled_from(["target", "argument", "drop", "keyword", "repeat"]))
    if edit == "target":
        changed = (data.draw(targets), arguments, keywords)
    elif edit == "argument":
        index = data.draw(st.integers(0, len(arguments) - 1))
        new = data.draw(constants)
        changed = (target, (*arguments[:index], new, *arguments[index + 1 :]), keywords)
    elif edit == "drop":
        changed = (target, arguments[:-1], keywords)
    elif edit == "keyword":
        changed = (target, arguments, (*keywords, ("other", data.draw(constants))))
    else:
        changed = (target, arguments, keywords)
    edited = (*program[:place], changed, *program[place + 1 :])
    if edit == "repeat":
        edited = (*edited, changed)
    assert (key(edited) == key(program)) == (repr(edited) == repr(program))


@pytest.mark.parametrize(
    "changed",
    [
        TensorSpec(("s0", 8), (8, 1), torch.float32),
        TensorSpec(("s0", 4), (4, 1), torch.bfloat16),
        TensorSpec(("s0", 4), (1, "s0"), torch.float32),
        TensorSpec((8, 4), (4, 1), torch.float32),
        TensorSpec(("s1", 4), (4, 1), torch.float32),
    ],
)
def test_shape_stride_and_dtype_of_inputs_enter(changed: TensorSpec) -> None:
    program: tuple[Operation, ...] = ((("function", torch.add), (("node", 0), ("node", 1)), ()),)
    assert key(program) != key(program, (changed, INPUTS[1]))


def test_the_order_of_inputs_enters() -> None:
    forward: tuple[Operation, ...] = ((("function", torch.sub), (("node", 0), ("node", 1)), ()),)
    backward: tuple[Operation, ...] = ((("function", torch.sub), (("node", 1), ("node", 0)), ()),)
    assert key(forward) != key(backward)


def test_which_results_leave_enters() -> None:
    graphs = []
    for outputs in [(0,), (1,), (0, 1), (1, 0)]:
        graph = Graph()
        x = graph.placeholder("x")
        results = (graph.call_function(torch.relu, (x,)), graph.call_function(torch.tanh, (x,)))
        graph.output(tuple(results[index] for index in outputs))
        graphs.append(GraphModule(torch.nn.Module(), graph))
    assert len({piece_key(graph, INPUTS[:1]) for graph in graphs}) == 4


def test_symbols_are_named_in_the_order_in_which_they_are_met() -> None:
    """Two pieces that are equal but for which symbols the tracer chose get equal specs."""

    def specs(unused: int) -> Any:
        mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
        symbols = [
            mode.shape_env.create_unspecified_symbol(7 + i, ConstantSource(f"size{i}")) for i in range(unused + 2)
        ]
        sizes = [mode.shape_env.create_symintnode(symbol, hint=7 + i) for i, symbol in enumerate(symbols)][unused:]
        with mode:
            x = torch.empty(3, sizes[1], 4)
            y = torch.empty(sizes[0], sizes[1]).T
        return describe_tensors([x, y], [torch.empty(2, 2, device="meta")])

    (x, y), (out,) = specs(0)
    assert x == TensorSpec((3, "s0", 4), ("4*s0", 4, 1), torch.float32)
    assert y == TensorSpec(("s0", "s1"), (1, "s0"), torch.float32)
    assert out == TensorSpec((2, 2), (2, 1), torch.float32)
    assert specs(3) == specs(0)
