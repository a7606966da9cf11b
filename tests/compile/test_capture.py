"""Capture: one graph or an error that names the line; nothing computed; nothing carried from one capture to another."""

from __future__ import annotations

import gc
import inspect
import mmap
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from small_models import HIDDEN, BodyModel, ModuleWeights, SmallModel, run_graph, small_model
from torch import nn

from compiled_engine.compile.capture import INPUT_IDS, LOGITS_INDICES, POSITIONS, capture
from compiled_engine.errors import CaptureError

IDS = [3, 1, 4, 1, 5, 9, 2]


def linear() -> nn.Linear:
    return nn.Linear(HIDDEN, HIDDEN)


def graph_breaks(model: BodyModel, hidden: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return hidden


def branches_on_data(model: BodyModel, hidden: torch.Tensor) -> torch.Tensor:
    if hidden.sum() > 0:
        return hidden * 2
    return hidden


def raises(model: BodyModel, hidden: torch.Tensor) -> torch.Tensor:
    raise ValueError("no such model")


def branches_on_length(model: BodyModel, hidden: torch.Tensor) -> torch.Tensor:
    if hidden.shape[1] > 6:
        return hidden * 2
    return hidden


def branches_on_one_length(model: BodyModel, hidden: torch.Tensor) -> torch.Tensor:
    if hidden.shape[1] == 8:
        return hidden * 2
    return hidden


def branches_on_parity(model: BodyModel, hidden: torch.Tensor) -> torch.Tensor:
    return hidden * 2 if hidden.shape[1] % 2 == 0 else hidden


def fixes_the_length(model: BodyModel, hidden: torch.Tensor) -> torch.Tensor:
    return hidden + torch.zeros(1, 8, HIDDEN)


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (graph_breaks, "torch._dynamo.graph_break()"),
        (branches_on_data, "if hidden.sum() > 0:"),
        (raises, 'raise ValueError("no such model")'),
        (branches_on_length, "if hidden.shape[1] > 6:"),
        (branches_on_one_length, "if hidden.shape[1] == 8:"),
        (branches_on_parity, "if hidden.shape[1] % 2 == 0"),
        (fixes_the_length, "hidden + torch.zeros"),
    ],
)
def test_what_does_not_fit_into_one_graph_is_refused_by_its_line(body: Callable[..., torch.Tensor], line: str) -> None:
    """A branch on the number of tokens too: one graph holds one side of it, and nothing would check which."""
    lines, start = inspect.getsourcelines(body)
    number = start + next(index for index, text in enumerate(lines) if line in text)
    with pytest.raises(CaptureError) as caught:
        capture(BodyModel(body))
    message = str(caught.value)
    assert line in message
    assert Path(__file__).name in message
    assert f":{number}" in message or f"line {number}" in message
    assert "BodyModel" in message


GLOBAL_TENSOR = torch.ones(HIDDEN)


def test_a_tensor_that_is_no_weight_is_refused() -> None:
    with pytest.raises(CaptureError, match="no model input, weight or size"):
        capture(BodyModel(lambda model, hidden: hidden + GLOBAL_TENSOR))


def test_a_graph_takes_inputs_weights_and_buffers_by_name() -> None:
    model = BodyModel(lambda model, hidden: model.inner(hidden) + model.shift, inner=linear())
    model.register_buffer("shift", torch.randn(HIDDEN), persistent=False)
    captured = capture(model)
    assert set(captured.inputs.values()) == {INPUT_IDS, POSITIONS, LOGITS_INDICES}
    assert {recipe.key for recipe in captured.weights.values()} == {
        "embed.weight", "place.weight", "inner.weight", "inner.bias", "shift", "head.weight",
    }  # fmt: skip
    for name, recipe in captured.weights.items():
        assert recipe.shape == tuple(ModuleWeights(model).shape(recipe.key)), name
    logits = run_graph(captured, ModuleWeights(model), IDS, [6, 0])
    ids = torch.tensor(IDS)[None]
    expected = model(ids, torch.arange(7)[None], False, torch.tensor([6, 0])).logits[0]
    torch.testing.assert_close(logits, expected)


def test_a_tied_weight_has_one_name() -> None:
    captured = capture(small_model(1, tied=True))
    keys = [recipe.key for recipe in captured.weights.values()]
    assert keys.count("embed.weight") == 1
    assert "head.weight" not in keys


def test_a_model_without_positions_is_captured() -> None:
    class NoPositions(SmallModel):
        def forward(self, input_ids, position_ids, use_cache, logits_to_keep):  # type: ignore[no-untyped-def]
            return type(super().forward(input_ids, position_ids, use_cache, logits_to_keep))(
                self.head(self.embed(input_ids)[:, logits_to_keep])
            )

    captured = capture(NoPositions([]))
    logits = run_graph(captured, ModuleWeights(NoPositions([])), IDS, [0, 1, 2])
    assert logits.shape[0] == 3


def test_graphs_fit_any_number_of_tokens_and_rows() -> None:
    model = BodyModel(lambda model, hidden: hidden * hidden.shape[1] + hidden.mean(1, keepdim=True))
    captured = capture(model)
    for length, rows in [(2, [0, 1]), (5, [4, 4, 0]), (40, list(range(40))), (8, [1, 2, 3, 4])]:
        ids = [token % 7 for token in range(length)]
        expected = model(torch.tensor(ids)[None], torch.arange(length)[None], False, torch.tensor(rows)).logits[0]
        torch.testing.assert_close(run_graph(captured, ModuleWeights(model), ids, rows), expected)


def test_values_of_weights_do_not_matter_and_stay() -> None:
    model = small_model(1)
    clean = capture(model)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.fill_(float("nan"))
    poisoned = capture(model)
    assert poisoned.graph_module.code == clean.graph_module.code
    assert poisoned.weights == clean.weights
    assert all(parameter.isnan().all() for parameter in model.parameters())


def resident_bytes(address: int) -> int:
    """Memory pages in use of the mapping at ``address``, as the kernel counts them."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(" ", 1)[0]
        if "-" in head and ":" not in head:
            first, last = (int(part, 16) for part in head.split("-"))
            inside = first <= address < last
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no mapping at {address:#x}")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")
def test_no_page_of_a_weight_is_touched() -> None:
    size = 4096
    pages = mmap.mmap(-1, size * size * 4)
    wide = nn.Linear(1, 1, bias=False)
    wide.weight = nn.Parameter(torch.frombuffer(pages, dtype=torch.float32).view(size, size), requires_grad=False)

    def body(model: BodyModel, hidden: torch.Tensor) -> torch.Tensor:
        inner = F.pad(hidden, (0, size - HIDDEN))
        return model.wide(inner)[..., :HIDDEN]

    captured = capture(BodyModel(body, wide=wide))
    assert "wide.weight" in {recipe.key for recipe in captured.weights.values()}
    assert resident_bytes(wide.weight.data_ptr()) == 0
    wide.weight[0, 0] = 1
    assert resident_bytes(wide.weight.data_ptr()) > 0, "the measure itself works"


class Scaled(nn.Module):
    """Numbers that differ from model to model at one line of source."""

    def __init__(self, epsilon: float, repeats: int) -> None:
        super().__init__()
        self.epsilon, self.repeats = epsilon, repeats

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(hidden, (HIDDEN,), eps=self.epsilon).repeat(1, 1, self.repeats)[..., :HIDDEN] * self.epsilon


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_captures_in_one_process_do_not_see_each_other(order: tuple[int, ...]) -> None:
    """Dynamo would turn a number that changed since the last capture into an input of the graph."""
    settings = [(1e-6, 1), (1e-5, 2), (0.5, 3)]
    for index in order:
        model = BodyModel(lambda model, hidden: model.scaled(hidden), scaled=Scaled(*settings[index]))
        captured = capture(model)
        ids = torch.tensor(IDS)[None]
        expected = model(ids, torch.arange(7)[None], False, torch.tensor([1, 2])).logits[0]
        torch.testing.assert_close(run_graph(captured, ModuleWeights(model), IDS, [1, 2]), expected)


def test_the_same_model_gives_the_same_graph_again() -> None:
    first = capture(small_model(1))
    capture(small_model(1, tied=True))
    again = capture(small_model(1))
    assert first.graph_module.code == again.graph_module.code
    assert first.weights == again.weights
    assert first.inputs == again.inputs


def test_a_failed_capture_does_not_spoil_the_next() -> None:
    with pytest.raises(CaptureError):
        capture(BodyModel(graph_breaks))
    assert capture(small_model(1)).weights


def test_the_callers_dynamo_settings_are_left_alone() -> None:
    before = torch._dynamo.config.automatic_dynamic_shapes
    capture(small_model(1))
    with pytest.raises(CaptureError):
        capture(BodyModel(graph_breaks))
    assert torch._dynamo.config.automatic_dynamic_shapes == before


def test_capture_does_not_keep_the_model_alive() -> None:
    """Its parameters are address space of the whole model's size."""
    model = small_model(1)
    captured = capture(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    assert captured.weights
