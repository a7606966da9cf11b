"""Faults put into one rung of a tiny model's ladder are named exactly: rung, step, layer, tensor, piece and node."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bisect_ladders import (
    ChangedOut,
    Ladders,
    NoWrite,
    ShiftedSlots,
    SpoilingPass,
    WrongPieces,
    climb,
    compiled_rung,
    eager_rung,
    new_ladder,
    spoilable,
    ways_to_spoil,
    with_pass,
    wrap_attention,
)
from compiled_engine.compile.capture import CapturedGraph
from compiled_engine.compile.passes import passes_for
from compiled_engine.compile.plan import AttentionStep, PieceStep
from compiled_engine.ops.cpu.packing import packed_bytes
from compiled_engine_debug.bisect.compare import Limits
from compiled_engine_debug.bisect.ladder import Ladder
from compiled_engine_debug.bisect.outcome import Divergence, RungOutcome, Verdict
from compiled_engine_debug.bisect.rungs import Rung
from compiled_engine_debug.bisect.runners import PlanRunner, model_of
from compiled_engine_debug.bisect.trace import TensorName
from tiny_models import write_tiny_model

EXAMPLES = 8
LAYERS = st.integers(2, 4)
OWN_PASSES = passes_for(torch.device("cpu"))


@pytest.fixture(scope="module")
def ladders(tmp_path_factory: pytest.TempPathFactory) -> Ladders:
    return Ladders(tmp_path_factory.mktemp("bisect"))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2)


def only(outcomes: dict[str, RungOutcome], rung: str) -> Divergence:
    """The one divergence of ``rung``, which must be the only rung that has any."""
    assert [name for name, outcome in outcomes.items() if outcome.divergences] == [rung]
    (found,) = outcomes[rung].divergences
    return found


def layer_of(index: int) -> str:
    return f"model.layers.{index}.self_attn"


def reader_of(ladder: Ladder, step: int) -> str | None:
    """The first layer that attends to what step ``step`` of the plan made; None at the model's end."""
    later = ladder.plan.steps[step:]
    return next((item.layer_name for item in later if isinstance(item, AttentionStep)), None)


@pytest.mark.slow
@settings(max_examples=EXAMPLES)
@given(num_layers=LAYERS, data=st.data())
def test_changed_weight_is_named(ladders: Ladders, num_layers: int, data: st.DataObject) -> None:
    """Every weight, packed ones included, in a rung whose pieces are those of the clean rung below."""
    ladder = ladders.of(num_layers)
    users = [(index, step) for index, step in enumerate(ladder.plan.steps) if isinstance(step, PieceStep)]
    names = {
        name.removeprefix("weight:"): index
        for index, step in reversed(users)
        for name in step.inputs
        if name.startswith("weight:") and "rotary" not in name
    }
    name = data.draw(st.sampled_from(sorted(names)))

    def change(runner: PlanRunner) -> None:
        weight = model_of(runner).weights[name]
        if weight.dtype is torch.uint8:
            weight = weight.as_strided((packed_bytes(weight),), (1,))[-64 * 64 * 4 :].view(torch.float32)
        weight.mul_(1.5).add_(0.25)

    found = only(climb(ladder, eager_rung(), eager_rung("changed", adjust=change)), "changed")

    assert found.reference == "eager"
    assert found.measured.place.step == 0
    assert found.measured.place.site.layer == reader_of(ladder, names[name])
    assert name in found.culprit.weights
    assert found.culprit.piece == ladder.plan.steps[names[name]].piece
    assert found.culprit.node is not None


@settings(max_examples=EXAMPLES)
@given(num_layers=LAYERS, data=st.data())
def test_miscompiled_operation_is_named(ladders: Ladders, num_layers: int, data: st.DataObject) -> None:
    """A compiler that takes another operation for one node, or leaves it out."""
    ladder = ladders.of(num_layers)
    pieces = {key: piece for key, piece in ladder.pieces.items() if spoilable(piece)}
    key = data.draw(st.sampled_from(sorted(pieces)))
    node = data.draw(st.sampled_from(spoilable(pieces[key])))
    spoil = data.draw(st.sampled_from(ways_to_spoil(node)))
    compiler = WrongPieces(key, node.name, spoil)

    found = only(climb(ladder, eager_rung(), compiled_rung(compiler)), "compiled")

    step = next(index for index, item in enumerate(ladder.plan.steps) if getattr(item, "piece", None) == key)
    assert found.measured.place.step == 0
    assert found.measured.place.site.layer == reader_of(ladder, step)
    assert found.culprit.piece == key
    assert found.culprit.node is not None
    assert found.culprit.node.name == node.name
    if "stack_trace" in node.meta:
        assert "modeling_llama.py:" in found.culprit.node.source
    finding = found.finding()
    assert (finding.step, finding.layer, finding.node) == (0, reader_of(ladder, step), node.name)
    # Logarithmic in the number of nodes, once every piece has been compiled.
    most = math.ceil(math.log2(len(pieces[key].graph_module.graph.nodes)))
    assert compiler.num_compiled <= len(ladder.pieces) + most


@settings(max_examples=EXAMPLES)
@given(num_layers=LAYERS, data=st.data(), captured=st.booleans())
def test_write_that_is_left_out_is_named(
    ladders: Ladders, num_layers: int, data: st.DataObject, captured: bool
) -> None:
    """Also inside a captured graph, where no Python of a probe runs."""
    ladder = ladders.of(num_layers)
    layer = layer_of(data.draw(st.integers(0, num_layers - 1)))
    adjust = wrap_attention(NoWrite, lambda name: name == layer)
    wrong = Rung("wrong", "", captures=True, adjust=adjust) if captured else eager_rung("wrong", adjust=adjust)

    found = only(climb(ladder, eager_rung(), wrong), "wrong")

    assert found.measured.place.step == 0
    assert found.measured.place.site.layer == layer
    assert found.measured.place.site.tensor is TensorName.STORED_KEY
    assert "write into the cache" in found.culprit.reason


@pytest.mark.parametrize("captured", [False, True])
def test_slot_mapping_shifted_by_one_is_seen_in_the_first_layer(ladders: Ladders, captured: bool) -> None:
    ladder = ladders.of(3)
    adjust = wrap_attention(ShiftedSlots)
    wrong = Rung("wrong", "", captures=True, adjust=adjust) if captured else eager_rung("wrong", adjust=adjust)

    found = only(climb(ladder, eager_rung(), wrong), "wrong")

    assert found.measured.place.step == 0
    assert found.measured.place.site.layer == layer_of(0)
    assert found.measured.place.site.tensor is TensorName.STORED_KEY


@settings(max_examples=EXAMPLES)
@given(num_layers=LAYERS, data=st.data(), value=st.sampled_from([math.nan, math.inf]))
def test_not_a_number_is_reported_first(ladders: Ladders, num_layers: int, data: st.DataObject, value: float) -> None:
    """In one layer's output, after a finite difference in an earlier layer's."""
    ladder = ladders.of(num_layers)
    second = data.draw(st.integers(1, num_layers - 1))
    first = data.draw(st.integers(0, second - 1))

    def spoil(runner: PlanRunner) -> None:
        scaled = partial(ChangedOut, change=lambda out: out.mul_(1.1))
        strange = partial(ChangedOut, change=lambda out: out[..., 0].fill_(value))
        wrap_attention(scaled, lambda name: name == layer_of(first))(runner)
        wrap_attention(strange, lambda name: name == layer_of(second))(runner)

    outcomes = climb(ladder, eager_rung(), eager_rung("wrong", adjust=spoil))

    strange, finite = outcomes["wrong"].divergences
    assert strange.measured.place.site.layer == layer_of(second)
    assert strange.measured.place.site.tensor is TensorName.OUT
    assert strange.measured.difference.not_finite == ("NaN" if math.isnan(value) else "inf")
    assert finite.measured.place.site.layer == layer_of(first)
    assert finite.measured.difference.not_finite == ""


def test_fault_of_padded_steps_alone_is_named(ladders: Ladders) -> None:
    """A layer that lets a row of padding into its first real one: graphs of the steps' own sizes are right."""
    ladder = ladders.of(3)
    sizes = {step.num_scheduled_tokens for step in ladder.steps}

    def leak(out: torch.Tensor) -> None:
        if len(out) not in sizes:
            out[0] += 1

    adjust = wrap_attention(partial(ChangedOut, change=leak), lambda name: name == layer_of(1))
    exact = Rung("exact", "", captures=True, adjust=adjust)
    padded = Rung("padded", "", captures=True, pads=True, adjust=adjust)

    outcomes = climb(ladder, eager_rung(), exact, padded)

    assert outcomes["exact"].verdict is Verdict.CLEAN
    found = only(outcomes, "padded")
    assert found.measured.place.site.layer == layer_of(1)
    assert found.measured.place.site.tensor is TensorName.OUT
    assert found.reference == "exact"


def test_faults_of_two_rungs_are_told_apart(ladders: Ladders) -> None:
    """What a rung inherits is not its own; a later fault elsewhere is; a right rung above is clean again."""
    ladder = ladders.of(4)

    def scaled(index: int, factor: float):  # type: ignore[no-untyped-def]
        change = partial(ChangedOut, change=lambda out: out.mul_(factor))
        return wrap_attention(change, lambda name: name == layer_of(index))

    outcomes = climb(
        ladder,
        eager_rung(),
        eager_rung("first", adjust=scaled(2, 1.2)),
        eager_rung("same", adjust=scaled(2, 1.2)),
        eager_rung("other", adjust=scaled(1, 1.2)),
        eager_rung("right"),
    )

    assert [outcome.verdict for outcome in outcomes.values()] == [
        Verdict.CLEAN,
        Verdict.DIVERGES,
        Verdict.INHERITS,
        Verdict.DIVERGES,
        Verdict.CLEAN,
    ]
    assert outcomes["first"].divergences[0].measured.place.site.layer == layer_of(2)
    (other,) = outcomes["other"].divergences
    assert other.measured.place.site.layer == layer_of(1)
    assert other.reference == "eager"


def test_plan_that_differs_from_transformers_is_named_with_its_piece(ladders: Ladders) -> None:
    """The lowest rung itself: there is no rung below, and its weights are compared with the checkpoint's."""
    ladder = ladders.of(3)
    name = "model.layers.1.input_layernorm.weight"

    def change(runner: PlanRunner) -> None:
        model_of(runner).weights[name].mul_(1.5)

    found = only(climb(ladder, eager_rung(adjust=change)), "eager")

    assert found.reference == "transformers"
    assert found.measured.place.site.layer == layer_of(1)
    assert found.measured.place.site.tensor is TensorName.QUERY
    assert found.culprit.weights == (name,)
    step = next(item for item in ladder.plan.steps if getattr(item, "query", None) in found.culprit.outputs)
    assert isinstance(step, AttentionStep)
    assert step.layer_name == layer_of(1)


def test_token_that_the_logits_do_not_ask_for_is_the_samplers_fault(ladders: Ladders) -> None:
    ladder = ladders.of(2)

    def change(runner: PlanRunner) -> None:
        sampler = runner._sampler  # type: ignore[union-attr]
        right = sampler.sample
        sampler.sample = lambda logits, batch: right(-logits, batch)

    outcomes = climb(ladder, eager_rung(), eager_rung("wrong", adjust=change))

    found = only(outcomes, "wrong")
    assert found.measured.place.site.tensor is TensorName.TOKEN
    assert found.culprit.reason.startswith("the sampler")
    assert len(outcomes["wrong"].tokens) == sum(len(text.continuation) for text in ladder.texts)
    assert all(difference.gap > 0 for difference in outcomes["wrong"].tokens)


def clobber_residual(ladder: Ladder, factor: float) -> tuple[Callable[[PlanRunner], None], PieceStep, str]:
    """Scales the residual around the attention of layer 1; the piece that reads it then, and what it is called."""
    middle = next(
        item
        for item in ladder.plan.steps
        if isinstance(item, AttentionStep) and item.layer_name.endswith("1.self_attn")
    )
    index = ladder.plan.steps.index(middle)
    maker, user = ladder.plan.steps[index - 1], ladder.plan.steps[index + 1]
    assert isinstance(maker, PieceStep)
    assert isinstance(user, PieceStep)
    (residual,) = {f"value:{name}" for name in maker.outputs} & set(user.inputs)
    place = maker.outputs.index(residual.removeprefix("value:"))

    def clobber(runner: PlanRunner) -> None:
        model = model_of(runner)
        place_of = model.instructions[index - 1].makes[place]
        attention = model.instructions[index]

        def run(values, launch):  # type: ignore[no-untyped-def]
            attention.run(values, launch)
            values[place_of] = values[place_of] * factor

        instructions = list(model.instructions)
        instructions[index] = replace(attention, run=run)
        model.instructions = tuple(instructions)

    return clobber, user, residual.removeprefix("value:")


@pytest.mark.parametrize("noisy", [False, True])
def test_value_that_is_overwritten_between_pieces_is_named(
    ladders: Ladders, noisy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every piece computes what its graph says, and one is given something else than its maker left."""
    ladder = ladders.of(3)
    clobber, user, residual = clobber_residual(ladder, -4.0)

    def change(runner: PlanRunner) -> None:
        clobber(runner)
        if noisy:
            make_noise(runner)

    if noisy:
        allow_noise(ladder, monkeypatch)

    found = only(climb(ladder, eager_rung(), eager_rung("wrong", adjust=change)), "wrong")

    assert found.culprit.piece == user.piece
    assert residual in found.culprit.reason
    assert found.measured.place.site.layer == layer_of(2)


@pytest.mark.slow
@settings(max_examples=EXAMPLES)
@given(place=st.integers(0, len(OWN_PASSES)), share=st.floats(0, 1), replaces=st.booleans())
def test_pass_that_spoils_any_operation_is_named_with_the_node(
    model_folder: Path, place: int, share: float, replaces: bool
) -> None:
    check_spoiling_pass(model_folder, place, SpoilingPass(share, replaces=replaces))


@pytest.mark.parametrize("replaces", [False, True])
def test_pass_that_spoils_an_operation_is_named_with_the_node(model_folder: Path, replaces: bool) -> None:
    check_spoiling_pass(model_folder, 2, SpoilingPass(0.6, replaces=replaces))


def check_spoiling_pass(model_folder: Path, place: int, spoil: SpoilingPass) -> None:
    """The plan itself is wrong then: every rung computes what its graph says."""
    with with_pass(spoil, place):
        found = only(climb(new_ladder(model_folder), eager_rung()), "eager")

    assert found.reference == "transformers"
    assert found.measured.place.step == 0
    assert "pass 'spoil_one'" in found.culprit.reason
    assert spoil.node is not None
    assert found.culprit.node is not None
    assert found.culprit.node.name == spoil.node.name
    if "stack_trace" in spoil.node.meta:
        assert found.culprit.node.source.startswith("transformers/models/llama/modeling_llama.py:")
    assert found.finding().node == spoil.node.name
    assert "spoil_one" in found.finding().message


def test_pass_that_reads_another_weight_is_named(model_folder: Path) -> None:
    """Its recipe is wrong, and the weights of the rung are what the recipe says."""

    def swap_norms(captured: CapturedGraph) -> int:
        norms = [name for name, recipe in captured.weights.items() if "layernorm" in recipe.key]
        first, last = norms[0], norms[-1]
        captured.weights[first], captured.weights[last] = captured.weights[last], captured.weights[first]
        return 1

    with with_pass(swap_norms, len(OWN_PASSES)):
        found = only(climb(new_ladder(model_folder), eager_rung()), "eager")

    assert "pass 'swap_norms'" in found.culprit.reason
    assert found.culprit.node is not None
    assert "layernorm" in found.culprit.node.operation


def allow_noise(ladder: Ladder, patched: pytest.MonkeyPatch) -> None:
    """Let a fifth of a tensor's scale pass for rounding errors at every site, and let layer 0 make some."""
    sites = {site: 0.05 for _, site, _ in ladder.oracle_trace.items()}
    patched.setattr(ladder, "_limits", Limits(ladder.tolerance, sites))


def make_noise(runner: PlanRunner) -> None:
    """A hundredth more in what layer 0 gives back."""
    scaled = partial(ChangedOut, change=lambda out: out.mul_(1.01))
    wrap_attention(scaled, lambda name: name == layer_of(0))(runner)


def test_changed_weight_is_named_above_rounding_errors(ladders: Ladders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces before it are given other values than in the rung below, and none beyond what noise explains."""
    ladder = ladders.of(3)
    allow_noise(ladder, monkeypatch)
    name = "model.layers.2.input_layernorm.weight"

    def change(runner: PlanRunner) -> None:
        make_noise(runner)
        model_of(runner).weights[name].mul_(3)

    outcomes = climb(ladder, eager_rung(), eager_rung("noisy", adjust=make_noise), eager_rung("wrong", adjust=change))

    assert outcomes["noisy"].verdict is Verdict.CLEAN
    found = only(outcomes, "wrong")
    assert found.culprit.weights == (name,)
    assert found.measured.place.site.layer == layer_of(2)
