"""TPU runners on tiny models, a platform for them that needs no XLA, and what they write, for several test files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend

from compiled_engine.compile.ledger import Ledger
from compiled_engine.config import EngineConfig
from compiled_engine.context import bind_kv_cache, unbind_kv_cache
from compiled_engine.engine.core import Engine
from compiled_engine.engine.outputs import RequestOutput
from compiled_engine.engine.sampling_params import SamplingParams
from compiled_engine.models import find_model
from compiled_engine.runners.base import CacheGroupLimits
from compiled_engine.runners.caches import allocate_cache_groups
from compiled_engine.runners.memory import available_memory
from compiled_engine.runners.platforms import ExecutionCounts, Function, XlaPlatform
from compiled_engine.runners.tpu import TpuRunner
from tiny_models import write_tiny_model

BLOCK_SIZE = 4
NUM_BLOCKS = 40
SETTINGS: dict[str, Any] = {
    "device": "tpu",
    "dtype": "float32",
    "block_size": BLOCK_SIZE,
    "max_model_len": 96,
    "max_num_seqs": 7,
    "max_num_batched_tokens": 24,
    # The largest, 24 tokens and 7 rows, are added.
    "token_buckets": (8,),
    "request_buckets": (2,),
}
SMALLEST: dict[str, Any] = {"max_num_batched_tokens": 8, "max_num_seqs": 2}
"""Settings with one bucket of each kind, for a runner that is soon made."""


class InductorPlatform:
    """An ``XlaPlatform`` without XLA: the CPU, and torch's own compiler, which updates its inputs in place unasked.

    ``backend``: the name of another backend of torch.compile that is quicker to compile.
    """

    name = "inductor"
    device = torch.device("cpu")
    emulated = True
    description = "Inductor on the CPU"
    warm_start = "as Inductor does it"
    updates_in_place = True
    ragged_paged_attention: Callable[..., torch.Tensor] | None = None

    def __init__(self, backend: str = "inductor") -> None:
        self._compile_graph = lookup_backend(backend)
        self._count_graph = self._compile_and_count
        self._graphs = 0

    def compile(self, function: Function) -> Function:
        options = {"guard_filter_fn": torch.compiler.skip_guard_on_globals_unsafe}
        return torch.compile(function, backend=self._count_graph, fullgraph=True, dynamic=False, options=options)

    def _compile_and_count(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self._graphs += 1
        return self._compile_graph(graph, inputs)

    def to_device(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in tensors]

    def donate(self, tensor: torch.Tensor) -> None:
        pass

    def wait(self) -> None:
        pass

    def counts(self) -> ExecutionCounts:
        return ExecutionCounts(self._graphs, 0)

    def free_memory(self, fraction: float) -> int:
        return available_memory()

    def buffer_address(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr()


def write_model(folder: Path, architecture: str) -> Path:
    """A tiny model in which token 0, that of padding, has an embedding: transformers keeps a pad token's at zero."""
    return write_tiny_model(folder, architecture, pad_token_id=5)


@contextmanager
def poisoned_padding(runner: TpuRunner) -> Iterator[None]:
    """The embedding of token 0 is NaN, for a model whose head has weights of its own."""
    embedding = runner.model._model._backbone.get_input_embeddings()
    sound = embedding.weight
    poisoned = sound.detach().cpu().clone()
    poisoned[0] = float("nan")
    embedding.weight = torch.nn.Parameter(*runner.platform.to_device([poisoned]), requires_grad=False)
    try:
        yield
    finally:
        embedding.weight = sound


def new_runner(folder: Path, platform: XlaPlatform, ledger: Ledger | None = None, **settings: Any) -> TpuRunner:
    """A runner whose caches hold fewer tokens than ``max_num_seqs`` long requests have, unless settings say more."""
    memory = {"kv_cache_memory": NUM_BLOCKS * block_bytes(folder)}
    config = EngineConfig(**{**SETTINGS, **memory, **settings})
    return TpuRunner(config, find_model(str(folder)), Ledger() if ledger is None else ledger, platform=platform)


def block_bytes(folder: Path) -> int:
    """Bytes of one block over all layers, worked out from transformers' config alone."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers * 2 * heads * head_dim * 4 * BLOCK_SIZE


def serve(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[RequestOutput]:
    """What the engine answers to ``prompts``, which all enter at once; none may end in an error."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    ids = [engine.add_request(list(prompt), wanted) for prompt, wanted in zip(prompts, each, strict=True)]
    outputs = {}
    while engine.has_unfinished():
        for output in engine.step():
            outputs[output.request_id] = output
    answers = [outputs[request] for request in ids]
    assert [answer.error for answer in answers] == [None] * len(ids)
    return answers


def tokens_of(answers: Sequence[RequestOutput]) -> list[list[int]]:
    """The first completion of each answer."""
    return [answer.outputs[0].token_ids for answer in answers]


@contextmanager
def other_caches(runner: TpuRunner, fill: float = 0.0, more_blocks: int = 0) -> Iterator[dict[str, torch.Tensor]]:
    """Caches by layer name, full of ``fill``, that are bound in the meantime."""
    before = bound_caches(runner)
    limits = [
        CacheGroupLimits(group.num_blocks + more_blocks, group.sliding_window) for group in runner.limits.cache_groups
    ]
    on_host = allocate_cache_groups(runner.static_context, limits)
    moved = runner.platform.to_device([cache.fill_(fill) for cache in on_host.values()])
    caches = dict(zip(on_host, moved, strict=True))
    bind(runner, caches)
    try:
        yield caches
    finally:
        bind(runner, before)


def bound_caches(runner: TpuRunner) -> dict[str, torch.Tensor]:
    """The caches by layer name."""
    return {name: layer.kv_cache for name, layer in runner.static_context.items()}


def bind(runner: TpuRunner, caches: dict[str, torch.Tensor]) -> None:
    """Bind ``caches`` in place of those that are bound."""
    unbind_kv_cache(runner.static_context)
    runner.kv_caches.clear()
    bind_kv_cache(caches, runner.static_context, runner.kv_caches)


def contents(caches: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What real tokens left in ``caches``: copies on the host without block 0."""
    return {name: cache.cpu()[1:].clone() for name, cache in caches.items()}
