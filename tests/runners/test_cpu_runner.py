"""The CPU runner on a tiny model: ready after construction, greedy tokens, no cache outside its layers, a clean end."""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_engine.compile.ledger import Ledger
from compiled_engine.config import EngineConfig
from compiled_engine.context import CacheLayer, ContextState
from compiled_engine.errors import ConfigError, ContextStateError, OutOfMemoryError, RequestError
from compiled_engine.models import find_model
from compiled_engine.ops.sampling import greedy_batch
from compiled_engine.runners import create_runner
from compiled_engine.runners.batch import ScheduledBatch, ScheduledRequest
from compiled_engine.runners.cpu import CpuRunner
from tiny_models import write_tiny_model

BLOCK_SIZE, MAX_TOKENS = 4, 24
SETTINGS: dict[str, Any] = {
    "piece_compiler": "eager",
    "block_size": BLOCK_SIZE,
    "max_num_seqs": 4,
    "max_num_batched_tokens": MAX_TOKENS,
    "max_model_len": 40,
    "num_threads": 1,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny_runner"), "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer: for tests that construct runners of their own. Token 0, that of padding rows, has an embedding."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny_runner"), "llama", num_hidden_layers=1, pad_token_id=5)


def new_runner(folder: Path, **settings: Any) -> CpuRunner:
    return CpuRunner(EngineConfig(**{**SETTINGS, **settings}), find_model(str(folder)), Ledger())


@pytest.fixture(scope="module")
def runner(folder: Path) -> Iterator[CpuRunner]:
    runner = new_runner(folder)
    yield runner
    runner.close()


def batch(*requests: ScheduledRequest) -> ScheduledBatch:
    return ScheduledBatch(requests, greedy_batch(sum(request.samples for request in requests)))


def part(row: int, tokens: Sequence[int], first: int, last: int, samples: bool = True) -> ScheduledRequest:
    """Tokens ``first`` to ``last`` of sequence ``row``, which owns ten blocks of its own."""
    blocks = tuple(range(1 + 10 * row, 11 + 10 * row))[: -(-last // BLOCK_SIZE)]
    return ScheduledRequest(f"r{row}", tuple(tokens[first:last]), first, (blocks,), samples)


def prompt(row: int, length: int) -> list[int]:
    return [(17 * row + 5 * index + index * index) % 128 for index in range(length)]


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)

    def continuation(tokens: Sequence[int], count: int) -> list[int]:
        """Greedy, one whole forward pass for every token: no cache."""
        ids = list(tokens)
        with torch.inference_mode():
            for _ in range(count):
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        return ids[len(tokens) :]

    return continuation


def test_a_batch_of_chunks_and_decodes_gives_greedy_tokens(runner: CpuRunner, oracle: Any) -> None:
    prompts = [prompt(0, 5), prompt(1, 1), prompt(2, 19)]
    expected = [oracle(tokens, 4) for tokens in prompts]
    texts = [list(tokens) for tokens in prompts]
    # The longest prompt comes in two chunks; the others decode meanwhile.
    output = runner.execute(
        batch(part(0, texts[0], 0, 5), part(2, texts[2], 0, 11, samples=False), part(1, texts[1], 0, 1))
    )
    for row, token in zip((0, 1), output.sampled.token_ids, strict=True):
        texts[row].append(token)
    output = runner.execute(batch(part(2, texts[2], 11, 19), part(0, texts[0], 5, 6), part(1, texts[1], 1, 2)))
    for row, token in zip((2, 0, 1), output.sampled.token_ids, strict=True):
        texts[row].append(token)
    for _ in range(3):
        output = runner.execute(batch(*(part(row, text, len(text) - 1, len(text)) for row, text in enumerate(texts))))
        for text, token in zip(texts, output.sampled.token_ids, strict=True):
            text.append(token)
    assert [text[len(tokens) :][:4] for text, tokens in zip(texts, prompts, strict=True)] == expected


def test_a_step_in_which_nothing_samples_gives_no_tokens(runner: CpuRunner) -> None:
    output = runner.execute(batch(part(0, prompt(0, 6), 0, 6, samples=False)))
    assert output.sampled.token_ids == ()
    assert output.sampled.logprobs == ()


def test_the_largest_step_runs_and_a_larger_one_is_refused(runner: CpuRunner) -> None:
    assert len(runner.execute(batch(part(0, prompt(0, MAX_TOKENS), 0, MAX_TOKENS))).sampled.token_ids) == 1
    with pytest.raises(RequestError, match=rf"{MAX_TOKENS + 1} tokens, max_num_batched_tokens is {MAX_TOKENS}"):
        runner.execute(batch(part(0, prompt(0, MAX_TOKENS + 1), 0, MAX_TOKENS + 1)))


def test_an_error_in_a_step_leaves_the_runner_usable(runner: CpuRunner) -> None:
    good = batch(part(0, prompt(0, 6), 0, 6))
    before = runner.execute(good).sampled.token_ids
    with pytest.raises(IndexError):
        runner.execute(batch(part(0, [10**6, 1], 0, 2)))
    with pytest.raises(RequestError):
        runner.execute(batch(ScheduledRequest("short", (1, 2), 0, ((),), True)))
    assert runner.execute(good).sampled.token_ids == before


def test_limits_say_what_was_asked_for(runner: CpuRunner) -> None:
    limits = runner.limits
    assert (limits.max_model_len, limits.max_num_seqs, limits.max_num_batched_tokens) == (40, 4, MAX_TOKENS)
    assert (limits.block_size, limits.vocab_size) == (BLOCK_SIZE, 128)
    assert [(group.num_blocks, group.sliding_window) for group in limits.cache_groups] == [(4 * 10 + 1, None)]
    for layer in runner.static_context.values():
        assert layer.kv_cache.shape[:2] == (limits.cache_groups[0].num_blocks, BLOCK_SIZE)


def test_what_construction_does_is_counted(runner: CpuRunner) -> None:
    counters = runner.counters
    assert (counters.captures, counters.pieces, counters.pieces_compiled) == (1, 3, 3)
    assert (counters.heads, counters.heads_compiled, counters.attention_layers) == (1, 1, 2)
    with counters.expect(captures=0, pieces=0, pieces_compiled=0, heads=0, heads_compiled=0, attention_layers=0):
        runner.execute(batch(part(0, prompt(0, 3), 0, 3), part(1, prompt(1, 4), 0, 4)))


def test_nothing_outside_a_request_reaches_its_result(runner: CpuRunner) -> None:
    """Neither the reserved block nor blocks that others might own."""
    tokens = prompt(3, 7)
    runner.execute(batch(part(0, tokens, 0, 6)))
    clean = runner.execute(batch(part(0, tokens, 6, 7))).sampled
    for layer in runner.static_context.values():
        layer.kv_cache[0] = float("nan")
        layer.kv_cache[11:] = float("nan")
    assert runner.execute(batch(part(0, tokens, 6, 7))).sampled == clean


def tensors_within(value: object, path: str, seen: set[int], found: dict[str, torch.Tensor]) -> None:
    """Every tensor that can be reached from ``value`` by attributes, containers, closures and bound objects."""
    if id(value) in seen or isinstance(value, (type, types.ModuleType, str, bytes, int, float)):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        found[path] = value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            tensors_within(item, f"{path}[{key!r}]", seen, found)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, item in enumerate(value):
            tensors_within(item, f"{path}[{index}]", seen, found)
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            tensors_within(cell.cell_contents, f"{path}<{name}>", seen, found)
        for index, item in enumerate(value.__defaults__ or ()):
            tensors_within(item, f"{path}<default {index}>", seen, found)
    elif isinstance(value, types.MethodType):
        tensors_within(value.__self__, f"{path}.__self__", seen, found)
    elif isinstance(value, functools.partial):
        tensors_within((value.args, value.keywords), f"{path}<partial>", seen, found)
    if not isinstance(value, torch.Tensor):
        attributes = dict(getattr(value, "__dict__", {}))
        attributes |= {name: getattr(value, name, None) for name in getattr(type(value), "__slots__", ())}
        for name, item in attributes.items():
            tensors_within(item, f"{path}.{name}", seen, found)


def test_no_list_of_caches_is_kept_anywhere(runner: CpuRunner) -> None:
    """Walk everything that the runner holds: caches are attributes of their layers, and of nothing else."""
    caches = {layer.kv_cache.data_ptr(): name for name, layer in runner.static_context.items()}
    assert len(caches) == 2
    found: dict[str, torch.Tensor] = {}
    # The layers last, so that any other way to a cache is found first.
    seen: set[int] = {id(runner.static_context), *(id(layer) for layer in runner.static_context.values())}
    tensors_within(runner, "runner", seen, found)
    # The walk works: it sees the weights that the plan's instructions hold.
    pointers = {tensor.data_ptr(): path for path, tensor in found.items()}
    assert len(found) > 10
    assert not {path for pointer, path in pointers.items() if pointer in caches}
    for layer in runner.static_context.values():
        assert isinstance(layer, CacheLayer)
        own: dict[str, torch.Tensor] = {}
        tensors_within(layer, "layer", set(), own)
        assert [path for path, tensor in own.items() if tensor.data_ptr() in caches] == ["layer._kv_cache"]


def test_a_life_from_warm_up_to_the_end(small_folder: Path) -> None:
    """Warm-up leaves no trace (block 0 is all that its dummy rows may touch); closing frees all and may be repeated."""
    runner = create_runner(EngineConfig(**SETTINGS), find_model(str(small_folder)), Ledger())
    assert isinstance(runner, CpuRunner)
    caches = []
    for layer in runner.static_context.values():
        assert not layer.kv_cache.any()
        caches.append(weakref.ref(layer.kv_cache))
    assert not runner.model._verify
    runner.execute(batch(part(0, prompt(0, 3), 0, 3)))
    model = weakref.ref(runner.model)
    runner.close()
    runner.close()
    gc.collect()
    assert runner.static_context.state is ContextState.CLOSED
    assert not any(reference() is not None for reference in caches)
    assert model() is None
    with pytest.raises(ContextStateError, match="closed"):
        runner.execute(batch(part(0, prompt(0, 3), 0, 3)))
    assert runner.limits.vocab_size == 128


def test_two_runners_do_not_share_anything(folder: Path, runner: CpuRunner, tmp_path: Path) -> None:
    """Equal layer names in one process, other weights and other caches."""
    other = new_runner(write_tiny_model(tmp_path, "llama", num_hidden_layers=2, seed=5))
    tokens = prompt(0, 8)
    alone = [r.execute(batch(part(0, tokens, 0, 8))).sampled.token_ids for r in (runner, other)]
    for r in (runner, other):
        r.execute(batch(part(0, tokens, 0, 7)))
    together = [r.execute(batch(part(0, tokens, 7, 8))).sampled.token_ids for r in (runner, other)]
    assert together == alone
    other.close()
    assert runner.execute(batch(part(0, tokens, 7, 8))).sampled.token_ids == alone[0]


def test_half_precision_runs_on_any_cpu(small_folder: Path) -> None:
    """Where oneDNN has no instructions for it, weights stay as they are."""
    import transformers

    narrow = new_runner(small_folder, dtype="float16")
    assert {layer.kv_cache.dtype for layer in narrow.static_context.values()} == {torch.float16}
    tokens = prompt(1, 8)
    (token,) = narrow.execute(batch(part(0, tokens, 0, 8))).sampled.token_ids
    narrow.close()
    model = transformers.AutoModelForCausalLM.from_pretrained(small_folder, dtype=torch.float32)
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
    assert token in logits.topk(3).indices.tolist(), "among the likeliest tokens in float32"


def test_a_budget_of_one_token_works(folder: Path, runner: CpuRunner) -> None:
    narrow = new_runner(folder, max_num_batched_tokens=1)
    tokens = prompt(0, 2)
    for position in range(2):
        output = narrow.execute(batch(part(0, tokens, position, position + 1)))
    assert output == runner.execute(batch(part(0, tokens, 0, 2)))
    narrow.close()


def test_settings_that_cannot_work_end_with_their_name(small_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len is 513.*512"):
        new_runner(small_folder, max_model_len=513)
    with pytest.raises(OutOfMemoryError, match="kv_cache_memory"):
        new_runner(small_folder, kv_cache_memory=1000)
