"""What must hold for a TPU runner on any platform: functions over a runner of ``tpu_runners``.

Each leaves the runner as it was, but for what is in its caches.
"""

from __future__ import annotations

import gc
import logging
import random
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from compile_watch import watch_compiles
from compiled_engine.compile.ledger import Ledger
from compiled_engine.context import CacheGeometry
from compiled_engine.engine.core import Engine, make_sampling_batch
from compiled_engine.engine.sampling_params import SamplingParams
from compiled_engine.errors import CompiledAfterWarmup, ContextStateError, RequestError
from compiled_engine.models import build_definition, find_model
from compiled_engine.runners.base import Runner
from compiled_engine.runners.batch import ScheduledBatch, ScheduledRequest
from compiled_engine.runners.buckets import Buckets
from compiled_engine.runners.loading import load_module
from compiled_engine.runners.platforms import XlaPlatform
from compiled_engine.runners.tpu import TpuRunner
from compiled_engine.runners.xla_sentinel import XlaSentinel
from oracle import TINY_TOLERANCE, TransformersOracle, check_greedy
from tiny_models import VOCAB_SIZE
from tpu_runners import BLOCK_SIZE, bind, bound_caches, contents, other_caches, poisoned_padding, serve, tokens_of

NEW_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
PROMPT_LENGTHS = (1, 70, 2, 16, 17, 33, 5, 64, 8, 40, 24, 25)
UNCOVERED_TOKENS, UNCOVERED_ROWS = 5, 3
SHORT_PROMPTS = [[9, 8, 7], [11, 12]]


def make_prompts(lengths: Sequence[int] = PROMPT_LENGTHS, seed: int = 7) -> list[list[int]]:
    """Prompts without token 0, that of padding."""
    generator = random.Random(seed)
    return [[generator.randrange(4, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def check_texts(runner: TpuRunner, oracle: TransformersOracle) -> None:
    """Chunks beside decodes in one step, prompts longer than a step, and a cache that is too small for all requests."""
    prompts = make_prompts()
    answers = serve(Engine(runner), prompts, GREEDY)
    assert max(map(len, prompts)) > 2 * runner.limits.max_num_batched_tokens
    assert sum(answer.num_preemptions for answer in answers) > 0, "the cache was meant to be too small"
    expected = [oracle.greedy(prompt, NEW_TOKENS) for prompt in prompts]
    check_greedy(oracle, prompts, tokens_of(answers), expected, TINY_TOLERANCE)


def check_cached_prefixes(runner: TpuRunner, oracle: TransformersOracle) -> None:
    """Prompts that begin like ones which were served before take their blocks."""
    firsts = make_prompts((20, 30), seed=3)
    prompts = [[*firsts[0], 9], [*firsts[1], 8, 7], firsts[0]]
    engine = Engine(runner, enable_prefix_caching=True)
    serve(engine, firsts, GREEDY)
    answers = serve(engine, prompts, GREEDY)
    assert [answer.num_cached_tokens for answer in answers] == [20, 28, 16]
    expected = [oracle.greedy(prompt, NEW_TOKENS) for prompt in prompts]
    check_greedy(oracle, prompts, tokens_of(answers), expected, TINY_TOLERANCE)


def check_nothing_reads_padding(runner: TpuRunner, expected: Runner) -> None:
    """NaN in block 0 and in every block that nobody wrote reaches no row; nor does what padding tokens compute."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=3)
    prompts = make_prompts((1, 3, 9, 26, 50))
    with poisoned_padding(runner), other_caches(runner, float("nan")) as caches:
        answers = serve(Engine(runner), prompts, params)
        read = next(iter(caches.values())).cpu()
    assert read[0, 0].isnan().all(), "padding tokens write NaN"
    compare(answers, serve(Engine(expected), prompts, params))


def check_sampling(runner: TpuRunner, expected: Runner) -> None:
    """The tokens of the CPU's own runner, its log-probabilities within 1e-4, and no influence of batch mates."""
    common = {"max_tokens": 8, "ignore_eos": True, "logprobs": 5}
    params = [
        SamplingParams(temperature=0.9, top_k=20, seed=3, **common),
        SamplingParams(temperature=1.4, top_p=0.8, seed=4, **common),
        SamplingParams(temperature=0, **common),
        SamplingParams(temperature=0.7, min_p=0.05, seed=-5, **common),
        SamplingParams(temperature=1.0, seed=6, min_tokens=8, stop_token_ids=tuple(range(4, 60)), **common),
    ]
    prompts = make_prompts((12, 3, 30, 1, 7), seed=5)
    answers = serve(Engine(runner), prompts, params)
    compare(answers, serve(Engine(expected), prompts, params))
    for answer, prompt, wanted in zip(answers, prompts, params, strict=True):
        assert tokens_of(serve(Engine(runner), [prompt], wanted)) == [answer.outputs[0].token_ids]


def compare(answers: Sequence, expected: Sequence) -> None:
    """Equal tokens; log-probabilities of the same tokens, finite and within 1e-4."""
    assert tokens_of(answers) == tokens_of(expected)
    for ours, theirs in zip(answers, expected, strict=True):
        for mine, other in zip(ours.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True):
            assert np.isfinite(list(mine.values())).all()
            assert mine == pytest.approx(other, abs=1e-4)


def check_workloads(runner: TpuRunner, count: int = 50) -> None:
    """Random requests of every kind: no new graph, and nothing runs outside of compiled functions."""
    generator = random.Random(11)
    before, stray = runner.platform.counts(), runner.sentinel.stray_executions
    with watch_compiles() as log:
        for _ in range(count):
            size = generator.randint(1, 9)
            prompts = make_prompts([generator.randint(1, 60) for _ in range(size)], generator.randrange(1000))
            serve(Engine(runner), prompts, [random_params(generator) for _ in range(size)])
    assert log.events == []
    assert runner.platform.counts() == before
    assert runner.sentinel.stray_executions == stray == 0


def random_params(generator: random.Random) -> SamplingParams:
    max_tokens = generator.randint(1, 8)
    return SamplingParams(
        temperature=generator.choice([0.0, 0.0, 0.7, 1.5]),
        top_k=generator.choice([0, 1, 20]),
        top_p=generator.choice([1.0, 0.9, 0.1]),
        min_p=generator.choice([0.0, 0.1]),
        seed=generator.choice([None, 1, -(2**63)]),
        logprobs=generator.choice([None, None, 0, 3, 60]),
        max_tokens=max_tokens,
        min_tokens=generator.randint(0, max_tokens),
        stop_token_ids=generator.choice([(), (7,), tuple(range(64))]),
        ignore_eos=generator.choice([True, False]),
        n=generator.choice([1, 1, 2]),
    )


def check_an_uncovered_size_raises(runner: TpuRunner) -> None:
    """A number of tokens, and one of rows, that the warm-up left out; afterwards the runner is as good as before."""
    expected = tokens_of(serve(Engine(runner), SHORT_PROMPTS, GREEDY))
    with uncovered(runner, "token_buckets", UNCOVERED_TOKENS):
        with pytest.raises(CompiledAfterWarmup) as caught:
            serve(Engine(runner), SHORT_PROMPTS, GREEDY)
        assert f"bucket {UNCOVERED_TOKENS} tokens, 2 rows" in caught.value.reason
        assert "5 tokens of 2 requests, 2 sampled rows" in str(caught.value)
    with (
        uncovered(runner, "request_buckets", UNCOVERED_ROWS),
        pytest.raises(CompiledAfterWarmup, match=rf"bucket 8 tokens, {UNCOVERED_ROWS} rows"),
    ):
        serve(Engine(runner), [*SHORT_PROMPTS, [13]], GREEDY)
    assert tokens_of(serve(Engine(runner), SHORT_PROMPTS, GREEDY)) == expected


def check_an_uncovered_size_warns(runner: TpuRunner, caplog: pytest.LogCaptureFixture) -> None:
    """With on_compile "warn": the text is right, what was compiled is told, and is compiled once."""
    expected = tokens_of(serve(Engine(runner), SHORT_PROMPTS, GREEDY))
    before = runner.platform.counts()
    with warning_only(runner), uncovered(runner, "token_buckets", UNCOVERED_TOKENS), caplog.at_level(logging.WARNING):
        assert tokens_of(serve(Engine(runner), SHORT_PROMPTS, GREEDY)) == expected
        told = [record.getMessage() for record in caplog.records]
        graphs = runner.platform.counts().graphs
        # The body, and the choice of rows from it.
        assert graphs - before.graphs == 2
        assert runner.sentinel.stray_executions == 0
        by_name = [text for text in told if f"a step in bucket {UNCOVERED_TOKENS} tokens, 2 rows" in text]
        assert ["XLA compiled 2 graphs" in text for text in by_name] == [True]
        assert not any("outside of compiled functions" in text for text in told)
        caplog.clear()
        assert tokens_of(serve(Engine(runner), SHORT_PROMPTS, GREEDY)) == expected
        assert caplog.records == []
        assert runner.platform.counts().graphs == graphs


@contextmanager
def uncovered(runner: TpuRunner, name: str, size: int) -> Iterator[None]:
    """Steps are padded to a size that no warm-up has seen, too."""
    sizes = {*getattr(runner, name).sizes, size}
    with mock.patch.object(runner, name, Buckets(tuple(sorted(sizes)))):
        yield


@contextmanager
def warning_only(runner: TpuRunner) -> Iterator[None]:
    """The runner's steps are watched as with on_compile "warn"."""
    sentinel = XlaSentinel(runner.platform, "warn")
    sentinel.seal()
    runner.sentinel.close()
    try:
        with mock.patch.object(runner, "sentinel", sentinel):
            yield
    finally:
        sentinel.close()
        runner.sentinel = XlaSentinel(runner.platform, "raise")
        runner.sentinel.seal()


def addresses_in_steps(runner: TpuRunner, num_steps: int) -> list[list[int]]:
    """Where the runner's caches lie after each of so many steps."""
    engine = Engine(runner)
    for prompt in make_prompts((3, 4), seed=1):
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=num_steps, ignore_eos=True))
    addresses = []
    for _ in range(num_steps):
        assert engine.has_unfinished()
        engine.step()
        runner.platform.wait()
        addresses.append([runner.platform.buffer_address(cache) for cache in runner.kv_caches])
    return addresses


def check_caches_stay_in_place(runner: TpuRunner) -> None:
    before = [runner.platform.buffer_address(cache) for cache in runner.kv_caches]
    assert addresses_in_steps(runner, 20) == [before] * 20
    assert len(set(before)) == len(before)


def check_list_of_caches(runner: TpuRunner) -> None:
    """The list holds the layers' very tensors by number of the layer, and the geometry of each group is read there."""
    layers = sorted(runner.static_context.values(), key=lambda layer: int(layer.layer_name.split(".")[-2]))
    assert len(layers) == len(runner.kv_caches)
    assert all(cache is layer.kv_cache for cache, layer in zip(runner.kv_caches, layers, strict=True))
    expected = tuple(
        CacheGeometry(limits.num_blocks, BLOCK_SIZE, runner.static_context[group.layer_names[0]].spec.num_kv_heads)
        for limits, group in zip(runner.limits.cache_groups, runner.static_context.groups, strict=True)
    )
    assert runner.cache_geometries() == expected


def check_other_caches_are_used(runner: TpuRunner) -> None:
    """After binding other caches of the same shape, compiled graphs read and write those alone, without a new graph."""
    prompts = make_prompts((30, 5), seed=2)
    before = runner.platform.counts()
    with other_caches(runner) as first:
        texts = tokens_of(serve(Engine(runner), prompts, GREEDY))
    left = contents(first)
    assert all(content.any() for content in left.values())
    with other_caches(runner) as second:
        assert not any(content.any() for content in contents(second).values())
        assert tokens_of(serve(Engine(runner), prompts, GREEDY)) == texts
    for name, content in contents(second).items():
        torch.testing.assert_close(content, left[name])
        assert torch.equal(first[name].cpu()[1:], left[name]), "the old caches are left alone"
    assert runner.platform.counts() == before


def check_a_text_goes_on_in_other_caches(runner: TpuRunner, expected: Runner) -> None:
    """Half of a text is written with one set of caches and half with another that holds the same."""
    (prompt,) = make_prompts((9,), seed=4)
    engine = Engine(runner)
    engine.add_request(prompt, GREEDY)
    for _ in range(NEW_TOKENS // 2):
        engine.step()
    filled = bound_caches(runner)
    with other_caches(runner):
        copies = runner.platform.to_device([cache.cpu() for cache in filled.values()])
        bind(runner, dict(zip(filled, copies, strict=True)))
        outputs = []
        while engine.has_unfinished():
            outputs = engine.step()
    assert tokens_of(outputs) == tokens_of(serve(Engine(expected), [prompt], GREEDY))


def check_more_blocks_cost_a_graph_for_each_body(runner: TpuRunner) -> None:
    """Caches of another size are another type of a body's input; rows and heads read none."""
    prompts = make_prompts((30, 5), seed=2)
    expected = tokens_of(serve(Engine(runner), prompts, GREEDY))
    before = runner.platform.counts().graphs
    with warning_only(runner), other_caches(runner, more_blocks=3):
        for _ in range(2):
            assert tokens_of(serve(Engine(runner), prompts, GREEDY)) == expected
            assert runner.platform.counts().graphs - before == len(runner.token_buckets.sizes)
    assert tokens_of(serve(Engine(runner), prompts, GREEDY)) == expected


def check_blocks_out_of_range_are_refused(runner: TpuRunner) -> None:
    """By name, and before anything is computed; also after larger and smaller caches were bound."""
    for group, limits in enumerate(runner.limits.cache_groups):
        tables = [(1, 2)] * len(runner.limits.cache_groups)
        tables[group] = (1, limits.num_blocks)
        request = ScheduledRequest("far", (5, 6, 7, 8, 9), 0, tuple(tables), True)
        batch = ScheduledBatch((request,), make_sampling_batch([]))
        message = f"'far' has block {limits.num_blocks}, cache group {group} has {limits.num_blocks} blocks"
        with pytest.raises(RequestError, match=message):
            runner.execute(batch)
    request = ScheduledRequest("long", (5,) * 25, 0, (tuple(range(1, 8)),) * len(runner.limits.cache_groups), False)
    with pytest.raises(RequestError, match="25 tokens, max_num_batched_tokens is 24"):
        runner.execute(ScheduledBatch((request,), make_sampling_batch([])))


def check_closing(runner: TpuRunner) -> None:
    """A runner that was closed, twice, keeps no cache and no weight alive, also not in what Dynamo compiled."""
    engine = Engine(runner)
    serve(engine, [[5, 6]], GREEDY)
    kept = [*runner.kv_caches, *runner.model._model._backbone.parameters()]
    alive = [weakref.ref(tensor) for tensor in kept]
    del kept
    runner.close()
    runner.close()
    gc.collect()
    assert [tensor() for tensor in alive] == [None] * len(alive)
    engine.add_request([5, 6], GREEDY)
    with pytest.raises(ContextStateError, match="closed"):
        engine.step()


def check_loading(folder: Path, platform: XlaPlatform, tied: bool) -> None:
    """Weights arrive on the device once each, whole, and tied ones as one tensor."""
    files = find_model(str(folder))
    definition = build_definition(files, torch.float32)
    module = definition.module
    wanted = len({id(tensor) for tensor in (*module.parameters(), *module.buffers())})
    copied: list[torch.Tensor] = []
    on_host: list[StorageWeakRef] = []

    def to_device(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        assert all(storage.expired() for storage in on_host), "an earlier weight is still on the host"
        # Vectors are small, and some of them belong to the definition.
        on_host.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors if tensor.dim() > 1)
        copied.extend(platform.to_device(tensors))
        return copied[-len(tensors) :]

    load_module(definition, files, Ledger(), to_device)
    assert len(copied) == wanted
    embedding, head = module.get_input_embeddings().weight, module.get_output_embeddings().weight
    assert (embedding is head) == tied
    assert {tensor.device.type for tensor in (*module.parameters(), *module.buffers())} == {platform.device.type}
    expected = TransformersOracle(folder).float32.state_dict()
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor.cpu(), expected[name]), name
