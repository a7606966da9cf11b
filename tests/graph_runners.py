"""Runners with captured graphs on tiny models, and what they write, for several test files."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compiled_engine.compile.ledger import Ledger
from compiled_engine.config import EngineConfig
from compiled_engine.engine.core import Engine
from compiled_engine.engine.sampling_params import SamplingParams
from compiled_engine.models import find_model
from compiled_engine.runners.base import Runner
from compiled_engine.runners.cpu import CpuRunner
from compiled_engine.runners.gpu import GpuRunner
from tiny_models import VOCAB_SIZE

MODES = ("none", "full_decode_only", "piecewise", "full", "full_and_piecewise")
SETTINGS: dict[str, Any] = {
    "piece_compiler": "eager",
    "block_size": 4,
    "max_num_seqs": 7,
    "max_num_batched_tokens": 24,
    "max_model_len": 96,
    "num_threads": 1,
    "dtype": "float32",
    # 7, the most requests, is added to the sizes of decode steps; 3, 5 and 6 lie between.
    "graph_sizes": (1, 2, 4, 16),
    "max_graph_size": 18,
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def new_runner(folder: Path, mode: str = "full_and_piecewise", **settings: Any) -> GpuRunner:
    """A runner that captures, in ``mode``; "none" runs everything eagerly from the same buffers."""
    config = EngineConfig(**{**SETTINGS, "graph_mode": mode, **settings})
    return GpuRunner(config, find_model(str(folder)), Ledger())


def eager_runner(folder: Path, **settings: Any) -> CpuRunner:
    """The CPU's own runner with the same settings."""
    return CpuRunner(EngineConfig(**{**SETTINGS, **settings}), find_model(str(folder)), Ledger())


def make_prompts(count: int, seed: int = 7, longest: int = 40) -> list[list[int]]:
    """Prompts of 1 to ``longest`` tokens that are not 0, that of padding."""
    generator = random.Random(seed)
    return [[generator.randrange(4, VOCAB_SIZE) for _ in range(generator.randint(1, longest))] for _ in range(count)]


def write(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY) -> list[tuple[int, ...]]:
    """What the engine writes after each of ``prompts``, which all enter at once."""
    ids = [engine.add_request(list(prompt), params) for prompt in prompts]
    outputs = {}
    while engine.has_unfinished():
        for output in engine.step():
            outputs[output.request_id] = output
    assert [outputs[request].error for request in ids] == [None] * len(ids)
    return [tuple(outputs[request].outputs[0].token_ids) for request in ids]


def engine_of(runner: Runner, enable_prefix_caching: bool = False) -> Engine:
    """An engine that serves token ids on ``runner``."""
    return Engine(runner, enable_prefix_caching=enable_prefix_caching)
