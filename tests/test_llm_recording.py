"""``LLM(record=...)``: the same tokens, no compile more, and every step as it was."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tpu_runners
from compile_watch import watch_compiles
from compiled_engine import LLM, SamplingParams
from compiled_engine.compile.ledger import Ledger
from compiled_engine.compile.recorder import Recorder
from compiled_engine.config import EngineConfig
from compiled_engine.engine.core import Engine
from compiled_engine.errors import ModelError
from compiled_engine.models import find_model
from compiled_engine.runners.base import Runner
from compiled_engine.runners.gpu import GpuRunner
from compiled_engine.runners.tpu import TpuRunner
from compiled_engine_debug.recording import Recording, read_recording
from graph_runners import GREEDY, SETTINGS, eager_runner, make_prompts, new_runner, write
from recordings import lines_of
from tiny_models import VOCAB_SIZE, write_tiny_model

LARGE = "{} tokens are above the largest captured token size, 18"
MODES = ("none", "full_and_piecewise", "full")
REASONS = {
    None: "None",
    "none": "graphs are off (mode none)",
    "full": LARGE,
    "full_and_piecewise": LARGE,
}
PARAMS = [
    SamplingParams(temperature=0.8 * (index % 2), max_tokens=3 + index, ignore_eos=True, seed=index)
    for index in range(6)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("llama"), "llama", pad_token_id=5)


@pytest.fixture(scope="module", params=["eager runner", *MODES])
def runner(request: pytest.FixtureRequest, folder: Path) -> Iterator[Runner]:
    runner = eager_runner(folder) if request.param == "eager runner" else new_runner(folder, request.param)
    yield runner
    runner.close()


def answer(runner: Runner, recorder: Recorder | None) -> tuple[list[tuple[int, ...]], Engine]:
    """The tokens of six prompts at once and of one alone, and the engine that wrote them."""
    if recorder is not None:
        recorder.start(runner.describe())
    engine = Engine(runner, enable_prefix_caching=False, recorder=recorder)
    waves = [list(zip(make_prompts(6), PARAMS, strict=True)), [([5] * 10, GREEDY)]]
    outputs = {}
    ids = []
    for wave in waves:
        ids += [engine.add_request(prompt, params) for prompt, params in wave]
        while engine.has_unfinished():
            outputs.update((output.request_id, output) for output in engine.step())
    if recorder is not None:
        recorder.close()
    assert [outputs[request].error for request in ids] == [None] * len(ids)
    return [tuple(outputs[request].outputs[0].token_ids) for request in ids], engine


def test_tokens_are_those_without_recording(runner: Runner, tmp_path: Path) -> None:
    expected, without = answer(runner, None)
    assert without.recorder is None
    for file in (None, tmp_path / "r.jsonl"):
        recorder = Recorder(EngineConfig(), Ledger(), file)
        with watch_compiles() as log:
            tokens, engine = answer(runner, recorder)
        assert tokens == expected
        assert log.events == []
        assert recorder.num_steps == len(recorder.steps) > 5
        assert engine.num_computed_tokens == without.num_computed_tokens


def test_steps_add_up_to_what_the_engine_counts(runner: Runner, tmp_path: Path) -> None:
    recorder = Recorder(EngineConfig(), Ledger(), tmp_path / "r.jsonl")
    tokens, engine = answer(runner, recorder)
    steps = read_recording(tmp_path / "r.jsonl").steps
    assert list(steps) == list(recorder.steps)
    assert steps.index.tolist() == list(range(len(steps)))
    assert steps.num_tokens.sum() == steps.shares.num_scheduled_tokens.sum() == engine.num_computed_tokens
    assert steps.num_sampled.sum() == steps.shares.samples.sum() == engine.num_sampled_tokens == sum(map(len, tokens))
    for step in steps:
        assert step.num_tokens == sum(share.num_scheduled_tokens for share in step.requests)
        assert step.num_requests == len(step.requests)
        assert step.num_padded_tokens >= step.num_tokens
        assert step.seconds > 0
    # A step begins after the one before it has ended.
    assert (steps.start[1:] >= steps.start[:-1] + steps.seconds[:-1]).all()
    # A request's next share begins where its last one ended.
    computed: dict[str, int] = {}
    for share in (share for step in steps for share in step.requests):
        assert share.num_computed_tokens == computed.get(share.request_id, 0)
        computed[share.request_id] = share.num_computed_tokens + share.num_scheduled_tokens


def test_facts_are_those_of_the_graph_that_ran(runner: Runner, tmp_path: Path) -> None:
    recorder = Recorder(EngineConfig(), Ledger(), tmp_path / "r.jsonl")
    answer(runner, recorder)
    recording = read_recording(tmp_path / "r.jsonl")
    declared = {key.key: key for key in recording.keys}
    assert {graph.key for graph in recording.graphs} == set(declared)
    mode = runner.config.graph_mode if isinstance(runner, GpuRunner) else None
    expected = {"full_and_piecewise": {"eager", "piecewise", "full"}, "full": {"eager", "full"}}
    assert set(recording.steps.mode) == expected.get(str(mode), {"eager"})
    for step in recording.steps:
        assert step.epoch == runner.static_context.epoch
        if step.mode == "eager":
            assert (step.key, step.num_padded_tokens, step.num_padded_requests) == (
                *(None, step.num_tokens),
                step.num_requests,
            )
            assert str(step.reason) == REASONS[mode].format(step.num_tokens)
            continue
        assert step.reason is None
        key = declared[step.key]
        assert (key.kind, key.num_padded_tokens) == (step.mode, step.num_padded_tokens)
        padded = key.num_padded_requests if step.mode == "full" else step.num_requests
        assert step.num_padded_requests == padded
        assert mode == "full" or (step.mode == "full") is (step.num_tokens == step.num_requests)


@pytest.mark.parametrize("record", ["memory", "file"])
def test_a_start_compiles_no_more_for_being_recorded(folder: Path, record: str, tmp_path: Path) -> None:
    with watch_compiles() as without, LLM(str(folder), **SETTINGS) as llm:
        assert llm.recorder is None
    settings = {**SETTINGS, "record": record if record == "memory" else str(tmp_path / "r.jsonl")}
    with watch_compiles() as log, LLM(str(folder), **settings) as llm:
        (output,) = llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
        assert output.error is None
    assert llm.recorder is not None
    assert len(log.events) == len(without.events)
    # Every trace that torch itself tells of is in the recording.
    assert len(llm.recorder.compiles) == sum(event.startswith("dynamo") for event in log.events) > 0
    assert not any(compiled.after_warmup for compiled in llm.recorder.compiles)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_the_runner_tells_of_plan_caches_weights_and_memory(architecture: str, tmp_path: Path) -> None:
    runner = new_runner(write_tiny_model(tmp_path / "model", architecture), "full_and_piecewise")
    recorder = Recorder(runner.config, Ledger(), tmp_path / "r.jsonl")
    recorder.start(runner.describe())
    recorder.close()
    recording = read_recording(tmp_path / "r.jsonl")
    assert runner.graphed is not None
    model = runner.graphed.model
    assert recording.plan == model.plan
    assert recording.header.model is not None
    assert recording.header.model.architecture in ("LlamaForCausalLM", "Gemma3ForCausalLM")
    assert (recording.header.model.dtype, recording.header.model.vocab_size) == ("float32", VOCAB_SIZE)
    assert recording.header.model.num_layers == len(recording.caches) == len(runner.static_context)
    for cache in recording.caches:
        layer = runner.static_context[cache.layer]
        assert (cache.address, cache.shape) == (layer.kv_cache.data_ptr(), tuple(layer.kv_cache.shape))
        assert (cache.num_bytes, cache.group) == (layer.kv_cache.nbytes, layer.group)
    assert {weight.name: weight.address for weight in recording.weights} == {
        name: tensor.data_ptr() for name, tensor in model.weights.items()
    }
    bound = {(binding.role, binding.name) for graph in recording.graphs for binding in graph.bindings}
    assert ("KV cache of layer", recording.caches[0].layer) in bound
    memory = recording.memory
    assert memory is not None
    assert memory.kv_cache == sum(cache.num_bytes for cache in recording.caches)
    assert memory.weights == sum({weight.address: weight.num_bytes for weight in recording.weights}.values())
    assert memory.graphs == sum(record.num_bytes for record in runner.graph_records) > 0
    assert memory.workspaces > sum(group.nbytes for group in [runner.buffers.input_ids.tensor])
    assert memory.estimated_working is not None
    assert memory.resident is not None
    assert memory.resident > memory.weights + memory.kv_cache
    assert memory.device_allocated is None
    runner.close()


def test_prompts_and_tokens_stay_out(folder: Path, tmp_path: Path) -> None:
    """The same numbers of tokens make the same recording, whatever the tokens are."""

    def recorded(seed: int) -> list[dict[str, Any]]:
        file = tmp_path / f"{seed}.jsonl"
        prompts = [[seed + index] * length for index, length in enumerate((3, 30, 1))]
        with LLM(str(folder), **SETTINGS, record=str(file)) as llm:
            llm.generate(prompts, GREEDY, use_tqdm=False)
        steps = [line for line in lines_of(file) if line["kind"] == "step"]
        return [{name: value for name, value in step.items() if name not in ("start", "seconds")} for step in steps]

    assert recorded(seed=10) == recorded(seed=90)


def test_steps_are_on_disk_when_a_call_ends(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    with LLM(str(folder), **SETTINGS, record=str(file)) as llm:
        llm.generate(make_prompts(2), GREEDY, use_tqdm=False)
        assert llm.recorder is not None
        recording: Recording = read_recording(file)
        assert recording.truncated
        assert len(recording.steps) == llm.recorder.num_steps
        llm.generate(make_prompts(2), GREEDY, use_tqdm=False)
        assert len(read_recording(file).steps) == llm.recorder.num_steps > len(recording.steps)
    done = read_recording(file)
    assert not done.truncated
    assert done.phases[-1].name == "first token"


def test_a_start_that_fails_leaves_a_recording(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        LLM(str(tmp_path / "nowhere"), record=str(tmp_path / "r.jsonl"))
    recording = read_recording(tmp_path / "r.jsonl")
    assert (recording.header.model, len(recording.steps), recording.truncated) == (None, 0, False)
    assert recording.phases[-1].note == "failed"


def test_a_forgotten_llm_completes_its_file_and_goes(folder: Path, tmp_path: Path) -> None:
    llm = LLM(str(folder), **SETTINGS, record=str(tmp_path / "r.jsonl"))
    gone = weakref.ref(llm)
    del llm
    gc.collect()
    assert gone() is None
    assert not read_recording(tmp_path / "r.jsonl").truncated


@pytest.mark.slow
def test_the_file_is_complete_when_the_process_ends(folder: Path, tmp_path: Path) -> None:
    code = "import json, sys; from compiled_engine import LLM; kept = LLM(**json.loads(sys.argv[1]))"
    settings = {**SETTINGS, "model": str(folder), "record": str(tmp_path / "r.jsonl")}
    subprocess.run([sys.executable, "-c", code, json.dumps(settings)], check=True)
    assert not read_recording(tmp_path / "r.jsonl").truncated


def test_a_compile_in_a_step_is_recorded_as_late(folder: Path, tmp_path: Path) -> None:
    import torch

    runner = eager_runner(folder)
    recorder = Recorder(runner.config, Ledger(), tmp_path / "r.jsonl")
    recorder.start(runner.describe())
    engine = Engine(runner, recorder=recorder)
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    write(engine, make_prompts(1))
    recorder.close()
    (late,) = read_recording(tmp_path / "r.jsonl").compiles
    assert late.after_warmup
    engine.close()


def test_a_runner_without_facts_is_recorded_as_eager() -> None:
    from fake_runner import FakeRunner

    runner = FakeRunner()
    recorder = Recorder(EngineConfig(), Ledger())
    recorder.start(runner.describe())
    write(Engine(runner, recorder=recorder), [[5, 6, 7]])
    recorder.close()
    first = recorder.steps[0]
    assert (first.mode, first.key, first.num_tokens, first.num_padded_tokens) == ("eager", None, 3, 3)
    assert recorder.runner is not None
    assert recorder.runner.model.vocab_size == runner.limits.vocab_size


def test_buckets_are_recorded_with_their_rows(folder: Path) -> None:
    config = EngineConfig(**tpu_runners.SETTINGS)
    platform = tpu_runners.InductorPlatform("eager")
    runner = TpuRunner(config, find_model(str(folder)), Ledger(), platform=platform)
    recorder = Recorder(config, Ledger())
    recorder.start(runner.describe())
    write(Engine(runner, recorder=recorder), make_prompts(4))
    recorder.close()
    runner.close()
    assert recorder.runner is not None
    declared = {key.key: (key.num_padded_tokens, key.num_padded_requests, key.kind) for key in recorder.runner.keys}
    assert len(declared) == len(recorder.runner.keys) == 6
    for step in recorder.steps:
        assert declared[str(step.key)] == (step.num_padded_tokens, step.num_padded_requests, step.mode)
        assert step.num_padded_tokens >= step.num_tokens
        assert step.num_padded_requests >= step.num_sampled
    assert recorder.runner.plan is None
    assert recorder.runner.memory is not None
    assert recorder.runner.memory.weights > 0
