"""The recorder: what it keeps, what it writes and when, and what it never does."""

from __future__ import annotations

import gc
import json
import logging
import threading
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from seal_tools import tapped_functions, torch_left_as_found

from compiled_engine.compile import recorder as recorder_module
from compiled_engine.compile.graphs.backend import GraphPart, GraphRecord
from compiled_engine.compile.graphs.bindings import Role, bindings_of
from compiled_engine.compile.graphs.keys import GraphKey, GraphKind
from compiled_engine.compile.ledger import Ledger
from compiled_engine.compile.recorder import _CompileWatch, make_header, recorder_for
from compiled_engine.compile.records import captured_graph_records
from compiled_engine.compile.taps import TAP_POINTS, Compilation
from compiled_engine.config import EngineConfig
from compiled_engine.errors import ConfigError
from recordings import RUNNER, lines_of, make_step, new_recorder, write_recording


def kinds(file: Path) -> list[str]:
    return [line["kind"] for line in lines_of(file)]


def test_a_recording_has_its_lines_in_order(tmp_path: Path) -> None:
    file = write_recording(tmp_path / "r.jsonl")
    assert kinds(file) == [
        *("header", "phase", "cache", "cache", "weight", "weight", "graph", "keys", "memory"),
        *("step", "step", "step", "end"),
    ]
    assert lines_of(file)[-1] == {"kind": "end", "num_steps": 3}


def test_lines_have_the_fields_of_their_records(tmp_path: Path) -> None:
    lines = lines_of(write_recording(tmp_path / "r.jsonl"))
    step = next(line for line in lines if line["kind"] == "step")
    assert step.pop("kind") == "step"
    assert step.pop("requests") == [["0", 0, 2, False], ["é0", 0, 1, True]]
    assert step == {name: value for name, value in asdict(make_step(0)).items() if name != "requests"}
    graph = next(line for line in lines if line["kind"] == "graph")
    assert graph["bindings"][0]["stride"] == [4, 1]
    assert next(line for line in lines if line["kind"] == "keys")["keys"] == [asdict(RUNNER.keys[0])]


def test_memory_keeps_the_last_steps_and_save_writes_them(tmp_path: Path) -> None:
    recorder = new_recorder(capacity=4)
    recorder.start(RUNNER)
    for index in range(11):
        recorder.add_step(make_step(index))
    assert [step.index for step in recorder.steps] == [7, 8, 9, 10]
    assert recorder.num_steps == 11
    recorder.save(tmp_path / "last.jsonl")
    recorder.close()
    lines = lines_of(tmp_path / "last.jsonl")
    assert [line["index"] for line in lines if line["kind"] == "step"] == [7, 8, 9, 10]
    assert lines[-1] == {"kind": "end", "num_steps": 4}
    assert list(tmp_path.iterdir()) == [tmp_path / "last.jsonl"]


def test_the_file_has_every_step_although_memory_has_not(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path / "r.jsonl", capacity=2)
    recorder.start(RUNNER)
    for index in range(5):
        recorder.add_step(make_step(index))
    recorder.close()
    assert len(recorder.steps) == 2
    assert [line["index"] for line in lines_of(tmp_path / "r.jsonl") if line["kind"] == "step"] == list(range(5))


def test_steps_wait_for_a_second_and_are_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "r.jsonl"
    now = [100.0]
    monkeypatch.setattr(recorder_module.time, "perf_counter", lambda: now[0])
    recorder = new_recorder(file)
    recorder.start(RUNNER)
    begin = len(kinds(file))
    recorder.add_step(make_step(0))
    now[0] += 0.9
    recorder.add_step(make_step(1))
    assert len(kinds(file)) == begin
    now[0] += 0.2
    recorder.add_step(make_step(2))
    assert kinds(file)[begin:] == ["step"] * 3
    recorder.add_step(make_step(3))
    recorder.flush()
    assert kinds(file)[begin:] == ["step"] * 4
    recorder.close()


def test_phases_that_end_later_are_written_once(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.add("weights", 1.0, start=0.0)
    recorder = recorder_for(EngineConfig(record=str(tmp_path / "r.jsonl")), ledger)
    assert recorder is not None
    recorder.start(RUNNER)
    ledger.add("first token", 2.0, start=3.0, note="late")
    recorder.flush()
    recorder.flush()
    recorder.close()
    phases = [line for line in lines_of(tmp_path / "r.jsonl") if line["kind"] == "phase"]
    assert [(phase["name"], phase["start"], phase["note"]) for phase in phases] == [
        ("weights", 0.0, None),
        ("first token", 3.0, "late"),
    ]


def test_a_start_that_fails_is_recorded(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path / "r.jsonl")
    recorder._add_compile(Compilation("Dynamo traced f"), 0.0, 1.0)
    recorder.close()
    recorder.close()
    lines = lines_of(tmp_path / "r.jsonl")
    assert [line["kind"] for line in lines] == ["header", "phase", "compile", "end"]
    assert lines[0]["model"] is None
    assert lines[2]["after_warmup"] is False


def test_compiles_after_the_start_are_told_apart(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path / "r.jsonl")
    recorder._add_compile(Compilation("before"), 0.0, 1.0)
    recorder.start(RUNNER)
    recorder._add_compile(Compilation("after", "a guard failed", "x float32[2]"), 0.0, 2.0)
    recorder.close()
    found = [line for line in lines_of(tmp_path / "r.jsonl") if line["kind"] == "compile"]
    assert [(line["what"], line["after_warmup"]) for line in found] == [("before", False), ("after", True)]
    assert (found[1]["reason"], found[1]["inputs"], found[1]["seconds"]) == ("a guard failed", "x float32[2]", 2.0)


def test_a_compile_of_torch_is_heard_once_with_its_time() -> None:
    recorder = new_recorder()
    begin = recorder._ledger.now

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    torch.compile(doubled, backend="eager")(torch.ones(3))
    recorder.close()
    torch.compile(lambda x: x * 3, backend="eager")(torch.ones(3))
    (found,) = recorder.compiles
    assert "doubled" in found.what
    assert found.inputs is not None
    assert "float32[3]" in found.inputs
    assert begin <= found.start
    assert 0 < found.seconds < recorder._ledger.now - begin


def test_a_forgotten_recorder_leaves_torch_as_it_was() -> None:
    with torch_left_as_found():
        before = tapped_functions()
        recorder = recorder_for(EngineConfig(record="memory"), Ledger())
        assert tapped_functions() != before
        del recorder
        gc.collect()


def test_only_the_outermost_compile_of_a_thread_counts() -> None:
    found: list[str] = []
    watch = _CompileWatch(lambda compilation, begin, seconds: found.append(compilation.what))
    inner_began = threading.Event()

    def other_thread() -> None:
        watch.enter(lambda: Compilation("other"))
        inner_began.set()
        watch.leave()

    watch.enter(lambda: Compilation("outer"))
    watch.enter(lambda: Compilation("inner"))
    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert inner_began.is_set()
    watch.leave()
    assert found == ["other"]
    watch.leave()
    assert found == ["other", "outer"]


def test_a_closed_recorder_leaves_torch_as_it_was() -> None:
    from torch._dynamo import callback

    point = TAP_POINTS[0]
    assert (point.module, point.owner) == (callback.__name__, "callback_handler")
    before = vars(callback.callback_handler).get(point.attribute)
    recorder = new_recorder()
    assert vars(callback.callback_handler).get(point.attribute) is not before
    recorder.close()
    assert vars(callback.callback_handler).get(point.attribute) is before


def test_the_header_names_no_folder() -> None:
    config = EngineConfig(
        model="/home/someone/secret/SmolLM2", graphs="/srv/graphs/v1", record="/tmp/x/r.jsonl", graph_sizes=(1, 2)
    )
    header = make_header(config, RUNNER.model)
    assert (header.config["model"], header.config["graphs"], header.config["record"]) == ("SmolLM2", "v1", "r.jsonl")
    text = json.dumps(asdict(header))
    assert not any(word in text for word in ("someone", "secret", "srv", "/tmp"))
    assert header.config["graph_sizes"] == (1, 2)
    assert header.versions["torch"] is not None
    assert header.versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert header.created.endswith("Z")


def test_every_setting_that_names_a_place_is_cut() -> None:
    """A setting that is added later and takes free text must be looked at."""
    texts = {name for name, value in vars(EngineConfig()).items() if value is None or isinstance(value, str)}
    harmless = {
        *("device", "dtype", "quantization", "graph_mode", "piece_compiler", "on_compile", "kv_cache_memory"),
        *("max_model_len", "graph_sizes", "max_graph_size", "token_buckets", "request_buckets", "num_threads"),
    }
    assert texts - harmless == set(recorder_module._PATHS)


def test_a_file_that_cannot_be_made_is_told_at_once(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "r.jsonl"):
        with pytest.raises(ConfigError, match="cannot be written .*: choose another file"):
            recorder_for(EngineConfig(record=str(path)), Ledger())
        with pytest.raises(ConfigError, match="cannot be written"):
            new_recorder().save(path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_full_disk_ends_the_file_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    recorder = new_recorder(Path("/dev/full"))
    with caplog.at_level(logging.WARNING, "compiled_engine"):
        recorder.start(RUNNER)
        for index in range(3):
            recorder.add_step(make_step(index))
            recorder.flush()
        recorder.close()
    (message,) = [record.getMessage() for record in caplog.records]
    assert "/dev/full cannot be written (No space left on device)" in message
    assert len(recorder.steps) == 3
    with pytest.raises(ConfigError, match="No space left on device"):
        recorder.save("/dev/full")


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path / "r.jsonl")
    recorder.start(RUNNER)

    def compile_much() -> None:
        for number in range(50):
            recorder._add_compile(Compilation(f"piece {number}"), 0.0, 0.0)
            recorder.flush()

    threads = [threading.Thread(target=compile_much) for _ in range(4)]
    for thread in threads:
        thread.start()
    for index in range(200):
        recorder.add_step(make_step(index))
    for thread in threads:
        thread.join()
    recorder.close()
    found = kinds(tmp_path / "r.jsonl")
    assert (found.count("compile"), found.count("step"), found[-1]) == (200, 200, "end")


def test_nothing_asked_for_is_nothing_recorded(tmp_path: Path) -> None:
    assert recorder_for(EngineConfig(), Ledger()) is None
    recorder = recorder_for(EngineConfig(record="memory"), Ledger())
    assert recorder is not None
    recorder.close()
    assert not Path("memory").exists()


@pytest.mark.parametrize("value", ["", 3, True, Path("r.jsonl")])
def test_a_wrong_setting_is_told(value: object) -> None:
    with pytest.raises(ConfigError, match="record is .*: give a file as text, or 'memory'"):
        EngineConfig(record=value)  # type: ignore[arg-type]


def test_captured_graphs_as_records() -> None:
    key = GraphKey(GraphKind.PIECEWISE, 8, 0, None, 0, 0)
    tensor = torch.zeros(4, 6)[:, :3]
    graph = GraphRecord(GraphPart(key, 3), bindings_of({(Role.CACHE, "layers.0"): tensor}, 7), ("a", "b"), 99, 0.5)
    (record,) = captured_graph_records([graph])
    assert (record.key, record.part, record.launches, record.num_bytes) == ("piecewise 8 tokens", 3, ("a", "b"), 99)
    (binding,) = record.bindings
    assert asdict(binding) == {
        "role": "KV cache of layer",
        "name": "layers.0",
        "address": tensor.data_ptr(),
        "num_bytes": 48,
        "shape": (4, 3),
        "stride": (6, 1),
        "dtype": "float32",
        "epoch": 7,
    }
