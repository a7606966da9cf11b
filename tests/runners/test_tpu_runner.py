"""The TPU runner without XLA: its graphs, which take caches by value, compiled for the CPU by torch's own compilers."""

from __future__ import annotations

import gc
import importlib.util
import logging
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tpu_checks
from compiled_engine.compile.ledger import Ledger
from compiled_engine.config import EngineConfig
from compiled_engine.context import StaticForwardContext
from compiled_engine.engine.core import Engine
from compiled_engine.errors import BindError, ConfigError, ContextStateError, OutOfMemoryError
from compiled_engine.models import find_model
from compiled_engine.ops.attention import AttentionSpec
from compiled_engine.ops.by_value import ByValueLayer, GatherAttention
from compiled_engine.runners.base import CacheGroupLimits
from compiled_engine.runners.caches import register_attention_layers
from compiled_engine.runners.cpu import CpuRunner
from compiled_engine.runners.platforms import find_platform
from compiled_engine.runners.tpu import TpuRunner
from graph_runners import eager_runner
from oracle import TINY_TOLERANCE, TransformersOracle, check_greedy
from tiny_models import write_tiny_model
from tpu_runners import SMALLEST, InductorPlatform, new_runner, serve, tokens_of, write_model

QUICK = "aot_eager"
"""What Inductor begins with: Dynamo's graph with its updates in place put apart, run operation by operation."""

ARCHITECTURES = ("llama", "gemma3", "qwen3", "gpt2", "gemma2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = write_model(tmp_path_factory.mktemp(architecture), architecture)
        return made[architecture]

    return make


@pytest.fixture(scope="module")
def runner(folders: Callable[[str], Path], expected: CpuRunner) -> Iterator[TpuRunner]:
    """One that tests leave as it was. Made after the CPU's runner, which sets torch's number of threads: Dynamo would
    compile everything anew for another one."""
    runner = new_runner(folders("llama"), InductorPlatform(QUICK))
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def expected(folders: Callable[[str], Path]) -> Iterator[CpuRunner]:
    """The CPU's own runner of the same model."""
    runner = eager_runner(folders("llama"))
    yield runner
    runner.close()


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=[] if name == "gemma3" else pytest.mark.slow) for name in ARCHITECTURES],
)
def test_texts_are_those_of_transformers(architecture: str, folders: Callable[[str], Path]) -> None:
    folder = folders(architecture)
    oracle = TransformersOracle(folder)
    runner = new_runner(folder, InductorPlatform(QUICK))
    tpu_checks.check_list_of_caches(runner)
    tpu_checks.check_texts(runner, oracle)
    tpu_checks.check_cached_prefixes(runner, oracle)
    tpu_checks.check_blocks_out_of_range_are_refused(runner)
    runner.close()


@pytest.mark.slow
def test_layers_that_read_the_cache_of_another(folders: Callable[[str], Path]) -> None:
    folder = folders("gemma3n")
    runner = new_runner(folder, InductorPlatform(QUICK))
    assert len({id(cache) for cache in runner.kv_caches}) < len(runner.kv_caches)
    oracle, prompts = TransformersOracle(folder), tpu_checks.make_prompts()
    expected = [oracle.greedy(prompt, tpu_checks.NEW_TOKENS) for prompt in prompts]
    found = tokens_of(serve(Engine(runner), prompts, tpu_checks.GREEDY))
    check_greedy(oracle, prompts, found, expected, TINY_TOLERANCE)
    runner.close()


@pytest.mark.slow
def test_inductor_compiles_it_and_writes_the_same(folders: Callable[[str], Path], expected: CpuRunner) -> None:
    runner = new_runner(folders("llama"), InductorPlatform(), **SMALLEST)
    prompts = tpu_checks.make_prompts((1, 40, 7, 12))
    texts = tokens_of(serve(Engine(runner), prompts, tpu_checks.GREEDY))
    assert texts == tokens_of(serve(Engine(expected), prompts, tpu_checks.GREEDY))
    tpu_checks.check_other_caches_are_used(runner)
    tpu_checks.check_caches_stay_in_place(runner)
    tpu_checks.check_workloads(runner)
    runner.close()


def test_nothing_reads_padding(runner: TpuRunner, expected: CpuRunner) -> None:
    tpu_checks.check_nothing_reads_padding(runner, expected)


def test_sampled_tokens_are_those_of_the_cpu_runner(runner: TpuRunner, expected: CpuRunner) -> None:
    tpu_checks.check_sampling(runner, expected)


def test_no_workload_compiles_after_warm_up(runner: TpuRunner) -> None:
    tpu_checks.check_workloads(runner)


def test_a_size_that_the_warm_up_left_out(runner: TpuRunner, caplog: pytest.LogCaptureFixture) -> None:
    tpu_checks.check_an_uncovered_size_raises(runner)
    tpu_checks.check_an_uncovered_size_warns(runner, caplog)


def test_caches_stay_in_place(runner: TpuRunner) -> None:
    tpu_checks.check_caches_stay_in_place(runner)


def test_rebinding(runner: TpuRunner, expected: CpuRunner) -> None:
    tpu_checks.check_other_caches_are_used(runner)
    tpu_checks.check_a_text_goes_on_in_other_caches(runner, expected)
    tpu_checks.check_more_blocks_cost_a_graph_for_each_body(runner)


def test_the_profile_run_has_no_caches_and_lays_out_no_attention(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until binding the list is empty, and layers that are asked for a cache would refuse."""
    events: list[str] = []
    host_inputs, profile, bind = GatherAttention.host_inputs, TpuRunner._profile, TpuRunner._bind_new_caches

    def noting_profile(runner: TpuRunner, *args: Any) -> int:
        assert runner.kv_caches == []
        assert not any(layer.is_bound for layer in runner.static_context.values())
        num_bytes = profile(runner, *args)
        events.append("profile")
        return num_bytes

    def noting_bind(runner: TpuRunner, *args: Any) -> None:
        assert runner.kv_caches == []
        bind(runner, *args)
        events.append("bind")
        with pytest.raises(ContextStateError, match="the profile run comes before"):
            profile(runner, [])

    def noting_inputs(attention: GatherAttention, *args: Any) -> Any:
        events.append("inputs")
        return host_inputs(attention, *args)

    monkeypatch.setattr(TpuRunner, "_profile", noting_profile)
    monkeypatch.setattr(TpuRunner, "_bind_new_caches", noting_bind)
    monkeypatch.setattr(GatherAttention, "host_inputs", noting_inputs)
    ledger = Ledger()
    with caplog.at_level(logging.INFO):
        runner = new_runner(folders("llama"), InductorPlatform("eager"), ledger, **SMALLEST)
    assert "device tpu: Inductor on the CPU" in caplog.messages
    assert events == ["profile", "bind", "inputs"]
    tpu_checks.check_list_of_caches(runner)
    phases = {phase["name"]: phase for phase in ledger.to_json()["phases"]}
    assert phases["compile buckets"]["note"] == "as Inductor does it"
    assert {"body, 8 tokens", "head and sampling, 2 rows"} <= phases.keys()
    # K and V twice and the scores twice, in float32, for 8 tokens that see 96 places of 2 KV heads of 16 and 4 heads.
    assert phases["profile"]["num_bytes"] == 8 * 96 * 2 * (2 * 2 * 16 * 4 + 4 * 4)
    runner.close()


FAULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "blocks of another size": lambda cache: cache[:, :1],
    "another type": lambda cache: cache.half(),
    "no tensor": lambda cache: None,
    "not contiguous": lambda cache: cache.transpose(0, 1).contiguous().transpose(0, 1),
    "another device": lambda cache: cache.to("meta"),
    "fewer blocks": lambda cache: cache[1:],
}


@given(
    indices=st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True),
    window=st.sampled_from([None, 3]),
    faults=st.dictionaries(st.integers(0, 5), st.sampled_from(sorted(FAULTS)), max_size=2),
)
def test_binding_fills_the_list_or_leaves_it_empty(
    indices: list[int], window: int | None, faults: dict[int, str]
) -> None:
    """Whatever is wrong with whichever caches: a list that is partly filled would pass for bound."""
    context = StaticForwardContext()
    specs = [
        AttentionSpec(f"layers.{index}.attn", 2, 2, 8, 0.3, window if index % 2 else None) for index in sorted(indices)
    ]
    register_attention_layers(context, [specs[0], *reversed(specs[1:])], 4, torch.float32, ByValueLayer)
    runner = object.__new__(TpuRunner)
    runner.static_context, runner.kv_caches, runner.platform = context, [], FaultyPlatform(faults)
    limits = [CacheGroupLimits(5, group.sliding_window) for group in context.groups]
    planted = [kind for place, kind in faults.items() if place < len(indices)]
    # Fewer blocks are a fault beside another number of the same group, and a whole group of fewer is none.
    if not planted:
        runner._bind_new_caches(limits)
        assert [id(cache) for cache in runner.kv_caches] == [id(context[spec.layer_name].kv_cache) for spec in specs]
        return
    try:
        runner._bind_new_caches(limits)
    except BindError:
        assert runner.kv_caches == []
        assert not any(layer.is_bound for layer in context.values())
    else:
        assert set(planted) == {"fewer blocks"}
        assert len(runner.kv_caches) == len(indices)


class FaultyPlatform(InductorPlatform):
    """Some of its copies are damaged: those of these numbers."""

    def __init__(self, faults: dict[int, str]) -> None:
        super().__init__()
        self._faults = faults
        self._copies = 0

    def to_device(self, tensors: Any) -> list[Any]:
        fault = FAULTS.get(self._faults.get(self._copies, ""), torch.clone)
        self._copies += 1
        (tensor,) = tensors
        return [fault(tensor)]


def test_a_closed_runner_says_so_and_keeps_nothing(folders: Callable[[str], Path]) -> None:
    runner = new_runner(folders("llama"), InductorPlatform("eager"), **SMALLEST)
    tpu_checks.check_closing(runner)


def test_attention_that_fits_no_memory_is_refused(folders: Callable[[str], Path]) -> None:
    platform = InductorPlatform("eager")
    platform.free_memory = lambda fraction: 1000
    with pytest.raises(
        OutOfMemoryError, match="24 tokens over 96 places .*lower max_num_batched_tokens or max_model_len"
    ):
        new_runner(folders("llama"), platform)


def test_a_start_that_fails_keeps_no_cache(folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[weakref.ref[torch.Tensor]] = []

    def fail(runner: TpuRunner, ledger: Ledger) -> None:
        caches.extend(weakref.ref(cache) for cache in runner.kv_caches)
        raise RuntimeError("planted")

    monkeypatch.setattr(TpuRunner, "_warm_up", fail)
    with pytest.raises(RuntimeError, match="planted"):
        new_runner(folders("llama"), InductorPlatform("eager"), **SMALLEST)
    gc.collect()
    assert caches
    assert [cache() for cache in caches] == [None] * len(caches)


@pytest.mark.slow
def test_there_may_be_more_sizes_than_dynamo_gives_one_function(folders: Callable[[str], Path]) -> None:
    sizes: dict[str, Any] = {"max_num_batched_tokens": 12, "max_num_seqs": 10}
    rows = tuple(range(1, 10))
    runner = new_runner(folders("llama"), InductorPlatform("eager"), **sizes, request_buckets=rows)
    assert runner.request_buckets.sizes == (*rows, 10)
    runner.close()


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is not None, reason="torch_xla is installed")
def test_without_torch_xla_the_error_says_how_to_install_it(folders: Callable[[str], Path]) -> None:
    with pytest.raises(
        ConfigError, match=r"neither torch_xla nor torch_tpu is installed.*pip install -c constraints/xla"
    ):
        find_platform()
    with pytest.raises(ConfigError, match="neither torch_xla nor torch_tpu"):
        TpuRunner(EngineConfig(device="tpu"), find_model(str(folders("llama"))), Ledger())


@pytest.mark.parametrize(("architecture", "tied"), [("llama", False), ("llama_tied", True)])
def test_tied_weights_are_one_tensor_on_the_device(architecture: str, tied: bool, tmp_path: Path) -> None:
    """And every tensor is copied once."""
    tpu_checks.check_loading(write_tiny_model(tmp_path, architecture), InductorPlatform(), tied)
