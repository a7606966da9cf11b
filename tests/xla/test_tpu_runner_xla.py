"""The TPU runner on torch_xla's CPU device: the texts of transformers, from graphs that are compiled at the start."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import tpu_checks
from compiled_engine.compile.ledger import Ledger
from compiled_engine.config import EngineConfig
from compiled_engine.engine.core import Engine
from compiled_engine.errors import CompiledAfterWarmup
from compiled_engine.models import find_model
from compiled_engine.runners import create_runner
from compiled_engine.runners.cpu import CpuRunner
from compiled_engine.runners.torch_xla_platform import TorchXlaPlatform
from compiled_engine.runners.tpu import TpuRunner
from graph_runners import eager_runner
from oracle import TransformersOracle
from tiny_models import write_tiny_model
from tpu_runners import SETTINGS, SMALLEST, new_runner, serve, tokens_of, write_model

ARCHITECTURES = ("llama", "gemma3", "qwen3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = write_model(tmp_path_factory.mktemp(architecture), architecture)
        return made[architecture]

    return make


@pytest.fixture(scope="module")
def expected(folders: Callable[[str], Path]) -> Iterator[CpuRunner]:
    """The CPU's own runner of the tiny llama."""
    runner = eager_runner(folders("llama"))
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def runners(folders: Callable[[str], Path], expected: CpuRunner) -> Iterator[Callable[[str], TpuRunner]]:
    """By architecture: a runner that tests leave as it was, made after the CPU's, which sets the number of threads."""
    made: dict[str, TpuRunner] = {}

    def make(architecture: str) -> TpuRunner:
        if architecture not in made:
            made[architecture] = new_runner(folders(architecture), TorchXlaPlatform())
        return made[architecture]

    yield make
    for runner in made.values():
        runner.close()


@pytest.fixture
def runner(runners: Callable[[str], TpuRunner]) -> TpuRunner:
    return runners("llama")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_texts_are_those_of_transformers(
    architecture: str, folders: Callable[[str], Path], runners: Callable[[str], TpuRunner]
) -> None:
    oracle = TransformersOracle(folders(architecture))
    runner = runners(architecture)
    tpu_checks.check_list_of_caches(runner)
    tpu_checks.check_texts(runner, oracle)
    tpu_checks.check_cached_prefixes(runner, oracle)
    tpu_checks.check_blocks_out_of_range_are_refused(runner)


def test_nothing_reads_padding(runner: TpuRunner, expected: CpuRunner) -> None:
    tpu_checks.check_nothing_reads_padding(runner, expected)


def test_sampled_tokens_are_those_of_the_cpu_runner(runner: TpuRunner, expected: CpuRunner) -> None:
    tpu_checks.check_sampling(runner, expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_workload_compiles_after_warm_up(architecture: str, runners: Callable[[str], TpuRunner]) -> None:
    tpu_checks.check_workloads(runners(architecture))


def test_a_size_that_the_warm_up_left_out(runner: TpuRunner, caplog: pytest.LogCaptureFixture) -> None:
    tpu_checks.check_an_uncovered_size_raises(runner)
    tpu_checks.check_an_uncovered_size_warns(runner, caplog)


def test_what_runs_outside_of_compiled_functions_is_counted(
    runner: TpuRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An operation that a step runs by itself costs a graph the first time and an execution every time."""
    hidden_states = runner._hidden_states

    def straying(staged: object) -> torch.Tensor:
        found = hidden_states(staged)
        (found[:3] * 2 + 1).cpu()
        return found

    monkeypatch.setattr(runner, "_hidden_states", straying)
    with tpu_checks.warning_only(runner), caplog.at_level(logging.WARNING):
        serve(Engine(runner), [[5, 6, 7]], tpu_checks.GREEDY)
        assert runner.sentinel.stray_executions == tpu_checks.NEW_TOKENS
        (message,) = [record.getMessage() for record in caplog.records]
        assert "XLA compiled 1 graph, 1 of them for operations outside of compiled functions" in message
        assert "a step in bucket 8 tokens, 2 rows" in message


def test_a_new_graph_that_dynamo_does_not_see_raises(runner: TpuRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_states = runner._hidden_states

    def straying(staged: object) -> torch.Tensor:
        found = hidden_states(staged)
        (found[:2] * 3 - 1).cpu()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_hidden_states", straying)
        with pytest.raises(CompiledAfterWarmup, match="a step in bucket 8 tokens, 2 rows"):
            serve(Engine(runner), [[5, 6, 7]], tpu_checks.GREEDY)


def test_caches_stay_in_place(runner: TpuRunner) -> None:
    tpu_checks.check_caches_stay_in_place(runner)


def test_without_donation_caches_are_copied(tmp_path: Path) -> None:
    """So the addresses tell."""

    class Keeping(TorchXlaPlatform):
        def donate(self, tensor: torch.Tensor) -> None:
            pass

    folder = write_tiny_model(tmp_path, "llama", num_hidden_layers=1)
    runner = new_runner(folder, Keeping(), **SMALLEST)
    first, second, *_ = tpu_checks.addresses_in_steps(runner, 2)
    assert not set(first) & set(second)
    runner.close()


def test_a_closed_runner_says_so_and_keeps_nothing(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama", num_hidden_layers=1)
    tpu_checks.check_closing(new_runner(folder, TorchXlaPlatform(), **SMALLEST))


def test_rebinding(runner: TpuRunner, expected: CpuRunner) -> None:
    tpu_checks.check_other_caches_are_used(runner)
    tpu_checks.check_a_text_goes_on_in_other_caches(runner, expected)
    tpu_checks.check_more_blocks_cost_a_graph_for_each_body(runner)


def test_a_runner_with_sliding_windows_is_bound_again(runners: Callable[[str], TpuRunner]) -> None:
    tpu_checks.check_other_caches_are_used(runners("gemma3"))
    tpu_checks.check_caches_stay_in_place(runners("gemma3"))


@pytest.mark.parametrize(("architecture", "tied"), [("llama", False), ("llama_tied", True)])
def test_tied_weights_are_one_tensor_on_the_device(architecture: str, tied: bool, tmp_path: Path) -> None:
    tpu_checks.check_loading(write_tiny_model(tmp_path, architecture), TorchXlaPlatform(), tied)


def test_create_runner_makes_one_that_says_where_it_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_tiny_model(tmp_path, "llama", num_hidden_layers=1)
    ledger = Ledger()
    with caplog.at_level(logging.INFO):
        runner = create_runner(EngineConfig(**{**SETTINGS, **SMALLEST}), find_model(str(folder)), ledger)
    assert isinstance(runner, TpuRunner)
    assert "device tpu: XLA on the CPU (PJRT_DEVICE=CPU)" in caplog.messages
    (phase,) = [phase for phase in ledger.to_json()["phases"] if phase["name"] == "compile buckets"]
    assert "every start compiles" in phase["note"]
    prompts = tpu_checks.make_prompts((20, 3, 9))
    oracle = TransformersOracle(folder)
    expected = [oracle.greedy(prompt, tpu_checks.NEW_TOKENS) for prompt in prompts]
    assert tokens_of(serve(Engine(runner), prompts, tpu_checks.GREEDY)) == expected
    runner.close()


def run_python(*arguments: str, pjrt_device: str | None = "CPU") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PJRT_DEVICE"}
    if pjrt_device is not None:
        environment["PJRT_DEVICE"] = pjrt_device
    root = Path(__file__).parents[2]
    environment["PYTHONPATH"] = str(root)
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, cwd=root)


@pytest.mark.skipif(bool(list(Path("/dev").glob("accel*"))), reason="this machine has a TPU")
def test_nobody_gets_the_cpu_by_mistake() -> None:
    """Twice the same error, although importing torch_xla sets the variable."""
    code = (
        "from compiled_engine.errors import ConfigError\n"
        "from compiled_engine.runners.platforms import find_platform\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        find_platform()\n"
        "    except ConfigError as error:\n"
        "        print(error)\n"
    )
    done = run_python("-c", code, pjrt_device=None)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == second
    assert "this machine has none (PJRT_DEVICE is '')" in first
    assert "set the environment variable PJRT_DEVICE=CPU" in first


def test_the_command_line_writes_what_the_cpu_writes(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "llama", num_hidden_layers=1)
    sizes = "--max-num-seqs 2 --max-num-batched-tokens 8 --max-model-len 64 --block-size 4 --dtype float32"
    command = ["-m", "compiled_engine", "generate", "--model", str(folder), *sizes.split(), "--temperature", "0"]
    texts = {}
    for backend, options in (("tpu", ()), ("cpu", ("--piece-compiler", "eager", "--no-store"))):
        done = run_python(*command, "--max-tokens", "12", "--backend", backend, *options, "--", "Hello world")
        assert done.returncode == 0, done.stderr
        assert ("XLA on the CPU" in done.stderr) == (backend == "tpu")
        texts[backend] = done.stdout
    assert texts["tpu"] == texts["cpu"]
    assert texts["tpu"].strip()
