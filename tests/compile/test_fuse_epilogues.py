"""Epilogues of packed linears: what is fused, what must not be, and that the result stays the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import HIDDEN, BodyModel, ModuleWeights, run_graph
from torch import nn

from compiled_engine.compile.capture import CapturedGraph, capture
from compiled_engine.compile.passes import passes_for, run_passes
from compiled_engine.ops.cpu.linear import Activation

IDS, ROWS = [3, 1, 4, 1, 5, 9, 2], [0, 6]
Body = Callable[[Any, torch.Tensor], torch.Tensor]
NAMES = ("fuse_gated_activations", "fuse_activations", "fuse_residuals")


def linear(width: int = HIDDEN, bias: bool = False, source: int = HIDDEN) -> nn.Linear:
    return nn.Linear(source, width, bias=bias)


def fused(body: Body, **modules: nn.Module) -> tuple[tuple[int, ...], CapturedGraph]:
    """How often each epilogue pass fired on the model, whose result was compared with that of its modules."""
    model = BodyModel(body, **modules)
    captured = capture(model)
    counts = run_passes(captured, passes_for(torch.device("cpu")))
    ids = torch.tensor(IDS)[None]
    expected = model(ids, torch.arange(len(IDS))[None], False, torch.tensor(ROWS)).logits[0]
    torch.testing.assert_close(run_graph(captured, ModuleWeights(model), IDS, ROWS), expected, rtol=1e-5, atol=1e-5)
    return tuple(counts[name] for name in NAMES), captured


def epilogues(captured: CapturedGraph) -> list[tuple[Activation, bool]]:
    """Activation, and whether there is a residual, of every packed linear but the head."""
    calls = captured.graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.compiled_engine.packed_linear.default
    )
    return [(Activation(call.args[5]), call.args[3] is not None) for call in calls[:-1]]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("function", "activation"),
    [
        (F.silu, Activation.SILU_AND_MULTIPLY),
        (F.gelu, Activation.GELU_AND_MULTIPLY),
        (lambda x: F.gelu(x, approximate="tanh"), Activation.GELU_TANH_AND_MULTIPLY),
    ],
)
def test_a_gated_layer_becomes_one_product_and_the_next_adds_the_residual(
    function: Callable[[torch.Tensor], torch.Tensor], activation: Activation, bias: bool
) -> None:
    counts, captured = fused(
        lambda m, h: h + m.down(function(m.gate(h)) * m.up(h)),
        gate=linear(24, bias),
        up=linear(24, bias),
        down=linear(HIDDEN, bias, 24),
    )
    assert counts == (1, 0, 1)
    assert epilogues(captured) == [(activation, False), (Activation.NONE, True)]
    assert "packed_halves(cat(gate.weight, up.weight))" in {recipe.key for recipe in captured.weights.values()}


@pytest.mark.parametrize("width", [24, 10])
def test_one_weight_that_holds_gate_and_up_is_packed_in_halves(width: int) -> None:
    def body(m: Any, h: torch.Tensor) -> torch.Tensor:
        gate, up = m.both(h).chunk(2, dim=-1)
        return m.down(up * F.silu(gate))

    counts, captured = fused(body, both=linear(2 * width), down=linear(HIDDEN, source=width))
    assert counts == (1, 0, 0)
    assert "packed_halves(both.weight)" in {recipe.key for recipe in captured.weights.values()}


def test_an_activation_alone_is_fused() -> None:
    counts, captured = fused(lambda m, h: m.b(F.gelu(m.a(h))), a=linear(bias=True), b=linear())
    assert counts == (0, 1, 0)
    assert epilogues(captured) == [(Activation.GELU, False), (Activation.NONE, False)]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(lambda m, h: (lambda y: (y + h) * y.mean())(m.a(h)), id="the product is read elsewhere"),
        pytest.param(lambda m, h: (lambda y: F.silu(y) + y)(m.a(h)), id="before its activation too"),
        pytest.param(lambda m, h: (lambda g: F.silu(g) * m.b(h) + g)(m.a(h)), id="the gate is read elsewhere"),
        pytest.param(lambda m, h: (lambda s: s * m.b(h) + s)(F.silu(m.a(h))), id="the activated gate is"),
        pytest.param(lambda m, h: (lambda u: F.silu(m.a(h)) * u + u)(m.b(h)), id="the other half is"),
        pytest.param(
            lambda m, h: (lambda c: F.silu(c[1]) * c[0])(m.a(h).chunk(2, dim=-1)).repeat(1, 1, 2), id="halves swapped"
        ),
        pytest.param(lambda m, h: F.silu(m.a(h)[..., :2]).repeat(1, 1, HIDDEN // 2) * m.b(h), id="no half"),
        pytest.param(lambda m, h: m.a(h) + h[:, :1], id="a broadcast residual"),
        pytest.param(lambda m, h: m.a(h) + 1.0, id="a number added"),
        pytest.param(lambda m, h: m.a(h) * h, id="multiplied, not added"),
        pytest.param(lambda m, h: torch.relu(m.a(h)) + h, id="another activation"),
    ],
)
def test_what_is_no_epilogue_stays(body: Body) -> None:
    counts, captured = fused(body, a=linear(), b=linear())
    assert counts == (0, 0, 0)
    assert set(epilogues(captured)) == {(Activation.NONE, False)}


def test_an_input_changed_in_place_before_the_addition_is_no_residual_of_the_earlier_value() -> None:
    def body(m: Any, h: torch.Tensor) -> torch.Tensor:
        h = h * 1
        product = m.a(h)
        h.mul_(2)
        return product + h

    counts, _ = fused(body, a=linear())
    assert counts == (0, 0, 0)


def test_both_operands_may_be_products() -> None:
    counts, captured = fused(lambda m, h: m.a(h) + m.b(h * 2), a=linear(), b=linear())
    assert counts == (0, 0, 1)
    assert sorted(residual for _, residual in epilogues(captured)) == [False, True]
