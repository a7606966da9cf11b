"""The runner with captured graphs, emulated on the CPU: every mode writes what eager steps write, and faults show."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_engine.compile.graphs.bindings import Role
from compiled_engine.compile.graphs.keys import GraphKind
from compiled_engine.compile.ledger import Ledger
from compiled_engine.config import EngineConfig
from compiled_engine.context import bind_kv_cache, token_slots, unbind_kv_cache
from compiled_engine.engine.core import make_sampling_batch
from compiled_engine.engine.sampling_params import SamplingParams
from compiled_engine.errors import (
    CompiledAfterWarmup,
    ConfigError,
    ContextStateError,
    GraphOutputKept,
    RequestError,
    StaleGraph,
)
from compiled_engine.models import find_model
from compiled_engine.runners import create_runner
from compiled_engine.runners.batch import ScheduledBatch, ScheduledRequest
from compiled_engine.runners.cpu import CpuRunner
from compiled_engine.runners.gpu import GpuRunner
from graph_runners import MODES, SETTINGS, eager_runner, engine_of, make_prompts, new_runner, write
from tiny_models import write_tiny_model

ARCHITECTURES = ("llama", "gemma3", "gpt2")
"""Grouped heads; sliding windows beside full attention, in two cache groups; absolute positions and biases."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in made:
            # Token 0, that of padding rows, has an embedding.
            folder = tmp_path_factory.mktemp(architecture)
            made[architecture] = write_tiny_model(folder, architecture, pad_token_id=5)
        return made[architecture]

    return make


@pytest.fixture(scope="module")
def eager_texts(folders: Callable[[str], Path]) -> Callable[[str], dict[int, list[tuple[int, ...]]]]:
    """By architecture: what the CPU's own runner writes for 1 to 7 prompts at once."""
    made: dict[str, dict[int, list[tuple[int, ...]]]] = {}

    def make(architecture: str) -> dict[int, list[tuple[int, ...]]]:
        if architecture not in made:
            runner = eager_runner(folders(architecture))
            engine = engine_of(runner)
            made[architecture] = {count: write(engine, make_prompts(count, seed=count)) for count in range(1, 8)}
            runner.close()
        return made[architecture]

    return make


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[] if mode == "full_and_piecewise" else pytest.mark.slow) for mode in MODES]
)
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=[] if name == "llama" else pytest.mark.slow) for name in ARCHITECTURES],
)
def test_every_mode_writes_what_eager_steps_write(
    architecture: str,
    mode: str,
    folders: Callable[[str], Path],
    eager_texts: Callable[[str], dict[int, list[tuple[int, ...]]]],
) -> None:
    """All numbers of requests up and down, so that small batches follow big ones; prompts in chunks beside decodes;
    padding of NaN: its embedding, the reserved block and every block that nobody has written."""
    runner = new_runner(folders(architecture), mode)
    poison(runner)
    engine = engine_of(runner)
    expected = eager_texts(architecture)
    for count in (7, 1, 6, 2, 5, 3, 4, 7):
        assert write(engine, make_prompts(count, seed=count)) == expected[count], f"{count} requests"
    runner.close()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "full_and_piecewise"])
def test_preempted_requests_and_cached_prefixes_write_the_same(mode: str, folders: Callable[[str], Path]) -> None:
    folder = folders("llama")
    prompts = make_prompts(9, seed=3, longest=30)
    prompts += [[*prompt, 9, 8] for prompt in prompts]
    ample = eager_runner(folder)
    expected = write(engine_of(ample), prompts)
    ample.close()
    # Blocks of 4 tokens of 3 layers, 2 KV heads of 16, keys and values in float32: 24 of them are too few for all.
    runner = new_runner(folder, mode, kv_cache_memory=24 * 4 * 3 * 2 * 2 * 16 * 4)
    engine = engine_of(runner, enable_prefix_caching=True)
    assert write(engine, prompts) == expected
    assert write(engine, prompts) == expected
    runner.close()


def poison(runner: GpuRunner) -> None:
    """Make everything NaN that no real row may read."""
    for layer in runner.static_context.values():
        layer.kv_cache.fill_(float("nan"))
    embedding = next(weight for weight in runner.graphed.model.weights.values() if weight.shape == (128, 64))
    embedding[0] = float("nan")


@pytest.fixture
def runner(folders: Callable[[str], Path]) -> Iterator[GpuRunner]:
    """One that a test may do anything to."""
    runner = new_runner(folders("llama"))
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def sound_runner(folders: Callable[[str], Path]) -> Iterator[GpuRunner]:
    """One on which tests run steps and change nothing else."""
    runner = new_runner(folders("llama"))
    for layer in runner.static_context.values():
        left = token_slots(layer.kv_cache)[: SETTINGS["block_size"]]
        assert not left.any(), "the warm-up leaves nothing in the reserved block"
    yield runner
    runner.close()


def test_steps_use_the_graphs_that_were_captured(sound_runner: GpuRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is captured is what the dispatcher can ask for."""
    asked = []
    decide = sound_runner.decide
    monkeypatch.setattr(sound_runner, "decide", lambda inputs: asked.append(decide(inputs)) or asked[-1])
    write(engine_of(sound_runner), make_prompts(7))
    kinds = [decision.key.kind for decision in asked if decision.key is not None]
    assert GraphKind.FULL in kinds
    assert GraphKind.PIECEWISE in kinds
    reasons = [decision.reason for decision in asked if decision.key is None]
    assert all("above the largest captured token size, 18" in reason for reason in reasons)
    assert reasons, "a chunk of 24 tokens fits no graph"
    assert {record.part.key for record in sound_runner.graph_records} == set(sound_runner.dispatcher.keys())


def test_graphs_bind_what_they_use(sound_runner: GpuRunner) -> None:
    full = next(record for record in sound_runner.graph_records if record.part.key.kind is GraphKind.FULL)
    by_role = {role: {binding.name for binding in full.bindings if binding.role is role} for role in Role}
    assert by_role[Role.CACHE] == set(sound_runner.static_context)
    assert by_role[Role.WEIGHT] == set(sound_runner.graphed.model.weights)
    assert by_role[Role.INPUT] == {"input_ids", "positions", "logits_indices"}
    groups = range(len(sound_runner.static_context.groups))
    assert by_role[Role.METADATA] == {
        "query_start_loc",
        "seq_lens",
        *(f"{what} of group {group}" for what in ("block_table", "slot_mapping") for group in groups),
    }
    assert by_role[Role.OUTPUT] == {"logits"}
    pieces = next(record for record in sound_runner.graph_records if record.part.key.kind is GraphKind.PIECEWISE)
    assert not [name for name in pieces.launches if name.startswith("attention")]
    assert {binding.role for binding in pieces.bindings} == {Role.INPUT, Role.WEIGHT}


def rebind(runner: GpuRunner) -> str:
    name = list(runner.static_context)[1]
    caches = {name: layer.kv_cache for name, layer in runner.static_context.items()}
    unbind_kv_cache(runner.static_context)
    bind_kv_cache({**caches, name: caches[name].clone()}, runner.static_context)
    return rf"KV cache of layer '{name}' was at .*changed last by .*test_gpu_runner\.py:\d+ in rebind"


def move_output(runner: GpuRunner) -> str:
    runner.sampler._logits = runner.sampler._logits.clone()
    return "the output 'logits' was at"


def move_input(runner: GpuRunner) -> str:
    runner.buffers.positions.tensor = runner.buffers.positions.tensor.clone()
    return "the input 'positions' was at"


def replace_weight(runner: GpuRunner) -> str:
    model = runner.graphed.model
    place = model._places[f"weight:{next(iter(model.weights))}"]
    model._initial[place] = model._initial[place].clone()
    return f"the weight '{next(iter(model.weights))}' was at"


def stale_metadata(runner: GpuRunner) -> str:
    runner.buffers.block_tables[0].tensor = runner.buffers.block_tables[0].tensor.clone()
    return "the metadata 'block_table of group 0' was at"


@pytest.mark.parametrize("fault", [rebind, move_input, move_output, replace_weight, stale_metadata])
def test_a_planted_fault_is_named_at_the_first_replay(runner: GpuRunner, fault: Callable[[GpuRunner], str]) -> None:
    message = fault(runner)
    engine = engine_of(runner)
    with pytest.raises(StaleGraph, match=message):
        write(engine, [[5, 6, 7]])


@pytest.mark.slow
def test_rebinding_is_also_noticed_after_replays(runner: GpuRunner) -> None:
    engine = engine_of(runner)
    write(engine, [[5, 6, 7]])
    message = rebind(runner)
    with pytest.raises(StaleGraph, match=message):
        write(engine, [[5, 6, 7]])


@pytest.mark.slow
def test_binding_the_same_caches_again_is_no_fault(runner: GpuRunner) -> None:
    engine = engine_of(runner)
    first = write(engine, [[5, 6, 7]])
    caches = {name: layer.kv_cache for name, layer in runner.static_context.items()}
    unbind_kv_cache(runner.static_context)
    bind_kv_cache(caches, runner.static_context)
    assert write(engine, [[5, 6, 7]]) == first


def test_an_output_that_outlives_its_step_is_noticed(runner: GpuRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    outputs = runner.graphed.backend.outputs
    monkeypatch.setattr(runner.graphed.backend, "outputs", lambda part: kept.append(outputs(part)) or kept[-1])
    with pytest.raises(GraphOutputKept, match="output 0 of graph full decode 1 request"):
        write(engine_of(runner), [[5, 6, 7]])


@pytest.mark.slow
def test_sampled_tokens_do_not_depend_on_graphs(folders: Callable[[str], Path], runner: GpuRunner) -> None:
    eager = eager_runner(folders("llama"))
    params = SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=3, max_tokens=6, ignore_eos=True)
    assert write(engine_of(runner), make_prompts(5), params) == write(engine_of(eager), make_prompts(5), params)
    eager.close()


@pytest.mark.slow
def test_the_start_is_told_in_the_ledger(folders: Callable[[str], Path]) -> None:
    ledger = Ledger()
    seen: list[tuple[str, int, int]] = []
    config = EngineConfig(**{**SETTINGS, "graph_mode": "full_decode_only"})
    runner = GpuRunner(config, find_model(str(folders("llama"))), ledger, lambda *what: seen.append(what))
    phases = {phase["name"]: phase for phase in ledger.to_json()["phases"]}
    assert phases["capture graphs"]["note"] == "4 keys, 4 graphs"
    assert phases["capture graphs"]["num_bytes"] > 0
    assert phases["profile"]["num_bytes"] > 0
    assert ("capturing graphs", 4, 4) in seen
    runner.close()


@pytest.mark.slow
def test_a_step_may_hold_more_tokens_than_all_requests_together(folders: Callable[[str], Path]) -> None:
    small: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 9, "graph_sizes": (2,), "max_graph_size": None}
    runner = new_runner(folders("llama"), **small)
    assert len(write(engine_of(runner), [[5, 6], [7]])) == 2
    runner.close()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_limits_below_each_other_work(mode: str, folders: Callable[[str], Path]) -> None:
    """A largest graph below max_num_seqs, and fewer tokens in a step than in the warm-up."""
    small: dict[str, Any] = {"graph_sizes": (1, 2), "max_graph_size": 3, "max_num_batched_tokens": 4}
    runner = new_runner(folders("llama"), mode, **small)
    keys = runner.dispatcher.keys()
    assert {key.num_padded_tokens for key in keys} == {1, 2, 3}
    assert len(write(engine_of(runner), make_prompts(6))) == 6
    runner.close()


def test_after_the_start_nothing_may_be_captured(sound_runner: GpuRunner) -> None:
    keys = sound_runner.dispatcher.keys()
    full = [key for key in keys if key.kind is GraphKind.FULL]
    with pytest.raises(CompiledAfterWarmup, match="capture of graph full decode 7 requests"), torch.inference_mode():
        sound_runner._capture(full[:1])


@pytest.mark.slow
def test_a_start_that_fails_keeps_no_cache(folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[weakref.ref[torch.Tensor]] = []

    def fail(runner: GpuRunner) -> None:
        caches.extend(weakref.ref(layer.kv_cache) for layer in runner.static_context.values())
        raise RuntimeError("planted")

    monkeypatch.setattr(GpuRunner, "_warm_up", fail)
    with pytest.raises(RuntimeError, match="planted"):
        new_runner(folders("llama"))
    gc.collect()
    assert caches
    assert not [cache for cache in caches if cache() is not None]


@pytest.mark.slow
def test_create_runner_chooses_by_device_and_mode(folders: Callable[[str], Path]) -> None:
    files = find_model(str(folders("llama")))
    small: dict[str, Any] = {**SETTINGS, "graph_sizes": None, "max_graph_size": None}
    for mode, kind in ((None, CpuRunner), ("none", CpuRunner), ("full", GpuRunner)):
        runner = create_runner(EngineConfig(**{**small, "graph_mode": mode}), files, Ledger())
        assert type(runner) is kind
        runner.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_without_a_gpu_there_is_one_clear_error(device: str, folders: Callable[[str], Path]) -> None:
    config = EngineConfig(device=device, store=False)
    with pytest.raises(ConfigError, match=rf"device is '{device}', and there is no GPU.*use device='cpu'"):
        create_runner(config, find_model(str(folders("llama"))), Ledger())


@pytest.mark.slow
def test_close_frees_caches_and_graphs(folders: Callable[[str], Path]) -> None:
    runner = new_runner(folders("llama"))
    write(engine_of(runner), [[5, 6]])
    kept = [layer.kv_cache for layer in runner.static_context.values()]
    kept += [*runner.graphed.model.weights.values(), runner.sampler._logits, runner.buffers.positions.tensor]
    alive = [weakref.ref(tensor) for tensor in kept]
    del kept
    runner.close()
    runner.close()
    gc.collect()
    assert [tensor() for tensor in alive] == [None] * len(alive)
    with pytest.raises(ContextStateError, match="closed"):
        write(engine_of(runner), [[5, 6]])


def test_too_many_tokens_are_refused(sound_runner: GpuRunner) -> None:
    request = ScheduledRequest(
        "long", (5,) * 25, 0, (tuple(range(1, 8)),) * len(sound_runner.static_context.groups), False
    )
    with pytest.raises(RequestError, match="25 tokens, max_num_batched_tokens is 24"):
        sound_runner.execute(ScheduledBatch((request,), make_sampling_batch([])))
