"""The plan as data: JSON there and back, damaged text refused, releases right, weights made by their recipes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import Small, TinyLlama

from compiled_engine.compile.plan import PLAN_VERSION, AttentionStep, GraphPlan, PieceStep, check_plan
from compiled_engine.compile.weights import WeightRecipe, materialize
from compiled_engine.errors import PlanError
from compiled_engine.ops.cpu.build import load_kernels
from compiled_engine.ops.cpu.linear import Activation
from compiled_engine.ops.cpu.packing import packed_bytes, unpack
from compiled_engine.ops.quantized_rows import QuantizedRows
from kernel_folder import KERNELS


@pytest.fixture(params=["small", "tiny_llama"])
def plan(request: pytest.FixtureRequest) -> GraphPlan:
    made: Small | TinyLlama = request.getfixturevalue(request.param)
    return made.planned.plan


def test_json_gives_an_equal_plan_back(plan: GraphPlan) -> None:
    text = plan.to_json()
    again = GraphPlan.from_json(text)
    assert again == plan
    assert again.to_json() == text
    check_plan(again)


def test_json_holds_plain_data_and_a_version(plan: GraphPlan) -> None:
    data = json.loads(plan.to_json())
    assert data["version"] == PLAN_VERSION
    assert data["hidden"] == plan.hidden
    assert len(data["steps"]) == len(plan.steps)


def test_windows_and_caps_survive_json(small: Small) -> None:
    layers = tuple(
        replace(layer, sliding_window=window, soft_cap=cap, scale=1 / 3)
        for layer, window, cap in zip(small.planned.plan.layers, (16, None, 1), (50.0, None, 0.1), strict=True)
    )
    plan = replace(small.planned.plan, layers=layers)
    assert GraphPlan.from_json(plan.to_json()).layers == layers


@pytest.mark.parametrize("version", [PLAN_VERSION + 1, 0, None, "1"])
def test_another_version_is_refused(small: Small, version: object) -> None:
    data = json.loads(small.planned.plan.to_json()) | {"version": version}
    with pytest.raises(PlanError, match="version"):
        GraphPlan.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '"plan"', "{}", '{"version": 1}', "\x00"])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        GraphPlan.from_json(text)


@given(cut=st.floats(0, 1))
def test_a_text_that_was_cut_off_is_refused(small: Small, cut: float) -> None:
    text = small.planned.plan.to_json()
    with pytest.raises(PlanError):
        GraphPlan.from_json(text[: int(cut * (len(text) - 1))])


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.floats(allow_nan=False), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=3,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to every value inside ``value``."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


@given(data=st.data())
def test_a_damaged_plan_gives_a_plan_or_a_plan_error(small: Small, data: st.DataObject) -> None:
    """Never another exception, whatever stands in place of one value."""
    plan = json.loads(small.planned.plan.to_json())
    path = data.draw(st.sampled_from(places(plan)[1:]))
    parent = plan
    for key in path[:-1]:
        parent = parent[key]
    if data.draw(st.booleans()):
        parent[path[-1]] = data.draw(json_values)
    else:
        del parent[path[-1]]
    with contextlib.suppress(PlanError):
        check_plan(GraphPlan.from_json(json.dumps(plan)))


def test_nothing_is_read_after_its_release_and_nothing_but_the_hidden_states_survives(plan: GraphPlan) -> None:
    """Walk the plan by its own rules."""
    inputs = {"input_ids", "positions", "logits_indices"}
    alive = set(inputs)
    for step in plan.steps:
        if isinstance(step, AttentionStep):
            reads, makes = {step.query, step.key, step.value}, {step.out}
        else:
            reads = {name.removeprefix("value:") for name in step.inputs if name.startswith("value:")}
            makes = set(step.outputs)
        assert reads <= alive, step
        assert not makes & alive, "a value is made once"
        alive |= makes
        assert set(step.release) <= alive - inputs
        alive -= set(step.release)
    assert alive == inputs | {plan.hidden}


def test_a_value_is_released_by_its_last_reader(plan: GraphPlan) -> None:
    for index, step in enumerate(plan.steps):
        for name in step.release:
            later = plan.steps[index + 1 :]
            assert not any(name in (s.query, s.key, s.value) for s in later if isinstance(s, AttentionStep))
            assert not any(f"value:{name}" in s.inputs for s in later if isinstance(s, PieceStep))


def _first(plan: GraphPlan, **changes: Any) -> GraphPlan:
    return replace(plan, steps=(replace(plan.steps[0], **changes), *plan.steps[1:]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda plan: replace(plan, steps=plan.steps[1:]), "reads what is not there"),
        (lambda plan: replace(plan, steps=plan.steps[:-1]), "no step of the plan leaves its hidden states"),
        (lambda plan: replace(plan, steps=()), "no step of the plan leaves its hidden states"),
        (lambda plan: replace(plan, pieces=plan.pieces[1:]), "not among the plan's pieces"),
        (lambda plan: replace(plan, weights=plan.weights[:-1]), "reads what is not there"),
        (lambda plan: replace(plan, layers=plan.layers[1:]), "not among the plan's layers"),
        (lambda plan: _first(plan, outputs=plan.steps[0].outputs[1:]), "another number of inputs or outputs"),
        (lambda plan: _first(plan, inputs=plan.steps[0].inputs[1:]), "another number of inputs or outputs"),
        (lambda plan: _first(plan, release=plan.steps[0].outputs), "reads what is not there"),
        (lambda plan: replace(plan, head=replace(plan.head, piece="none")), "not among the plan's pieces"),
        (lambda plan: replace(plan, hidden="elsewhere"), "hidden states 'elsewhere'"),
    ],
)
def test_a_plan_that_cannot_run_is_refused(
    small: Small, damage: Callable[[GraphPlan], GraphPlan], message: str
) -> None:
    check_plan(small.planned.plan)
    with pytest.raises(PlanError, match=message):
        check_plan(damage(small.planned.plan))


class Tensors:
    """A ``WeightSource`` that tells which tensors were asked for."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors
        self.blocks: dict[str, QuantizedRows] = {}
        self.read: list[str] = []

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def stored_dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def quantized(self, name: str) -> QuantizedRows | None:
        return self.blocks.get(name)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        self.read.append(name)
        out.copy_(self.tensors[name])


def test_recipes_concatenate_convert_and_pack() -> None:
    source = Tensors(a=torch.randn(3, 4), b=torch.randn(2, 4), c=torch.randn(5))
    recipes = [
        WeightRecipe(("a",), (3, 4), torch.float32),
        WeightRecipe(("b", "a", "b"), (7, 4), torch.bfloat16),
        WeightRecipe(("c",), (5,), torch.float32),
        WeightRecipe(("a", "b"), (5, 4), torch.float32, packed=True),
    ]
    weights = materialize(recipes, source)
    a, b, c = source.tensors.values()
    assert list(weights)[:3] == ["a", "cat(b, a, b)", "c"]
    assert torch.equal(weights["a"], a)
    assert torch.equal(weights["cat(b, a, b)"], torch.cat([b, a, b]).bfloat16())
    assert torch.equal(weights["c"], c)
    assert torch.equal(unpack(weights["packed(cat(a, b))"], load_kernels(KERNELS)), torch.cat([a, b]))
    assert weights["a"].data_ptr() != a.data_ptr()


def test_packed_weights_are_as_narrow_as_their_numbers_or_as_was_asked_for() -> None:
    """16-bit numbers stay 16-bit, stored blocks stay; quantization makes all int4 but the head, which becomes int8."""
    kernels = load_kernels(KERNELS)
    blocks = QuantizedRows(8, torch.randint(-128, 128, (4, 32), dtype=torch.int8), torch.rand(4, 1), None)
    source = Tensors(wide=torch.randn(64, 32), narrow=torch.randn(64, 32).bfloat16(), blocks=blocks.dequantize())
    source.blocks["blocks"] = blocks
    recipes = [WeightRecipe((name,), tuple(t.shape), torch.float32, packed=True) for name, t in source.tensors.items()]

    def num_bytes(weights: dict[str, torch.Tensor]) -> list[int]:
        return [packed_bytes(weights[recipe.key]) for recipe in recipes]

    kept = materialize(recipes, source)
    for recipe, tensor in zip(recipes, source.tensors.values(), strict=True):
        assert torch.equal(unpack(kept[recipe.key], kernels), tensor.float())
    wide, narrow, block = num_bytes(kept)
    assert wide > 1.8 * narrow
    int8 = num_bytes(materialize(recipes, source, "int8"))
    int4 = num_bytes(materialize(recipes, source, "int4", ["packed(wide)"]))
    assert int8[0] == int8[1] < narrow
    assert int4[1] < int4[0] == int8[0]
    assert materialize(recipes, source, "int8")["packed(blocks)"] is not None
    assert block < narrow


@pytest.mark.parametrize("names", [("a",), ("b", "b")])
def test_halves_are_parts_of_their_own(names: tuple[str, ...]) -> None:
    """Whatever the number of rows: the second half of a product begins where a part begins."""
    source = Tensors(a=torch.randn(10, 4), b=torch.randn(5, 4))
    recipe = WeightRecipe(names, (10, 4), torch.float32, packed=True, halves=True)
    weight = materialize([recipe], source)[recipe.key]
    rows = torch.cat([source.tensors[name] for name in names])
    input = torch.randn(3, 4)
    gated = torch.ops.compiled_engine.packed_linear(input, weight, None, None, 5, int(Activation.SILU_AND_MULTIPLY))
    gate, up = (input @ rows.T).chunk(2, dim=-1)
    torch.testing.assert_close(gated, torch.nn.functional.silu(gate) * up, rtol=1e-5, atol=1e-5)


def test_sources_with_too_few_rows_are_an_error() -> None:
    with pytest.raises(PlanError, match=r"cat\(a, a\)"):
        materialize([WeightRecipe(("a", "a"), (7, 4), torch.float32)], Tensors(a=torch.randn(3, 4)))


@given(
    sources=st.lists(st.sampled_from(["a.weight", "b.weight", "layers.0.c"]), min_size=1, max_size=3),
    shape=st.lists(st.integers(0, 4), max_size=2),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    packed=st.booleans(),
)
def test_a_recipe_survives_json(
    small: Small, sources: list[str], shape: list[int], dtype: torch.dtype, packed: bool
) -> None:
    plan = replace(small.planned.plan, weights=(WeightRecipe(tuple(sources), tuple(shape), dtype, packed),))
    assert GraphPlan.from_json(plan.to_json()) == plan
