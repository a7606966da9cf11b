"""``compiled-engine-debug record``, the command around it, and the workload that runs without prompts."""

from __future__ import annotations

import io
import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from compiled_engine.runners.base import CacheGroupLimits, RunnerLimits
from compiled_engine_debug import cli
from compiled_engine_debug.recording import read_recording
from compiled_engine_debug.workload import Workload, standard_workload, workload_of
from graph_runners import SETTINGS
from tiny_models import write_tiny_model

LIMITS = RunnerLimits(96, 7, 24, 4, (CacheGroupLimits(50),), 128)
SMALL = [f"--{name.replace('_', '-')}={SETTINGS[name]}" for name in ("piece_compiler", "max_num_seqs", "max_model_len")]
SMALL += ["--max-num-batched-tokens=24", "--block-size=4", "--num-threads=1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("llama"), "llama"))


def test_the_fixed_workload_is_recorded(model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.jsonl"
    assert cli.main(["record", "-o", str(file), "--graph-mode", "piecewise", *SMALL, model]) == cli.EXIT_OK
    recording = read_recording(file)
    assert capfd.readouterr().out == f"{file}: {len(recording.steps)} steps of 12 requests, 0 of them failed\n"
    assert not recording.truncated
    assert set(recording.steps.mode) == {"piecewise"}
    assert len(recording.steps.shares.request_ids) == 12
    assert recording.header.config["graph_mode"] == "piecewise"


def test_prompts_of_the_caller_are_recorded_and_failures_told(
    model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("too long " * 100))
    file = tmp_path / "r.jsonl"
    assert cli.main(["record", "-o", str(file), *SMALL, model, "Hello", "-"]) == cli.EXIT_FINDINGS
    assert "steps of 2 requests, 1 of them failed" in capfd.readouterr().out
    assert "Hello" not in file.read_text()
    assert "too long" not in file.read_text()
    assert len(read_recording(file).steps.shares.request_ids) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-o", "/nowhere/r.jsonl"], cli.EXIT_USAGE, "the recording /nowhere/r.jsonl cannot be written"),
        (["-o", "r.jsonl", "--requests", "0"], cli.EXIT_USAGE, "--requests is 0: give at least 1"),
        (["-o", "r.jsonl", "--max-tokens", "-3"], cli.EXIT_USAGE, "--max-tokens is -3: give at least 1"),
        (["-o", "r.jsonl", "--block-size", "0"], cli.EXIT_USAGE, "block_size is 0"),
        (["-o", "r.jsonl", "/nowhere/model"], cli.EXIT_NO_START, "the engine could not start: model '/nowhere/model'"),
    ],
)
def test_what_is_wrong_is_told_with_its_code(
    arguments: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["record", *arguments]) == code
    captured = capfd.readouterr()
    assert captured.out == ""
    assert f"compiled-engine-debug: {message}" in captured.err


def test_a_file_named_memory_is_a_file(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["record", "-o", "memory", "--requests", "1", "--max-tokens", "1", *SMALL, model]) == cli.EXIT_OK
    assert len(read_recording(tmp_path / "memory").steps) == 1


def test_help_needs_no_torch() -> None:
    code = "import sys; from compiled_engine_debug import cli; cli.build_parser(); sys.exit('torch' in sys.modules)"
    paths = os.pathsep.join(str(Path(__file__).parents[3] / name) for name in ("", "tools"))
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": paths})


def test_the_version_and_every_command_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.startswith("compiled-engine-debug ")
    with pytest.raises(SystemExit) as stopped:
        cli.main([])
    assert stopped.value.code == cli.EXIT_USAGE


def test_the_workload_is_mixed_fits_and_is_always_the_same() -> None:
    workload = standard_workload(LIMITS)
    assert workload == standard_workload(LIMITS)
    assert workload.prompts != standard_workload(LIMITS, seed=1).prompts
    lengths = [len(prompt) for prompt in workload.prompts]
    assert len(lengths) == 12
    assert min(lengths) == 1
    assert max(lengths) > LIMITS.max_num_batched_tokens
    assert {params.temperature for params in workload.params} == {0.0, 0.8}
    # Some prompt begins with a whole block of an earlier one, so that prefix caching has something to find.
    pairs = itertools.combinations(workload.prompts, 2)
    assert any(before[:4] == after[:4] and len(before) >= 4 for before, after in pairs)
    for length, params in zip(lengths, workload.params, strict=True):
        assert length + (params.max_tokens or 0) <= LIMITS.max_model_len
    assert all(0 <= token < 128 for prompt in workload.prompts for token in prompt)


@pytest.mark.parametrize("max_model_len", [2, 3, 10])
def test_the_workload_fits_a_short_model(max_model_len: int) -> None:
    workload = standard_workload(replace(LIMITS, max_model_len=max_model_len))
    assert all(0 < len(prompt) < max_model_len for prompt in workload.prompts)


def test_prompts_of_the_caller_are_greedy() -> None:
    workload = workload_of(["a", [1, 2]], 5)
    assert workload.prompts == ("a", [1, 2])
    assert [(params.temperature, params.max_tokens) for params in workload.params] == [(0, 5)] * 2
    with pytest.raises(ValueError, match="0 sampling parameters for 1 prompts"):
        Workload(("a",), ())
