"""The benchmarks' driver, with an engine that computes nothing: rounds, failures, files and arithmetic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "engines"))
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import busy
import memory
import side_by_side
import worker
from catalogue import EngineEntry
from figures import Figure
from model_files import ModelFiles
from report_tables import comparison_table
from summary import Rates, compare_batch, percentile, rates_of, summarise
from task import BatchReport, Completions, Report, Task

FAKE_ENGINE = """
from __future__ import annotations
import atexit, os, time
from task import Completions

class Fake:
    def __init__(self, task):
        self.task = task
        self.note(f"open {task.options['name']} {os.environ.get('OMP_NUM_THREADS')}")

    def note(self, line):
        with open(self.task.options["log"], "a") as stream:
            stream.write(line + "\\n")

    def generate(self, prompts, new_tokens):
        made = new_tokens - self.task.options.get("too_few", 0)
        self.note(f"generate {len(prompts)} {new_tokens} {','.join(str(len(prompt)) for prompt in prompts)}")
        rows = [[self.task.options["token"]] * made for _ in prompts]
        if self.task.options.get("uneven"):
            rows[-1].pop()
        return Completions(rows, [time.perf_counter() for _ in range(self.task.options.get("times", made))])

    def versions(self):
        return {"fake": "1"}

    def close(self):
        self.note("close")
        if self.task.options.get("dies"):
            atexit.register(os._exit, 3)

def open_engine(task):
    if task.options.get("broken"):
        raise RuntimeError("broken on purpose")
    return Fake(task)
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., SimpleNamespace]:
    """Runs the driver with fake engines: name -> options. Gives the exit code, the JSON and the engines' log."""
    (tmp_path / "fake_engine.py").write_text(FAKE_ENGINE)
    model = tmp_path / "model"
    model.mkdir()
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "the": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(model / "tokenizer.json"))
    config = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    (model / "config.json").write_text(json.dumps(config))
    files = ModelFiles(model, None)
    log = tmp_path / "log"

    def call(engines: dict[str, dict[str, Any]], *arguments: str) -> SimpleNamespace:
        def variables(threads: int) -> dict[str, str]:
            return {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": str(threads)}

        entries = {
            name: EngineEntry(
                name,
                "fake_engine",
                Path(sys.executable),
                {"name": name, "log": str(log), "token": 7} | options,
                variables,
            )
            for name, options in engines.items()
        }
        monkeypatch.setattr(side_by_side, "ENGINES", entries)
        monkeypatch.setattr(side_by_side, "find_model_files", lambda _: files)
        path = tmp_path / "result.json"
        code = side_by_side.main("peers", list(entries), 1, [*arguments, "--json", str(path)])
        lines = log.read_text().splitlines() if log.exists() else []
        return SimpleNamespace(
            code=code, result=json.loads(path.read_text()), log=lines, chart=path.with_suffix(".svg")
        )

    return call


def test_rounds_alternate_and_every_engine_gets_the_same_work(run: Callable[..., SimpleNamespace]) -> None:
    done = run(
        {"compiled_engine": {}, "transformers": {}, "other": {"token": 8}},
        *("--rounds", "2", "--batch", "1", "3", "--new-tokens", "5", "--threads", "2"),
    )
    assert done.code == 0
    opened = [line.split()[1] for line in done.log if line.startswith("open")]
    assert opened == ["compiled_engine", "transformers", "other", "other", "transformers", "compiled_engine"]
    assert {line.split()[2] for line in done.log if line.startswith("open")} == {"2"}
    runs = "\n".join(done.log).split("open ")[1:]
    works = {tuple(text.splitlines()[1:]) for text in runs}
    assert len(works) == 1, "all engines and rounds must be asked the same"
    (work,) = works
    assert [line.split()[:3] for line in work[:-1]] == [
        *[["generate", "1", "1"]] * 4,
        *[["generate", "1", tokens] for tokens in ("2", "1", "5")],
        *[["generate", "3", tokens] for tokens in ("2", "1", "5")],
    ]
    assert {line.split()[3] for line in work[:4]} == {"512"}
    assert work[-1] == "close"
    assert [len(rounds) for rounds in done.result["rounds"].values()] == [2, 2, 2]
    assert done.result["long_prompt_tokens"] == 512
    equal = {(entry["engine"], entry["batch_size"]): entry["equal_texts"] for entry in done.result["agreement"]}
    assert equal == {("compiled_engine", 1): 1, ("compiled_engine", 3): 3, ("other", 1): 0, ("other", 3): 0}


def test_an_engine_that_fails_is_not_started_again_and_the_others_are_reported(
    run: Callable[..., SimpleNamespace], capfd: pytest.CaptureFixture[str]
) -> None:
    engines: dict[str, dict[str, Any]] = {"compiled_engine": {}, "bad": {"broken": True}, "short": {"too_few": 1}}
    engines |= {"uneven": {"uneven": True}, "untimed": {"times": 2}, "dies": {"dies": True}}
    done = run(engines, "--rounds", "2", "--batch", "1", "--new-tokens", "4")
    assert done.code == 1
    assert done.result["failed"] == ["bad", "short", "uneven", "untimed", "dies"]
    assert list(done.result["medians"]) == ["compiled_engine"]
    assert len(done.result["rounds"]["compiled_engine"]) == 2
    message = capfd.readouterr().err
    assert message.count("RuntimeError: broken on purpose") == 1
    assert "wanted 4 tokens for each of 1 prompts, got [3] with 3 times" in message
    assert "wanted 4 tokens for each of 1 prompts, got [3] with 4 times" in message
    assert "got [4] with 2 times" in message
    assert "dies failed with exit code 3" in message


def test_a_script_of_this_folder_does_not_hide_a_package_from_an_engine(
    run: Callable[..., SimpleNamespace], tmp_path: Path
) -> None:
    engine = (tmp_path / "fake_engine.py").read_text()
    check = "\nfrom importlib.util import find_spec\nassert find_spec('task') and not find_spec('side_by_side')\n"
    (tmp_path / "fake_engine.py").write_text(engine + check)
    assert run({"compiled_engine": {}}, "--batch", "1", "--new-tokens", "2").code == 0


def test_chart_is_xml_that_names_every_engine_and_escapes_it(run: Callable[..., SimpleNamespace]) -> None:
    done = run({"compiled_engine": {}, "a<b": {}}, "--batch", "1", "2", "--new-tokens", "3")
    root = ET.parse(done.chart).getroot()
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    panels = 2 + 5
    assert texts.count("a<b") == texts.count("compiled_engine") == panels
    bars = [float(bar.get("width", "")) for bar in root.iter("{http://www.w3.org/2000/svg}rect")][1:]
    assert len(bars) == 2 * panels
    assert all(max(pair) == max(bars) for pair in zip(bars[::2], bars[1::2], strict=True)), "the best fills its panel"


def test_missing_environments_are_refused_before_anything_runs(tmp_path: Path) -> None:
    files = ModelFiles(tmp_path, None)
    present = EngineEntry("present", "m", Path(sys.executable))
    side_by_side.refuse_missing([present], files)
    with pytest.raises(SystemExit, match=r"away: there is no .*nowhere"):
        side_by_side.refuse_missing([present, replace(present, name="away", python=tmp_path / "nowhere")], files)
    with pytest.raises(SystemExit, match="picky reads GGUF files only"):
        side_by_side.refuse_missing([replace(present, name="picky", needs_gguf=True)], files)


def test_callers_thread_settings_do_not_reach_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.setenv("KMP_BLOCKTIME", "1")
    monkeypatch.setenv("UNRELATED", "kept")
    entry = EngineEntry("x", "m", Path(sys.executable))
    environment = entry.environment(3)
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["UNRELATED"] == "kept"
    assert not {"OMP_WAIT_POLICY", "KMP_BLOCKTIME"} & set(environment)


def test_a_batch_is_timed_without_its_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that an engine moves: 3 s for the first token, 0.5 s for each further one, 100 s to warm up."""
    now = [0.0]

    class Clocked:
        calls = 0

        def generate(self, prompts: list[list[int]], new_tokens: int) -> Any:
            now[0] += 100.0 if self.calls == 0 else 0.0
            self.calls += 1
            now[0] += 3.0
            times = [now[0]]
            for _ in range(new_tokens - 1):
                now[0] += 0.5
                times.append(now[0])
            return Completions([list(range(new_tokens)) for _ in prompts], times)

    monkeypatch.setattr(worker.time, "perf_counter", lambda: now[0])
    batch = worker.measure_batch(Clocked(), [[1, 2], [3, 4, 5]], 5)
    assert (batch.batch_size, batch.prompt_tokens, batch.output_tokens) == (2, 5, 10)
    assert (batch.first_token_s, batch.all_tokens_s) == (3.0, 5.0)
    assert batch.token_gaps_s == [0.5] * 4
    assert worker.measure_long_prompt(Clocked(), [1] * 9) == 3.0
    rates = rates_of([batch])
    assert (rates.prompt, rates.output, rates.decoded) == (5 / 3, 10 / 5, 8 / 2)


def test_a_batch_larger_than_the_prompts_begins_again() -> None:
    task = Task("m", {}, "f", None, [[1], [2], [3]], [], [5], 5, 1, 33, 64, 10, 0.0)
    assert worker.prompts_of(task, 5) == [[1], [2], [3], [1], [2]]
    assert worker.prompts_of(task, 2) == [[1], [2]]


def test_medians_over_rounds() -> None:
    def report(seconds: float, gaps: list[float]) -> Any:
        one = BatchReport(1, 10, 5, 1.0, 1.0 + seconds, gaps, [[1] * 5])
        two = BatchReport(2, 20, 10, 1.0, 1.0 + 2 * seconds, [99.0], [[1] * 5] * 2)
        return Report({"v": "1"}, seconds, int(seconds), 10 * int(seconds), seconds / 2, [one, two])

    summary = summarise([report(1, [0.1, 0.2]), report(4, [0.3, 0.4]), report(2, [0.5])])
    assert (summary.startup_s, summary.peak_memory_at_ready, summary.peak_memory) == (2, 2, 20)
    assert summary.long_prompt_s == 1
    assert (summary.gap_median_s, summary.gap_p99_s) == (0.3, 0.5)
    assert summary.rates[1] == Rates(prompt=10, output=5 / 3, decoded=2)
    assert summary.rates[2] == Rates(prompt=20, output=2, decoded=2)


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (99, 99), (100, 99), (101, 100), (200, 198)])
def test_percentile_is_the_nearest_rank(count: int, expected: int) -> None:
    assert percentile(range(1, count + 1), 99) == expected


def test_texts_part_where_the_first_token_differs() -> None:
    def batch(rows: list[list[int]]) -> Any:
        return BatchReport(len(rows), 1, 1, 1.0, 1.0, [], rows)

    agreement = compare_batch("x", batch([[1, 2, 3], [1, 2, 4], [5, 2, 4]]), batch([[1, 2, 3]] * 3))
    assert (agreement.equal_texts, agreement.first_differences) == (1, {1: 2, 2: 0})


def test_cache_for_a_batch_is_in_whole_blocks_with_one_to_spare() -> None:
    task = Task("m", {}, "f", None, [], [], [1, 4], 5, 1, 33, 64, 10, 0.0)
    assert task.cache_blocks(16) == 4 * 3 + 1
    assert task.cache_bytes(16, 4) == 13 * 16 * 10 * 4
    assert replace(task, batch_sizes=[1], max_model_len=640).cache_blocks(16) == 41
    assert replace(task, token_floats=None).cache_bytes(16, 4) is None


@pytest.mark.parametrize(
    ("more", "floats"),
    [({"num_key_value_heads": 2}, 2 * 3 * 2 * 8), ({}, 2 * 3 * 4 * 8), ({"head_dim": 16}, 2 * 3 * 4 * 16)],
)
def test_a_tokens_share_of_the_cache_comes_from_the_config(tmp_path: Path, more: dict[str, int], floats: int) -> None:
    config = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 32} | more
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelFiles(tmp_path, None).token_floats() == floats
    (tmp_path / "config.json").write_text("{}")
    assert ModelFiles(tmp_path, None).token_floats() is None


def test_ratio_is_ours_over_theirs() -> None:
    figure = Figure("batch 1", "tokens/s", True, {"compiled_engine": 300.0, "other": 200.0, "none": None})
    cells = list(comparison_table("t", [figure]).columns[1].cells)
    assert cells == ["300.0", "200.0", "1.50", "-", "-"]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_peak_memory_counts_the_processes_that_an_engine_starts() -> None:
    before = memory.peak_memory()
    # A child that holds little and starts another that holds much.
    large = "x = b'1' * (100 << 20); print('ready', flush=True); input()"
    small = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {large!r}])"
    with subprocess.Popen([sys.executable, "-c", small], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        during = memory.peak_memory()
        child.stdin.write(b"\n")
        child.stdin.close()
    assert during - before > 100 << 20
    assert memory.peak_memory() - before < 100 << 20


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="reads /proc")
def test_what_this_process_and_its_children_use_is_not_counted_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    all_busy, own = iter([10.0, 16.0]), iter([1.0, 4.0])
    monkeypatch.setattr(busy, "_busy_seconds", lambda: next(all_busy))
    monkeypatch.setattr(busy, "_own_seconds", lambda: next(own))
    monkeypatch.setattr(busy.time, "monotonic", iter([0.0, 5.0]).__next__)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert busy.BusyClock.start().others_share() == 0.3
