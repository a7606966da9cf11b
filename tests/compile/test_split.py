"""Splitting at attention: tensors only between pieces, no caches, equal layers once, and the same result."""

from __future__ import annotations

import re

import pytest
import torch
from small_models import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    Attend,
    Layer,
    ModuleWeights,
    Output,
    Running,
    Small,
    SmallModel,
    TinyLlama,
    chunk,
    compiled,
    plan_small,
    small_model,
    whole_request,
)

from compiled_engine.compile.capture import capture
from compiled_engine.compile.counters import CompileCounters
from compiled_engine.compile.passes import run_passes
from compiled_engine.compile.pipeline import PlannedGraph
from compiled_engine.compile.plan import AttentionStep, PieceStep
from compiled_engine.compile.split import Piece, is_attention, split_at_attention
from compiled_engine.errors import CaptureError

SEQUENCES = [[3, 1, 4, 1, 5], [2], [7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9]]


def check_against_dense(model: SmallModel, planned: PlannedGraph | None = None) -> None:
    """One step of three prompts through plan and pieces equals the model computed without either."""
    expected = torch.stack([model.dense_logits(sequence)[-1] for sequence in SEQUENCES])
    planned = planned or plan_small(model)
    logits = Running(planned, compiled(planned), ModuleWeights(model)).run_whole(SEQUENCES)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_one_piece_more_than_layers_and_equal_ones_once(num_layers: int) -> None:
    counters = CompileCounters()
    planned = plan_small(small_model(num_layers), counters)
    steps = planned.plan.steps
    assert [type(step) for step in steps] == [PieceStep, AttentionStep] * num_layers + [PieceStep]
    assert [step.layer_name for step in steps[1::2]] == [f"layers.{i}.attention" for i in range(num_layers)]
    # First, middle (from the third layer on all the same), last, and the head.
    assert len(planned.pieces) == min(num_layers, 2) + 2
    assert (counters.pieces, counters.heads, counters.attention_layers) == (num_layers + 1, 1, num_layers)


def check_inputs(planned: PlannedGraph) -> None:
    weights = {recipe.key: recipe for recipe in planned.plan.weights}
    values = {"input_ids", "positions", "logits_indices"}
    values |= {name for step in planned.plan.steps if isinstance(step, PieceStep) for name in step.outputs}
    values |= {step.out for step in planned.plan.steps if isinstance(step, AttentionStep)}
    for step in (*planned.plan.steps, planned.plan.head):
        if isinstance(step, AttentionStep):
            continue
        piece = planned.pieces[step.piece]
        placeholders = piece.graph_module.graph.find_nodes(op="placeholder")
        assert len(placeholders) == len(step.inputs) == len(piece.spec.inputs)
        assert all(isinstance(node.meta["example_value"], torch.Tensor) for node in placeholders)
        for name, spec in zip(step.inputs, piece.spec.inputs, strict=True):
            kind, _, rest = name.partition(":")
            assert rest in (weights if kind == "weight" else values)
            assert "cache" not in name
            # A paged cache has five dimensions; nothing that enters a piece has more than three here.
            assert len(spec.shape) <= 3
        for node in piece.graph_module.graph.nodes:
            assert node.op in ("placeholder", "call_function", "call_method", "output")
            assert not is_attention(node)


def test_pieces_take_tensors_only_and_no_cache(small: Small, tiny_llama: TinyLlama) -> None:
    check_inputs(small.planned)
    check_inputs(tiny_llama.planned)


def test_a_tiny_llama_repeats_its_middle_piece(tiny_llama: TinyLlama) -> None:
    keys = [step.piece for step in tiny_llama.planned.plan.steps if isinstance(step, PieceStep)]
    assert len(keys) == 4
    assert keys[1] == keys[2]
    assert len({*keys, tiny_llama.planned.plan.head.piece}) == 4
    assert tiny_llama.counters.captures == 1
    assert tiny_llama.counters.passes["merge_linears"] == 3 * 3
    assert [layer.layer_name for layer in tiny_llama.planned.plan.layers] == [
        layer.layer_name for layer in tiny_llama.definition.layers
    ]


def test_equal_layers_read_their_own_weights(small: Small) -> None:
    pieces = [step for step in small.planned.plan.steps if isinstance(step, PieceStep)]
    assert pieces[1].piece == pieces[2].piece
    first, second = (
        [re.sub(r"layers\.(\d+)\.", "", name) for name in piece.inputs if name.startswith("weight:")]
        for piece in pieces[1:3]
    )
    assert first == second
    assert pieces[1].inputs != pieces[2].inputs


@pytest.mark.parametrize("layer", [Layer("layers.1.attention", width=32), Layer("layers.1.attention", factor=0.5)])
def test_unlike_layers_are_told_apart(layer: Layer) -> None:
    """Another size, and another constant at the same place."""
    model = SmallModel([Layer("layers.0.attention"), layer, Layer("layers.2.attention")])
    planned = plan_small(model)
    # Each middle piece spans the end of a layer and the start of the next; the odd one is the end of layer 1.
    keys = [step.piece for step in planned.plan.steps if isinstance(step, PieceStep)]
    assert keys[1] != keys[2]
    assert len(planned.pieces) == 5
    check_against_dense(model, planned)


def test_the_plan_computes_what_the_model_computes(small: Small) -> None:
    check_against_dense(small.module, small.planned)
    check_against_dense(small_model(1, tied=True))


def test_mixed_steps_of_prompts_chunks_and_decodes_equal_the_dense_model(small: Small) -> None:
    a, b, c = SEQUENCES[0], [5, *SEQUENCES[0]], SEQUENCES[2]
    dense_a, dense_b, dense_c = (small.module.dense_logits(tokens) for tokens in (a, b, c))
    run = small.running()
    first = run.run([chunk(0, a, 0, 3), chunk(2, c, 0, 5)])
    torch.testing.assert_close(first, torch.stack([dense_a[2], dense_c[4]]), rtol=1e-4, atol=1e-5)
    second = run.run([chunk(0, a, 3, 4), whole_request(1, b), chunk(2, c, 5, 11)])
    torch.testing.assert_close(second, torch.stack([dense_a[3], dense_b[-1], dense_c[10]]), rtol=1e-4, atol=1e-5)
    third = run.run([chunk(2, c, 11, 12), chunk(0, a, 4, 5)])
    torch.testing.assert_close(third, torch.stack([dense_c[11], dense_a[4]]), rtol=1e-4, atol=1e-5)


class Twisted(SmallModel):
    """Values that cross several pieces, tuples that are opened later, sizes in arithmetic, changes in place."""

    def backbone(self, hidden: torch.Tensor) -> torch.Tensor:
        skipped = hidden.tanh()
        left, right = hidden.chunk(2, dim=-1)
        hidden = self.layers[0](hidden)
        hidden = hidden * (1 + 1 / hidden.shape[1])
        hidden = self.layers[1](hidden)
        # Across the cut: made before the first attention, used after the second.
        hidden = torch.cat([hidden[..., : HIDDEN // 2] + left, hidden[..., HIDDEN // 2 :] * right], dim=-1)
        hidden = self.layers[2](hidden)
        hidden = hidden.clone()
        hidden.add_(skipped.view(-1, HIDDEN * 1)[None])
        unused = hidden * 3  # noqa: F841
        part = hidden[0]
        part *= 2
        return hidden


def test_values_tuples_sizes_and_changes_in_place_survive_the_cut() -> None:
    model = Twisted([Layer(f"layers.{index}.attention") for index in range(3)])
    expected = torch.stack([model.dense_logits(sequence)[-1] for sequence in SEQUENCES[:1]])
    # Alone: the number of tokens enters the result, so a batch would change it.
    planned = plan_small(model)
    logits = Running(planned, compiled(planned), ModuleWeights(model)).run_whole(SEQUENCES[:1])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    check_inputs(planned)


class HalvesLater(SmallModel):
    def backbone(self, hidden: torch.Tensor) -> torch.Tensor:
        left, right = hidden.chunk(2, dim=-1)
        hidden = self.layers[0](hidden)
        return hidden + torch.cat([right, left], dim=-1)


def test_a_tuple_that_is_opened_after_an_attention_does_not_cross_it() -> None:
    """Only tensors pass between pieces, so its elements belong to the piece that makes it."""
    model = HalvesLater([Layer("layers.0.attention")])
    captured = capture(model)
    graph = captured.graph_module.graph
    (chunk_node,) = graph.find_nodes(op="call_method", target="chunk")
    for element in list(chunk_node.users):
        next(iter(element.users)).prepend(element)
    attention = next(node for node in graph.nodes if is_attention(node))
    assert all(attention < element for element in chunk_node.users)
    run_passes(captured, ())
    split = split_at_attention(captured)
    first, _, last = split.steps
    assert isinstance(first, Piece)
    assert isinstance(last, Piece)
    assert {element.name for element in chunk_node.users} <= set(first.outputs)
    assert "chunk" not in last.spec.code


class Parallel(SmallModel):
    """Attention and feed-forward from one input, as GPT-J and Phi have them."""

    def backbone(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + layer.attention(hidden) + layer.down(torch.relu(layer.up(hidden)))
        return hidden


def test_linears_on_both_sides_of_an_attention() -> None:
    check_against_dense(Parallel([Layer(f"layers.{index}.attention") for index in range(2)]))


def test_dead_computation_is_in_no_piece(small: Small) -> None:
    class Idle(SmallModel):
        def backbone(self, hidden: torch.Tensor) -> torch.Tensor:
            hidden = super().backbone(hidden)
            _ = torch.cosh(hidden).sum()
            return hidden

    planned = plan_small(Idle([Layer("layers.0.attention")]))
    assert not any("cosh" in piece.spec.code for piece in planned.pieces.values())


def test_a_model_without_our_attention_is_refused() -> None:
    with pytest.raises(CaptureError, match="no attention op"):
        split_at_attention(capture(SmallModel([])))


class WholeHead(SmallModel):
    def forward(self, input_ids, position_ids, use_cache, logits_to_keep):  # type: ignore[no-untyped-def]
        return Output(self.head(self.backbone(self.embed(input_ids))))


class EarlySelection(SmallModel):
    def forward(self, input_ids, position_ids, use_cache, logits_to_keep):  # type: ignore[no-untyped-def]
        hidden = self.embed(input_ids)[:, logits_to_keep]
        return Output(self.head(self.backbone(hidden)))


class TwoValues(SmallModel):
    def forward(self, input_ids, position_ids, use_cache, logits_to_keep):  # type: ignore[no-untyped-def]
        hidden = self.embed(input_ids)
        return Output(self.head(self.backbone(hidden)[:, logits_to_keep] + hidden[:, logits_to_keep]))


class ReusedResult(SmallModel):
    def backbone(self, hidden: torch.Tensor) -> torch.Tensor:
        attention = self.layers[0].attention
        query = attention.q_proj(hidden).view(-1, HEADS, HEAD_DIM)
        key = attention.k_proj(hidden).view(-1, KV_HEADS, HEAD_DIM)
        torch.ops.compiled_engine.attention(query, key, key, query, attention.name)
        return query.reshape(1, -1, HIDDEN)


@pytest.mark.parametrize(
    ("model_class", "message"),
    [
        (WholeHead, "ignores logits_to_keep"),
        (EarlySelection, "selects rows before the last attention"),
        (TwoValues, "one value of the backbone"),
        (ReusedResult, "must be a new tensor"),
    ],
)
def test_models_that_cannot_be_cut_are_refused(model_class: type[SmallModel], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        plan_small(model_class([Layer("layers.0.attention")]))


def test_the_layer_names_reach_no_piece(small: Small) -> None:
    """A name inside a piece would make every layer's piece unlike all others."""
    names = [module.name for module in small.module.modules() if isinstance(module, Attend)]
    for piece in small.planned.pieces.values():
        assert not any(name in piece.spec.code for name in names)
