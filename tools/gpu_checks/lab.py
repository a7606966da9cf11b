"""What the sections share: sizes, the models they run, engines around them, and clocks."""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compiled_engine.compile.ledger import Ledger
from compiled_engine.config import EngineConfig
from compiled_engine.engine.core import Engine
from compiled_engine.engine.outputs import RequestOutput
from compiled_engine.engine.sampling_params import SamplingParams
from compiled_engine.models import find_model
from compiled_engine.runners.base import Runner, RunnerLimits
from compiled_engine.runners.batch import ScheduledBatch, StepOutput
from compiled_engine.runners.gpu import GpuRunner

_CALLS_PER_GRAPH = 10
_REPEATS = 15


@dataclass(frozen=True)
class Sizes:
    """The random Llama and what it is run on.

    ``batches``: requests at once where decode steps are timed. ``greedy_batches``: where tokens are compared.
    ``steps``: decode steps that are timed. ``prompt_tokens``: of a request before them. ``context``: cached tokens of a
    request where attention's bandwidth is measured. ``copy_mib``: what is copied to measure the memory.
    ``sampled_rows``, ``sampled_vocab``: logits that the sampler is checked on.
    """

    layers: int = 16
    hidden: int = 2048
    intermediate: int = 8192
    heads: int = 32
    kv_heads: int = 8
    vocab: int = 128256
    batches: tuple[int, ...] = (1, 8, 32, 128)
    greedy_batches: tuple[int, ...] = (17, 1, 8, 3)
    greedy_tokens: int = 16
    longest_prompt: int = 150
    steps: int = 64
    prompt_tokens: int = 128
    context: int = 8192
    copy_mib: int = 1024
    sampled_rows: int = 256
    sampled_vocab: int = 49152


TINY = Sizes(
    layers=2,
    hidden=64,
    intermediate=96,
    heads=4,
    kv_heads=2,
    vocab=256,
    batches=(1, 3),
    greedy_batches=(5, 1, 3),
    greedy_tokens=6,
    longest_prompt=40,
    steps=6,
    prompt_tokens=12,
    context=64,
    copy_mib=8,
    sampled_rows=20,
    sampled_vocab=1000,
)
"""For the emulation on a CPU."""


@dataclass(frozen=True)
class Lab:
    """``model``: folder of a small model to compare tokens on; None: a random one. ``scratch``: a folder to fill.

    ``deadline``: reading of ``time.monotonic()`` after which nothing new begins.
    """

    device: torch.device
    sizes: Sizes
    model: Path | None
    piece_compiler: str
    scratch: Path
    deadline: float

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def random_llama(self, layers: int, dtype: torch.dtype) -> Path:
        """A folder with a seeded random Llama of the lab's sizes, written at the first call."""
        folder = self.scratch / f"llama-{layers}-{name_of(dtype)}"
        if not folder.exists():
            write_random_llama(folder, self.sizes, layers, dtype, self.device)
        return folder

    @property
    def measured_dtype(self) -> torch.dtype:
        """That of everything whose time is measured."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    def measured_llama(self) -> tuple[Path, torch.dtype]:
        """The folder and the dtype of the model whose times are measured."""
        return self.random_llama(self.sizes.layers, self.measured_dtype), self.measured_dtype

    @contextmanager
    def runner(self, folder: Path, ledger: Ledger | None = None, **settings: Any) -> Iterator[GpuRunner]:
        """A runner with captured graphs on the lab's device: emulated ones on a CPU."""
        config = EngineConfig(device=str(self.device), piece_compiler=self.piece_compiler, **settings)
        runner = GpuRunner(config, find_model(str(folder)), ledger or Ledger())
        try:
            yield runner
        finally:
            runner.close()

    def why_no_triton(self) -> str:
        """Why Triton kernels cannot run here; empty where they can."""
        try:
            import triton
        except ImportError:
            return "Triton is not installed: pip install triton"
        if self.on_gpu or triton.knobs.runtime.interpret:
            return ""
        return "Triton kernels need a GPU, or TRITON_INTERPRET=1 for the interpreter"

    def release_memory(self) -> None:
        """Give memory that nothing uses back to the device, for other processes too."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait until the device has done everything."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def name_of(dtype: torch.dtype) -> str:
    """The type's name as settings have it."""
    return str(dtype).removeprefix("torch.")


def write_random_llama(folder: Path, sizes: Sizes, layers: int, dtype: torch.dtype, device: torch.device) -> None:
    """A Llama without a tokenizer. Its weights are wide enough that greedy text is varied and its choices are clear."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=16384,
        initializer_range=2.4 / math.sqrt(sizes.hidden),
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        with device:
            model = LlamaForCausalLM(config)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                # Norms start as ones: a mistake with them would go unseen.
                parameter.data += 0.2 * torch.randn_like(parameter)
    model.to(dtype).save_pretrained(folder)


def load_transformers_model(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The model in ``folder`` as transformers runs it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).to(device).eval()


def make_prompts(count: int, shortest: int, longest: int, vocab: int, seed: int = 7) -> list[list[int]]:
    """Random prompts whose lengths lie between ``shortest`` and ``longest``, both included."""
    generator = random.Random(seed)
    return [[generator.randrange(3, vocab) for _ in range(generator.randint(shortest, longest))] for _ in range(count)]


def greedy(max_tokens: int) -> SamplingParams:
    """The most likely tokens, ``max_tokens`` of them whatever they are."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def write(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """What the engine writes after each of ``prompts``, which enter at once. Raises ``RuntimeError`` if it refuses."""
    ids = [engine.add_request(list(prompt), greedy(max_tokens)) for prompt in prompts]
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        outputs.update((output.request_id, output) for output in engine.step())
    refused = [output.error for output in outputs.values() if output.error]
    if refused:
        raise RuntimeError(f"the engine refused a prompt: {refused[0]}")
    return [list(outputs[request_id].outputs[0].token_ids) for request_id in ids]


@dataclass(frozen=True)
class StepTime:
    """One ``execute``: its sizes, and the wall time until its tokens were on the host."""

    num_requests: int
    num_tokens: int
    seconds: float


class TimedRunner(Runner):
    """A runner that notes how long each step of ``runner`` takes."""

    def __init__(self, runner: GpuRunner, synchronize: Callable[[], None]) -> None:
        self._runner = runner
        self._synchronize = synchronize
        self.steps: list[StepTime] = []

    @property
    def limits(self) -> RunnerLimits:
        return self._runner.limits

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        begin = time.perf_counter()
        output = self._runner.execute(batch)
        self._synchronize()
        seconds = time.perf_counter() - begin
        self.steps.append(StepTime(len(batch.requests), batch.num_scheduled_tokens, seconds))
        return output

    def close(self) -> None:
        self._runner.close()


def seconds_per_call(work: Callable[[], object], lab: Lab) -> float:
    """Median seconds that the device takes for ``work``, which must be fit for a CUDA graph.

    On a GPU several calls are captured and replayed between events, so that launching them costs nothing; on a CPU
    calls are timed one by one.
    """
    if not lab.on_gpu:
        return statistics.median(_timed(work) for _ in range(3))
    work()
    torch.cuda.synchronize(lab.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS_PER_GRAPH):
            work()
    graph.replay()
    milliseconds = []
    for _ in range(_REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        milliseconds.append(begin.elapsed_time(end))
    return statistics.median(milliseconds) / 1e3 / _CALLS_PER_GRAPH


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
