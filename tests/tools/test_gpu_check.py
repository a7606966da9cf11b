"""The GPU check on a CPU: its sections on the emulation, its JSON, its exit codes, and faults that it must find."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_engine.ops.cpu.build import load_kernels
from kernel_folder import KERNELS

ROOT = Path(__file__).parents[2]
PATHS = (ROOT / "tests", ROOT / "tools")
SIZES = ["--hidden", "32", "--intermediate", "48", "--heads", "2", "--kv-heads", "1", "--vocab", "64"]
TINY = ["--device", "cpu", "--piece-compiler", "eager", *SIZES]
PLANT = """
import sys
from gpu_checks import command
{fault}
sys.exit(command.main())
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for all runs, with the kernels that all tests share."""
    store = tmp_path_factory.mktemp("gpu_check_store")
    load_kernels(KERNELS)
    shutil.copytree(KERNELS, store / "kernels")
    return store


class Check:
    """Runs the command with files of its own. ``fault``: Python code that runs before it."""

    def __init__(self, folder: Path, store: Path) -> None:
        self._out = folder / "out.json"
        self._environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        self._environment |= {"COMPILED_ENGINE_CACHE": str(store), "PYTHONPATH": os.pathsep.join(map(str, PATHS))}

    def run(self, *arguments: str, fault: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        start = [str(ROOT / "tools" / "gpu_check.py")] if fault is None else ["-c", PLANT.format(fault=fault)]
        return subprocess.run(
            [sys.executable, *start, "--out", str(self._out), *arguments],
            cwd=ROOT,
            env={**self._environment, **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    @property
    def sections(self) -> dict[str, dict[str, Any]]:
        """The outcomes in the JSON file, by section."""
        data = json.loads(self._out.read_text())
        assert data["exit_code"] in (0, 1)
        return {section["name"]: section["outcome"] for section in data["sections"]}

    @property
    def verdicts(self) -> dict[str, str]:
        return {name: outcome["verdict"] for name, outcome in self.sections.items()}

    def has_written(self) -> bool:
        return self._out.exists()


@pytest.fixture
def check(tmp_path: Path, store: Path) -> Check:
    return Check(tmp_path, store)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_one_line_says_the_way_out(check: Check) -> None:
    process = check.run()
    assert process.returncode == 3
    assert process.stdout == ""
    (line,) = process.stderr.splitlines()
    assert "cuda:0 is not there" in line
    assert "--device cpu" in line
    assert not check.has_written()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sections", "greedy,nonsense"], "unknown section 'nonsense': choose among environment,"),
        (["--device", "tpu"], "device is 'tpu': choose one of"),
        (["--device", "cpu", "--model", "/nowhere"], "there is no config.json in that folder"),
        (["--batches", "1,many"], "'1,many' is no list of whole numbers"),
    ],
)
def test_a_wrong_option_is_told(arguments: list[str], message: str, check: Check) -> None:
    process = check.run(*arguments)
    assert process.returncode == 2
    assert message in process.stderr


@pytest.mark.slow
def test_help_has_sections_and_examples(check: Check) -> None:
    process = check.run("--help")
    assert process.returncode == 0
    for text in ("examples:", "--sections decode --budget 600", "warm_start", "Exit codes:"):
        assert text in process.stdout


@pytest.mark.slow
def test_a_spent_budget_starts_no_section_and_says_so(check: Check) -> None:
    process = check.run(*TINY, "--budget", "0")
    assert process.returncode == 0
    assert set(check.verdicts.values()) == {"skipped"}
    assert len(check.verdicts) == 9
    assert "the budget was spent" in check.sections["decode"]["summary"]


@pytest.mark.slow
def test_sections_and_sizes_are_those_asked_for(check: Check) -> None:
    process = check.run(*TINY, "--sections", "environment,kernels,capture", "--layers", "1", "--batches", "1,2,5")
    assert process.returncode == 0, process.stderr
    assert check.verdicts == {"environment": "passed", "kernels": "skipped", "capture": "passed"}
    assert "TRITON_INTERPRET=1" in check.sections["kernels"]["summary"]
    assert check.sections["environment"]["figures"]["packages"]["torch"] is not None
    keys = [row["key"] for row in check.sections["capture"]["rows"]]
    assert keys[0] == "piecewise 320 tokens"
    assert "full decode 5 requests, seq_len <= 64, 1 KV split" in keys
    # A model of one layer has a stretch of pieces before its attention and one after it.
    assert {row["graphs"] for row in check.sections["capture"]["rows"]} == {1, 2}
    assert "passed" in process.stdout


RAISES = """
from gpu_checks import environment
def boom(lab): raise OSError("planted\\nsecond line")
environment.check = boom
"""


@pytest.mark.slow
def test_a_section_that_raises_stops_no_other(check: Check) -> None:
    process = check.run(*TINY, "--sections", "environment,kernels", fault=RAISES)
    assert process.returncode == 1
    assert check.verdicts == {"environment": "error", "kernels": "skipped"}
    assert check.sections["environment"]["summary"] == "OSError: planted"
    assert "in boom" in check.sections["environment"]["figures"]["traceback"]


@pytest.mark.slow
def test_after_an_error_of_the_device_the_rest_runs_in_a_new_process(check: Check) -> None:
    """In the new process nothing is planted, so the section that raises here passes there."""
    fault = RAISES.replace("environment", "kernels") + RAISES + "command.device_is_broken = lambda lab: True"
    process = check.run(*TINY, "--sections", "kernels,environment", fault=fault)
    assert process.returncode == 1
    assert check.verdicts == {"kernels": "error", "environment": "passed"}


@pytest.mark.slow
def test_graphs_that_replay_on_old_caches_are_found(check: Check) -> None:
    fault = "from compiled_engine.compile.graphs import backend; backend.check_bindings = lambda *_: None"
    process = check.run(*TINY, "--sections", "stale", fault=fault)
    assert process.returncode == 1
    assert check.verdicts == {"stale": "failed"}
    assert "full: no StaleGraph was raised" in check.sections["stale"]["summary"]


WRONG_TOKENS = """
from compiled_engine.runners import gpu
from compiled_engine.ops.sampling import SampledTokens
finished = gpu.GpuRunner._replay_full
def wrong(self, key, inputs, sampling):
    sampled = finished(self, key, inputs, sampling)
    return SampledTokens((sampled.token_ids[0] ^ 1, *sampled.token_ids[1:]), sampled.logprobs)
gpu.GpuRunner._replay_full = wrong
"""


@pytest.mark.slow
def test_wrong_tokens_are_found_in_the_modes_that_write_them(check: Check) -> None:
    process = check.run(*TINY, "--sections", "greedy", "--greedy-batches", "2", fault=WRONG_TOKENS)
    assert process.returncode == 1
    rows = check.sections["greedy"]["rows"]
    assert {row["mode"] for row in rows if row["texts_that_differ"]} == {
        "full_decode_only",
        "full",
        "full_and_piecewise",
    }
    assert check.verdicts == {"greedy": "failed"}
    assert "parts from transformers at token 1" in check.sections["greedy"]["summary"]


@pytest.mark.slow
def test_everything_passes_on_the_emulation(check: Check) -> None:
    process = check.run(*TINY)
    assert process.returncode == 0, process.stderr
    verdicts = check.verdicts
    assert verdicts.pop("kernels") == "skipped"
    assert verdicts.pop("bindings") == "skipped"
    assert check.sections["bindings"]["summary"].startswith("not available: the emulation's graphs are no CUDA graphs")
    assert set(verdicts.values()) == {"passed"}
    modes = {row["mode"]: row for row in check.sections["greedy"]["rows"]}
    assert modes["none"]["full_steps"] == modes["none"]["piecewise_steps"] == 0
    assert modes["full"]["full_steps"] > 0
    assert modes["piecewise"]["piecewise_steps"] > 0
    assert check.sections["greedy"]["figures"]["distinct_tokens"] > 5
    # In float32 the peer that times are compared with writes the same.
    assert [row["same_tokens"] for row in check.sections["decode"]["rows"]] == [1, 1]
    assert all(row["peer_step_ms"] > 0 for row in check.sections["decode"]["rows"])


INTERPRET = """
from triton_interpreter import mended_interpreter
from gpu_checks import kernels
kernels.CASES = kernels.CASES[{first}:{last}]
mended = mended_interpreter()
mended.__enter__()
"""
NOTHING_WRITTEN = "from compiled_engine.ops.triton import attention; attention.write_to_cache = lambda *_: None"
NO_SINKS = """
from compiled_engine.ops.triton import split_kv
real = split_kv._reduce_kernel
class Launch:
    def __getitem__(self, grid):
        return lambda *a, **k: real[grid](*a[:5], None, *a[6:], **k)
split_kv._reduce_kernel = Launch()
"""


@pytest.mark.slow
def test_kernels_pass_in_the_interpreter(check: Check) -> None:
    fault = INTERPRET.format(first=1, last=4)
    process = check.run(*TINY, "--sections", "kernels,bandwidth", fault=fault, TRITON_INTERPRET="1")
    assert process.returncode == 0, process.stderr
    assert check.verdicts == {"kernels": "passed", "bandwidth": "passed"}
    assert len(check.sections["kernels"]["rows"]) == 3 * 6 + 4
    assert [row["batch"] for row in check.sections["bandwidth"]["rows"]] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "message"),
    [
        (NOTHING_WRITTEN, "cache write before 2D (float32, 8/2 heads of 80, window 40, sinks): off by inf"),
        (NO_SINKS, "attention 3D (float32, 8/2 heads of 80, window 40, sinks): off by"),
    ],
    ids=["nothing is written", "sinks are left out"],
)
def test_wrong_kernels_are_found(planted: str, message: str, check: Check) -> None:
    fault = INTERPRET.format(first=1, last=2) + planted
    process = check.run(*TINY, "--sections", "kernels", fault=fault, TRITON_INTERPRET="1")
    assert process.returncode == 1
    assert check.verdicts == {"kernels": "failed"}
    assert message in check.sections["kernels"]["summary"]


@pytest.mark.slow
def test_a_second_start_compiles_nothing(check: Check) -> None:
    process = check.run(*TINY, "--piece-compiler", "aoti", "--sections", "warm_start")
    assert process.returncode == 0, process.stderr
    first, second = check.sections["warm_start"]["rows"]
    assert first["new_files"] > second["new_files"] == 0
    phases = check.sections["warm_start"]["figures"]["phases"]
    notes = {name: [phase["note"] for phase in phases[name] if phase["name"] == "graphs"] for name in phases}
    assert notes == {"first": ["miss"], "second": ["hit"]}
