"""Replays of bundles: a planted fault comes back where the engine still has it, and is gone where it has not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from made_recordings import MODEL, cache, step, write_recording
from planted_faults import cache_rebound, slot_mapping_shifted

from compiled_engine.compile.records import ScheduledShare
from compiled_engine.config import EngineConfig
from compiled_engine.errors import CompiledEngineError, ConfigError
from compiled_engine.llm import LLM
from compiled_engine.models import Checkpoint, find_model
from compiled_engine.runners import create_runner
from compiled_engine_debug.audit.session import AuditReport, DetectorReport
from compiled_engine_debug.bundle import Bundle, read_bundle, write_bundle
from compiled_engine_debug.cli import main
from compiled_engine_debug.findings import Finding
from compiled_engine_debug.recording import read_recording
from compiled_engine_debug.replay import Fate, Verdict, replay
from compiled_engine_debug.replay.outcome import judge
from compiled_engine_debug.replay.rebuild import LARGEST_CACHE, make_config, write_random_weights
from compiled_engine_debug.workload import standard_workload
from tiny_models import write_tiny_model

SETTINGS: dict[str, Any] = {
    "graph_mode": "full_and_piecewise",
    "piece_compiler": "eager",
    "block_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "graph_sizes": (2, 4, 8),
    "num_threads": 1,
    "dtype": "float32",
    "kv_cache_memory": "64KiB",
    "store": False,
}
OPTIONS = [
    *("--graph-mode", "full_and_piecewise", "--piece-compiler", "eager", "--block-size", "4", "--no-store"),
    *("--max-num-seqs", "4", "--max-num-batched-tokens", "16", "--max-model-len", "64", "--num-threads", "1"),
    *("--graph-sizes", "2,4,8", "--dtype", "float32", "--kv-cache-memory", "64KiB"),
]
LAYER = "model.layers.1.self_attn"
SHIFTED = Finding("metadata-mismatch", "it is shifted", step=9, request="7", node="slot_mapping of group 0")
REBOUND = Finding("address-changed", "it moved", layer=LAYER, node=LAYER)

Fault = Callable[[Any], AbstractContextManager[Any]]


@contextmanager
def engines_with(fault: Fault) -> Iterator[None]:
    """Runners that are made inside have ``fault`` until they are closed."""
    with pytest.MonkeyPatch.context() as patch:

        def create(*arguments: Any) -> Any:
            runner: Any = create_runner(*arguments)
            planted, close = ExitStack(), runner.close
            planted.callback(close)
            planted.enter_context(fault(runner))
            runner.close = planted.close
            return runner

        patch.setattr("compiled_engine.runners.create_runner", create)
        patch.setattr("compiled_engine_debug.audit.session.create_runner", create)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("replay") / "model")


@pytest.fixture(scope="module")
def sound_bundle(model: Path) -> Bundle:
    """Of a sound engine, whose cache is too small for all its requests; with findings that it never had."""
    file = model.parent / "sound.jsonl"
    with LLM(model=str(model), record=str(file), **SETTINGS) as llm:
        workload = standard_workload(llm.limits, num_requests=8, max_tokens=8)
        llm.generate(list(workload.prompts), list(workload.params), use_tqdm=False)
    config = json.loads((model / "config.json").read_text())
    write_bundle(model.parent / "sound.zip", read_recording(file), model_config=config, findings=[SHIFTED, REBOUND])
    return read_bundle(model.parent / "sound.zip")


@pytest.mark.slow
def test_a_sound_engine_runs_the_recorded_steps_by_the_recorded_graphs(sound_bundle: Bundle) -> None:
    report = replay(sound_bundle)

    assert len(sound_bundle.recording.steps) == report.num_recorded == report.num_replayed > 10
    assert report.other_keys == ()
    assert {"full", "piecewise", "eager"} <= set(sound_bundle.recording.steps.mode)
    assert [(verdict.fate, verdict.finding) for verdict in report.verdicts] == [
        (Fate.GONE, SHIFTED),
        (Fate.GONE, REBOUND),
    ]
    assert report.notes == ("weights are random",)
    json.dumps(report.to_json())


@pytest.mark.slow
def test_a_fault_reappears_and_of_another_nothing_is_known(sound_bundle: Bundle) -> None:
    with engines_with(partial(slot_mapping_shifted, step=3, row=0)):
        report = replay(sound_bundle)

    assert [verdict.fate for verdict in report.verdicts] == [Fate.REAPPEARS, Fate.UNKNOWN]
    seen = report.verdicts[0].seen
    assert seen is not None
    assert (seen.detector, seen.node, seen.step) == ("metadata-mismatch", "slot_mapping of group 0", 3)
    assert report.num_replayed == 3


@pytest.mark.slow
def test_from_a_crash_to_a_replay(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands in the order in which a reporter and a developer use them; the engine has a fault, and then not."""
    run, audit, bundle = (str(tmp_path / name) for name in ("run.jsonl", "audit.json", "bundle.zip"))
    with engines_with(partial(cache_rebound, layer=LAYER, step=3, quietly=False)):
        # The step after the one in which the cache moves fails, and is not in the recording.
        assert main(["record", "-o", run, *OPTIONS, str(model)]) == 1
        assert len(read_recording(run).steps) == 4
        capsys.readouterr()
        assert main(["audit", "--json", *OPTIONS, str(model)]) == 1
        Path(audit).write_text(capsys.readouterr().out)
        assert main(["bundle", run, "-o", bundle, "--model", str(model), "--findings", audit]) == 0
        capsys.readouterr()
        assert main(["replay", bundle]) == 1
    faulty = capsys.readouterr().out
    assert re.search(rf"^reappears: address-changed: .*{re.escape(LAYER)}", faulty, re.MULTILINE)
    assert "gone" not in faulty

    assert main(["replay", bundle]) == 0
    sound = capsys.readouterr().out
    assert "gone: address-changed" in sound
    assert "reappears" not in sound
    findings = read_bundle(bundle).findings
    assert findings is not None
    assert [finding.layer for finding in findings] == [LAYER]
    assert not re.search(r"/|0x", findings[0].message)


def audit_of(*findings: Finding, **skipped: str) -> AuditReport:
    names = ("address-changed", "metadata-mismatch")
    reports = tuple(DetectorReport(name, "", 1, 0, skipped.get(name.partition("-")[0])) for name in names)
    return AuditReport(reports, findings, 5)


def test_findings_are_the_same_where_their_kind_of_place_is() -> None:
    again = replace(SHIFTED, message="other words", step=1, request="2", key="full decode 2 requests")

    assert judge([SHIFTED], audit_of(again)) == (Verdict(Fate.REAPPEARS, SHIFTED, again),)
    for changed in (
        replace(SHIFTED, node="seq_lens"),
        replace(SHIFTED, layer="model.layers.0.self_attn"),
        replace(SHIFTED, request=None),
        replace(SHIFTED, slot=3),
        replace(SHIFTED, detector="address-changed"),
    ):
        unknown, new = judge([SHIFTED], audit_of(changed))
        assert (unknown.fate, unknown.reason) == (Fate.UNKNOWN, "the replay ended with what was found in step 4")
        assert new == Verdict(Fate.NEW, changed, changed)


def test_one_finding_does_not_stand_for_two() -> None:
    fates = [verdict.fate for verdict in judge([SHIFTED, SHIFTED], audit_of(SHIFTED))]
    assert fates == [Fate.REAPPEARS, Fate.UNKNOWN]


def test_what_could_not_be_looked_for_is_not_gone() -> None:
    strange = Finding("later-detector", "x")
    verdicts = judge([SHIFTED, REBOUND, strange], audit_of(address="no graph is captured"))

    assert [(verdict.fate, verdict.reason) for verdict in verdicts] == [
        (Fate.GONE, None),
        (Fate.UNKNOWN, "no graph is captured"),
        (Fate.UNKNOWN, "this version has no such detector"),
    ]


def bundle_of(tmp_path: Path, *records: Any, settings: dict[str, Any] | None = None, **parts: Any) -> Bundle:
    config = EngineConfig(**(settings or {}))
    file = write_recording(tmp_path / "run.jsonl", *records, config=config, model=parts.pop("model", MODEL))
    write_bundle(tmp_path / "b.zip", read_recording(file), **parts)
    return read_bundle(tmp_path / "b.zip")


def test_settings_are_the_recorded_ones(tmp_path: Path) -> None:
    recorded = {**SETTINGS, "store": True, "require_precompiled": True, "graphs": "/x/graphs", "record": "/x/r.jsonl"}
    bundle = bundle_of(tmp_path, cache("a", 4096, 32768), cache("b", 4096, 32768, shares_with="a"), settings=recorded)
    rebuilt = make_config(bundle, MODEL, tmp_path / "model", {"seed": 5})

    expected = {**SETTINGS, "store": True, "model": str(tmp_path / "model"), "kv_cache_memory": 32768, "seed": 5}
    assert rebuilt.config == EngineConfig(**expected)
    assert rebuilt.notes == ()


def test_a_large_cache_is_made_small_unless_asked_for(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, cache("a", 4096, 2 * LARGEST_CACHE))

    small = make_config(bundle, MODEL, tmp_path, {})
    assert small.config.kv_cache_memory == LARGEST_CACHE
    assert small.notes == (
        f"the KV cache has {LARGEST_CACHE} bytes, {2 * LARGEST_CACHE} were recorded (see --kv-cache-memory)",
    )
    assert make_config(bundle, MODEL, tmp_path, {"kv_cache_memory": "1GiB"}).config.kv_cache_memory == 1 << 30


def test_what_was_recorded_on_a_gpu_is_emulated_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = bundle_of(tmp_path, settings={"device": "cuda:1"})

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rebuilt = make_config(bundle, MODEL, tmp_path, {})
    assert (rebuilt.config.device, rebuilt.config.graph_mode) == ("cpu", "full_and_piecewise")
    assert rebuilt.notes == ("recorded on cuda:1, and there is no GPU here: graphs are emulated on the CPU",)
    assert make_config(bundle, MODEL, tmp_path, {"device": "cuda"}).config.device == "cuda"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert make_config(bundle, MODEL, tmp_path, {}).config.device == "cuda:1"


def test_what_was_recorded_on_a_tpu_runs_eagerly_without_torch_xla(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = bundle_of(tmp_path, settings={"device": "tpu"})
    for spec, device in ((None, "cpu"), (object(), "tpu")):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, spec=spec: spec)
        rebuilt = make_config(bundle, MODEL, tmp_path, {})
        assert rebuilt.config.device == device
        assert len(rebuilt.notes) == (device == "cpu")


def test_random_weights_follow_from_the_seed(model: Path, tmp_path: Path) -> None:
    weights = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_bytes((model / "config.json").read_bytes())
        write_random_weights(folder, replace(MODEL, dtype="bfloat16"), seed)
        with Checkpoint(find_model(str(folder))) as checkpoint:
            weights.append(checkpoint.read("model.layers.0.self_attn.q_proj.weight"))
            shapes = {name: info.shape for name, info in checkpoint.items()}
    with Checkpoint(find_model(str(model))) as checkpoint:
        assert shapes == {name: info.shape for name, info in checkpoint.items()}

    assert weights[0].dtype == torch.bfloat16
    assert weights[0].equal(weights[1])
    assert not weights[0].equal(weights[2])


def test_what_cannot_be_replayed_says_why(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    one = step(0, requests=(ScheduledShare("0", 0, 1, True),))
    huge = {**config, "hidden_size": 1 << 16, "intermediate_size": 1 << 20}
    cases: list[tuple[Bundle, type[CompiledEngineError], str]] = []
    for number, (records, parts, kind, says) in enumerate(
        [
            ([], {"model_config": config}, ConfigError, "no step was recorded"),
            ([one], {}, ConfigError, "has no model config, which a replay needs: make it with --model"),
            ([one], {"model_config": config, "model": None}, ConfigError, "did not start"),
            ([one], {"model_config": {**config, "vocab_size": 64}}, ConfigError, "64 tokens, its recording 128"),
            ([one], {"model_config": huge}, ConfigError, "memory are free: too few"),
            ([one], {"model_config": {"model_type": "evil"}}, CompiledEngineError, "does not know it"),
            ([one], {"model_config": config, "model": replace(MODEL, dtype="load")}, ConfigError, "dtype"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        cases.append((bundle_of(folder, *records, **parts), kind, says))
    for bundle, kind, says in cases:
        with pytest.raises(kind, match=says):
            replay(bundle)


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = bundle_of(tmp_path)

    with pytest.raises(SystemExit, match="2"):
        main(["replay", str(bundle.path), "--steps", "0"])
    assert "--steps: '0' is no whole number of at least 1" in capsys.readouterr().err
    assert main(["replay", str(bundle.path)]) == 2
    assert "no step was recorded" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "run.jsonl")]) == 2
    assert "no zip file" in capsys.readouterr().err
