"""Padding, memory, starts and differences of recordings that an engine made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compiled_engine import LLM
from compiled_engine.engine.sampling_params import SamplingParams
from compiled_engine_debug.cli import main
from graph_runners import SETTINGS
from tiny_models import write_tiny_model

Record = Callable[..., Path]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Makes a recording of a short run, with settings of its own."""
    folder = tmp_path_factory.mktemp("real_runs")
    write_tiny_model(folder / "model", "llama")

    def run(name: str, **settings: Any) -> Path:
        path = folder / name
        with LLM(str(folder / "model"), **{**SETTINGS, **settings}, record=str(path)) as llm:
            params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
            llm.generate(["abcdefg" * (index % 5 + 1) for index in range(12)], params)
        return path

    return run


@pytest.fixture(scope="module")
def graphs(record: Record) -> Path:
    return record("graphs.jsonl", graph_mode="full_and_piecewise")


def json_of(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def lines_of(path: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, path.read_text().splitlines()) if line["kind"] == kind]


def test_the_recorded_list_gives_the_recorded_padding(graphs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["padding", str(graphs), "--json"]) == 0
    (result,) = json_of(capsys)
    recorded, proposed = result["lists"][:2]
    steps = lines_of(graphs, "step")
    assert result["mismatches"] == []
    assert recorded["sizes"] == [1, 2, 4, 7, 16, 18]
    assert recorded["all"]["num_real"] == sum(step["num_tokens"] for step in steps)
    assert recorded["all"]["num_padded"] == sum(step["num_padded_tokens"] for step in steps)
    assert recorded["all"]["num_eager"] == sum(step["mode"] == "eager" for step in steps) > 0
    assert proposed["all"]["num_eager"] == 0


def test_memory_agrees_with_what_the_engine_counted(graphs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", str(graphs), "--json"]) == 0
    report = json_of(capsys)
    parts = {part["name"]: part for part in report["parts"]}
    assert [parts[name]["difference"] for name in ("weights", "KV cache", "graphs")] == [0, 0, 0]
    # Graphs use parts of the buffers.
    assert 0 < parts["workspaces"]["counted"] <= parts["workspaces"]["recorded"]


def test_a_start_that_is_made_again_is_the_same(
    graphs: Path, record: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    again = record("again.jsonl", graph_mode="full_and_piecewise")
    assert main(["diff", str(graphs), str(again)]) == 0
    assert capsys.readouterr().out == "no differences\n"
    assert main(["startup", str(graphs), str(again), "--json"]) == 0
    phases = {phase["name"]: phase for phase in json_of(capsys)["phases"]}
    assert phases["capture graphs"]["notes"][0] == phases["capture graphs"]["notes"][1]
    assert all(None not in phases[name]["seconds"] for name in ("weights", "KV cache", "capture graphs"))


def test_another_graph_mode_differs_in_graphs_alone(
    graphs: Path, record: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    other = record("full.jsonl", graph_mode="full_decode_only")
    assert main(["diff", str(graphs), str(other), "--json"]) == 1
    data = json_of(capsys)
    sections = {item["section"] for item in data["differences"]}
    assert sections <= {"settings", "declared graphs", "captured graphs", "caches"}
    assert data["key_components"] == []
    declared = {item["item"] for item in data["differences"] if item["section"] == "declared graphs"}
    assert declared == {key["key"] for key in lines_of(graphs, "keys")[0]["keys"] if key["kind"] == "piecewise"}


def test_a_bundle_tells_the_same_as_the_recording_in_it(
    graphs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "bundle.zip"
    assert main(["bundle", str(graphs), "-o", str(bundle)]) == 0
    capsys.readouterr()
    assert main(["diff", str(graphs), str(bundle)]) == 0
    assert capsys.readouterr().out == "no differences\n"
    for command, part in (("padding", None), ("memory", None), ("startup", "phases")):
        told = []
        for file in (graphs, bundle):
            assert main([command, str(file), "--json"]) == 0
            data = json_of(capsys)
            told.append(data if part is None else data[part])
        assert told[0] == told[1]
