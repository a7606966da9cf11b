"""Passes on small hand-made models: what they rewrite, what they leave alone, and that the result stays the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import HIDDEN, BodyModel, ModuleWeights, run_graph
from torch import nn
from torch.fx import Interpreter, Node

import compiled_engine.compile.passes.packed_linear as packed_linear
from compiled_engine.compile.capture import CapturedGraph, capture
from compiled_engine.compile.passes import merge_linears, passes_for, run_passes, use_packed_linear
from compiled_engine.compile.passes.merge_linears import LINEAR

IDS, ROWS = [3, 1, 4, 1, 5, 9, 2], [0, 6]
Body = Callable[[Any, torch.Tensor], torch.Tensor]


def linear(width: int = HIDDEN, bias: bool = False) -> nn.Linear:
    return nn.Linear(HIDDEN, width, bias=bias)


def merged(body: Body, **modules: nn.Module) -> tuple[int, CapturedGraph]:
    """Capture a model, merge its linears, and check that it computes what it computed before."""
    model = BodyModel(body, **modules)
    captured = capture(model)
    count = run_passes(captured, (merge_linears,))["merge_linears"]
    check_result(model, captured)
    return count, captured


def check_result(model: BodyModel, captured: CapturedGraph) -> None:
    ids = torch.tensor(IDS)[None]
    expected = model(ids, torch.arange(len(IDS))[None], False, torch.tensor(ROWS)).logits[0]
    torch.testing.assert_close(run_graph(captured, ModuleWeights(model), IDS, ROWS), expected, rtol=1e-5, atol=1e-5)


def keys(captured: CapturedGraph) -> set[str]:
    return {recipe.key for recipe in captured.weights.values()}


def test_linears_of_one_input_become_one() -> None:
    count, captured = merged(lambda m, h: m.a(h) + m.b(h) * m.c(h), a=linear(), b=linear(), c=linear())
    assert count == 2
    assert "cat(a.weight, b.weight, c.weight)" in keys(captured)
    assert not {"a.weight", "b.weight", "c.weight"} & keys(captured)


def test_widths_may_differ() -> None:
    count, _ = merged(
        lambda m, h: h + m.a(h).sum(-1, keepdim=True) * m.b(h)[..., :1] + m.c(h), a=linear(5), b=linear(1), c=linear()
    )
    assert count == 2


def test_linears_of_different_inputs_stay() -> None:
    count, captured = merged(lambda m, h: m.a(h) + m.b(h * 2), a=linear(), b=linear())
    assert count == 0
    assert {"a.weight", "b.weight"} <= keys(captured)


def test_with_and_without_bias_stay_apart() -> None:
    count, captured = merged(
        lambda m, h: m.a(h) + m.b(h) + m.c(h) + m.d(h),
        a=linear(), b=linear(bias=True), c=linear(), d=linear(bias=True),
    )  # fmt: skip
    assert count == 2
    assert {"cat(a.weight, c.weight)", "cat(b.weight, d.weight)", "cat(b.bias, d.bias)"} <= keys(captured)


def test_groups_of_several_inputs_merge_each_for_itself() -> None:
    def body(model: BodyModel, hidden: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(model.a(hidden) + model.b(hidden))
        return model.c(inner) * model.d(inner)

    count, captured = merged(body, a=linear(), b=linear(), c=linear(), d=linear())
    assert count == 2
    assert {"cat(a.weight, b.weight)", "cat(c.weight, d.weight)"} <= keys(captured)


def test_a_weight_used_twice_is_merged_and_kept_where_it_is_read_alone() -> None:
    count, captured = merged(lambda m, h: m.a(h) + m.a(h) * m.b(h) + m.a(h * 2), a=linear(), b=linear())
    assert count == 2
    assert {"cat(a.weight, a.weight, b.weight)", "a.weight"} <= keys(captured)


def test_a_weight_that_is_computed_is_not_merged() -> None:
    count, _ = merged(lambda m, h: F.linear(h, m.a.weight * 2) + m.b(h), a=linear(), b=linear())
    assert count == 0


def test_arguments_may_come_by_name() -> None:
    def body(model: BodyModel, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(input=hidden, weight=model.a.weight, bias=model.a.bias) + F.linear(
            hidden, model.b.weight, bias=model.b.bias
        )

    count, _ = merged(body, a=linear(bias=True), b=linear(bias=True))
    assert count == 1


def test_a_vector_for_a_weight_is_not_merged() -> None:
    def body(model: BodyModel, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + (F.linear(hidden, model.a.weight[0]) + F.linear(hidden, model.b.weight[0]))[..., None]

    assert merged(body, a=linear(), b=linear())[0] == 0

    class Vector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(HIDDEN))

    def plain(model: BodyModel, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + (F.linear(hidden, model.a.weight) + F.linear(hidden, model.b.weight))[..., None]

    assert merged(plain, a=Vector(), b=Vector())[0] == 0


def _in_place_method(hidden: torch.Tensor) -> None:
    hidden.add_(1)


def _in_place_operator(hidden: torch.Tensor) -> None:
    hidden *= 2


def _in_place_item(hidden: torch.Tensor) -> None:
    hidden[:, 0] = 0


def _in_place_function(hidden: torch.Tensor) -> None:
    torch.relu_(hidden)


def _in_place_flag(hidden: torch.Tensor) -> None:
    F.silu(hidden, inplace=True)


def _out_argument(hidden: torch.Tensor) -> None:
    torch.neg(hidden, out=hidden)


def _through_a_view(hidden: torch.Tensor) -> None:
    hidden[0].mul_(3)


@pytest.mark.parametrize(
    "change",
    [
        _in_place_method, _in_place_operator, _in_place_item, _in_place_function, _in_place_flag, _out_argument,
        _through_a_view,
    ],
)  # fmt: skip
def test_linears_before_and_after_a_change_of_their_input_stay_apart(change: Callable[[torch.Tensor], None]) -> None:
    def body(model: BodyModel, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden * 1
        first = model.a(hidden) + model.b(hidden)
        change(hidden)
        return first + model.c(hidden)

    assert merged(body, a=linear(), b=linear(), c=linear())[0] == 1


def test_results_may_be_viewed_as_if_they_stood_alone() -> None:
    """Each result was contiguous; as a part of the wide one it has gaps."""
    count, _ = merged(
        lambda m, h: m.a(h).view(-1, 4).view(1, -1, HIDDEN) + m.b(h).view(-1).view(1, -1, HIDDEN),
        a=linear(),
        b=linear(),
    )
    assert count == 1


branches = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 5), st.booleans()), min_size=0, max_size=6)


@settings(max_examples=5)
@given(branches=branches)
def test_any_set_of_linears_merges_by_input_and_bias(branches: list[tuple[int, int, bool]]) -> None:
    def body(model: BodyModel, hidden: torch.Tensor) -> torch.Tensor:
        sources = (hidden, hidden.tanh())
        for index, (source, _, _) in enumerate(branches):
            part = getattr(model, f"branch{index}")(sources[source])
            hidden = hidden + part.mean(-1, keepdim=True)
        return hidden

    modules = {f"branch{index}": linear(width, bias) for index, (_, width, bias) in enumerate(branches)}
    count, captured = merged(body, **modules)
    groups = {(source, bias) for source, _, bias in branches}
    assert count == len(branches) - len(groups)
    # And the head, which is a linear too.
    assert len(captured.graph_module.graph.find_nodes(op="call_function", target=LINEAR)) == len(groups) + 1


def test_every_linear_over_a_weight_gets_the_packed_op() -> None:
    model = BodyModel(lambda m, h: m.a(h) + m.b(h * 2), a=linear(bias=True), b=linear())
    captured = capture(model)
    assert run_passes(captured, (use_packed_linear,)) == {"use_packed_linear": 3}
    check_result(model, captured)
    assert not captured.graph_module.graph.find_nodes(op="call_function", target=LINEAR)
    assert {"packed(a.weight)", "packed(b.weight)", "packed(head.weight)", "a.bias"} <= keys(captured)
    assert not {"a.weight", "b.weight", "head.weight"} & keys(captured)


def test_a_tied_weight_is_kept_as_rows_beside_its_packed_form() -> None:
    model = BodyModel(lambda m, h: h)
    model.head.weight = model.embed.weight
    captured = capture(model)
    run_passes(captured, passes_for(torch.device("cpu")))
    assert {"embed.weight", "packed(embed.weight)"} <= keys(captured)
    check_result(model, captured)


def test_a_weight_read_by_two_linears_is_packed_once() -> None:
    model = BodyModel(lambda m, h: m.a(m.a(h)), a=linear())
    captured = capture(model)
    assert run_passes(captured, (use_packed_linear,)) == {"use_packed_linear": 3}
    assert [recipe.key for recipe in captured.weights.values()].count("packed(a.weight)") == 1
    check_result(model, captured)


def test_a_linear_over_a_computed_weight_keeps_its_op() -> None:
    model = BodyModel(lambda m, h: F.linear(h, m.a.weight.tanh()), a=linear())
    captured = capture(model)
    assert run_passes(captured, (use_packed_linear,)) == {"use_packed_linear": 1}
    check_result(model, captured)


def test_types_that_cannot_be_packed_keep_their_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no kernels for float64, for one."""
    monkeypatch.setattr(packed_linear, "can_pack", lambda device, dtype: False)
    model = BodyModel(lambda m, h: m.a(h), a=linear())
    captured = capture(model)
    assert run_passes(captured, (use_packed_linear,)) == {"use_packed_linear": 0}
    assert not any(recipe.packed for recipe in captured.weights.values())
    check_result(model, captured)


def test_merged_weights_are_packed_together() -> None:
    model = BodyModel(lambda m, h: m.a(h) * m.b(h), a=linear(bias=True), b=linear(bias=True))
    captured = capture(model)
    counts = run_passes(captured, passes_for(torch.device("cpu")))
    assert counts["merge_linears"] == 1
    assert counts["use_packed_linear"] == 2
    assert {"packed(cat(a.weight, b.weight))", "cat(a.bias, b.bias)"} <= keys(captured)
    check_result(model, captured)


def test_a_device_that_does_not_pack_gets_no_packing_pass() -> None:
    assert passes_for(torch.device("cuda")) == (merge_linears,)


def test_example_values_after_the_passes_have_the_strides_of_the_real_ones() -> None:
    """Pieces are compiled for these strides and trust them."""
    model = BodyModel(
        lambda m, h: (m.a(h).view(-1, 2, 2).transpose(0, 1).reshape(1, 2, -1).sum() + m.b(h)).relu(),
        a=linear(4),
        b=linear(),
    )
    captured = capture(model)
    run_passes(captured, (merge_linears,))

    class Compare(Interpreter):
        compared = 0

        def run_node(self, n: Node) -> Any:
            value = super().run_node(n)
            example = n.meta.get("example_value")
            if isinstance(value, torch.Tensor) and isinstance(example, torch.Tensor):
                # Real sizes are the hints of the symbolic ones: the example inputs have 8 tokens and 4 rows.
                assert tuple(value.shape) == tuple(int(size) for size in example.shape), n
                assert value.stride() == tuple(int(stride) for stride in example.stride()), n
                Compare.compared += 1
            return value

    captured.graph_module.forward = lambda *arguments: Compare(captured.graph_module).run(*arguments)  # type: ignore[method-assign]
    run_graph(captured, ModuleWeights(model), [1] * 8, [0, 1, 2, 3])
    assert Compare.compared > 10
