"""The accuracy benchmark: its sums against plain numpy, the weights it makes up, and a whole run on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import accuracy
from accuracy import ROWS_AT_ONCE, Sums, spread_weight
from compiled_engine.ops.quantize import quantize_rows
from compiled_engine.ops.quantized_rows import QuantizedRows
from tiny_models import write_tiny_model

VOCAB = 11


def log_softmax(logits: torch.Tensor) -> np.ndarray:
    values = logits.double().numpy()
    return values - np.log(np.exp(values).sum(1, keepdims=True))


@pytest.mark.parametrize("length", [2, ROWS_AT_ONCE, ROWS_AT_ONCE + 1, 2 * ROWS_AT_ONCE + 5])
def test_sums_over_two_windows_are_those_of_plain_numpy(length: int) -> None:
    sums = Sums()
    divergence, log_likelihood, as_reference, as_check = [], [], [], []
    for _ in range(2):
        ours, reference, check = (torch.randn(length, VOCAB) for _ in range(3))
        reference[::2] = ours[::2] + 0.1  # the same distribution: logits may differ by a constant
        tokens = torch.randint(VOCAB, (length,)).tolist()
        sums.add(ours, reference, check, tokens)
        p, q = log_softmax(reference), log_softmax(ours)
        divergence += (np.exp(p) * (p - q)).sum(1).tolist()
        log_likelihood += [q[i, tokens[i + 1]] for i in range(length - 1)]
        as_reference += (p.argmax(1) == q.argmax(1)).tolist()
        as_check += (check.numpy().argmax(1) == q.argmax(1)).tolist()
    result = sums.accuracy(weight_bytes=30, num_weights=40)
    assert result.divergence == pytest.approx(np.mean(divergence), rel=1e-9)
    assert result.perplexity == pytest.approx(np.exp(-np.mean(log_likelihood)), rel=1e-5)
    assert result.reference_agreement == np.mean(as_reference)
    assert result.check_agreement == np.mean(as_check)
    assert result.bits_per_weight == 6


def test_divergence_takes_the_reference_as_the_truth() -> None:
    certain, even = torch.tensor([[20.0, 0.0]] * 2), torch.zeros(2, 2)
    sums = Sums()
    sums.add(even, certain, certain, [0, 0])
    assert sums.accuracy(1, 1).divergence == pytest.approx(np.log(2), rel=1e-6)
    assert sums.accuracy(1, 1).perplexity == pytest.approx(2, rel=1e-6)


def test_weights_on_a_grid_are_spread_by_half_a_step_at_most() -> None:
    codes = torch.randint(16, (8, 64), dtype=torch.uint8)
    codes[:, ::32], codes[:, 31::32] = 0, 15
    grid = QuantizedRows(4, codes, torch.rand(8, 2).half() + 0.5, torch.randn(8, 2).half())
    weight = grid.dequantize()
    spread = spread_weight(weight, torch.Generator().manual_seed(1))
    moved = (spread - weight).view(8, 2, 32) / grid.scales.float()[..., None]
    assert moved.abs().max() <= 0.5 + 1e-5
    assert moved.std() == pytest.approx(12**-0.5, rel=0.1)
    assert torch.equal(spread, spread_weight(weight, torch.Generator().manual_seed(1)))
    again = quantize_rows(spread, 4).dequantize()
    assert (again - spread).abs().max() > 0.2


def test_other_weights_are_left_alone() -> None:
    random = torch.Generator().manual_seed(1)
    for weight in (torch.randn(8, 64), torch.randn(64), torch.randn(8, 40)):
        assert spread_weight(weight, random) is weight


def test_the_text_is_long_enough_and_cut_into_windows(smollm2_folder: Path) -> None:
    windows = accuracy.read_windows(smollm2_folder, 512)
    assert len(windows) >= 6
    assert all(len(window) == 512 for window in windows[:-1])
    assert 256 <= len(windows[-1]) <= 512


@pytest.mark.slow
def test_a_run_on_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_model(tmp_path / "tiny", "llama", num_hidden_layers=2)
    file = tmp_path / "result.json"
    options = ["--windows", "2", "--window-tokens", "48", "--step-tokens", "20", "--piece-compiler", "eager"]
    assert accuracy.main([*options, "--threads", "1", "--model", str(folder), "--json", str(file)]) == 0
    (rows,) = json.loads(file.read_text())["tables"].values()
    assert list(rows) == ["float32", "int8", "int4", "transformers"]
    assert rows["float32"]["divergence"] == 0
    assert rows["float32"]["reference_agreement"] == 1
    # Another engine altogether: the rounding of float32 is all that is left.
    assert abs(rows["transformers"]["divergence"]) < 1e-6
    assert rows["float32"]["check_agreement"] >= 0.98
    assert rows["float32"]["perplexity"] == pytest.approx(rows["transformers"]["perplexity"], rel=1e-3)
    assert 1e-5 < rows["int8"]["divergence"] < 0.1 * rows["int4"]["divergence"]
    assert rows["int4"]["reference_agreement"] < rows["int8"]["reference_agreement"] <= 1
    assert "transformers" in capsys.readouterr().out
