"""How this engine's step grows: with the batch, with the context, with the queue; what a step consists of; and memory.

Every time is that of real calls of ``Engine.step()``, the median of some. Prompts are token ids of a fixed text; end
tokens are ignored. The result is a JSON file and a page of plots beside it.

    python benchmarks/growth.py --quick
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from rich.console import Console

from bar_chart import svg
from compiled_engine.compile.ledger import Ledger
from compiled_engine.compile.model import CompiledModel
from compiled_engine.config import EngineConfig
from compiled_engine.engine.completion import Completion
from compiled_engine.engine.core import Engine
from compiled_engine.engine.sampling_params import SamplingParams
from compiled_engine.engine.scheduler import Scheduler
from compiled_engine.ops.cpu.sampling import CpuSampler
from compiled_engine.runners import cpu
from figures import Figure
from machine import describe_machine
from plots import Axis, Series, line_plot, page

HERE = Path(__file__).resolve().parent
TEXT = HERE / "accuracy_text.txt"
PROMPT_TOKENS, PROMPT_STRIDE = 16, 7
SPARE_TOKENS = 16
"""New tokens of a request beyond those of timed steps: some pass until all requests of a batch have begun."""

ROW_TOKENS = 128
"""Most tokens of one request where the context is not what grows."""

SHARE_BATCH, MEMORY_BATCH, QUEUE_BATCH = 32, 32, 4
MEMORY_READINGS = 20
MS, US, MIB = 1e3, 1e6, 2**20
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 1}

# What a step consists of: the parts' names and the functions that do them. None contains another.
PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "scheduling": ((Scheduler, "schedule"), (Scheduler, "update")),
    "inputs": ((cpu, "build_step_inputs"),),
    "layers": ((CompiledModel, "hidden_states"),),
    "logits": ((CompiledModel, "logits"),),
    "sampling": ((CpuSampler, "sample"),),
    "output text": ((Completion, "accept"),),
}
REST = "rest"


@dataclass(frozen=True)
class Sizes:
    """What is measured. steps: timed steps for each point, of which the median counts."""

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    contexts: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192)
    queues: tuple[int, ...] = (10, 100, 1000, 10_000)
    steps: int = 15
    requests: int = 1000
    tokens_per_request: int = 4


QUICK = Sizes(
    batches=(1, 4, 16), contexts=(128, 512, 1024), queues=(10, 100, 1000), steps=5, requests=60, tokens_per_request=2
)


@dataclass(frozen=True)
class StepTime:
    """Median seconds of a step at one size: batch, context or queue."""

    size: int
    step_s: float


@dataclass(frozen=True)
class QueueTime:
    """A step beside ``waiting`` requests: seconds of scheduling alone, and seconds to add one request."""

    waiting: int
    schedule_s: float
    add_s: float


@dataclass(frozen=True)
class Memory:
    """Bytes of the process that are in memory after so many finished requests."""

    finished: int
    resident: int


@dataclass(frozen=True)
class Growth:
    """All that was measured. shares: median seconds of each of ``PARTS`` and the rest, by kind of sampling."""

    batch: list[StepTime]
    context: list[StepTime]
    queue: list[QueueTime]
    shares: dict[str, dict[str, float]]
    memory: list[Memory]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    console = Console(stderr=True)
    growth = measure(options, QUICK if options.quick else Sizes(), console)
    target = options.output or HERE / "results" / time.strftime("growth-%Y%m%d-%H%M%S")
    target.parent.mkdir(parents=True, exist_ok=True)
    described = {name: value for name, value in vars(options).items() if name != "output"}
    result = {"made_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "options": described}
    result |= {"machine": describe_machine(options.threads), **asdict(growth)}
    target.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    target.with_suffix(".html").write_text(plots_page(growth, options), "utf-8")
    for line in summary(growth):
        print(line)
    console.print(f"written: {target.with_suffix('.json')} and .html", highlight=False, soft_wrap=True)
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure how the engine's step grows with batch, context and queue.")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--model", metavar="M", help="folder, GGUF file or hub id (the default model)")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller sizes: under a minute")
    parser.add_argument("--dtype", default="float32", help="as in EngineConfig (float32)")
    parser.add_argument("--quantization", choices=("int8", "int4"), help="as in EngineConfig (none)")
    parser.add_argument("--piece-compiler", default="aoti", help="as in EngineConfig (aoti)")
    parser.add_argument("--threads", type=int, default=cores, metavar="N", help=f"CPU threads ({cores})")
    parser.add_argument("--output", type=Path, metavar="NAME", help="NAME.json and NAME.html (new files in results/)")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace, sizes: Sizes, console: Console) -> Growth:
    """Each part on an engine of its own, so that none measures with what another left behind."""

    def say(what: str) -> None:
        console.print(what, highlight=False)

    text = read_tokens(options)
    say("batch")
    with open_engine(options, max(sizes.batches), ROW_TOKENS) as engine:
        batch = [StepTime(size, batch_step(engine, text, size, sizes.steps)) for size in sizes.batches]
    say("context")
    with open_engine(options, 1, max(sizes.contexts)) as engine:
        contexts = [size for size in sizes.contexts if size <= engine.limits.max_model_len]
        context = [StepTime(size, context_step(engine, text, size, sizes.steps)) for size in contexts]
    say("queue")
    with open_engine(options, QUEUE_BATCH, ROW_TOKENS) as engine:
        queue = [queue_time(engine, text, size, sizes.steps) for size in sizes.queues]
    say("shares")
    with open_engine(options, SHARE_BATCH, ROW_TOKENS) as engine:
        kinds = {"greedy": GREEDY, "temperature and top_p": SAMPLED}
        shares = {name: step_shares(engine, text, kind, sizes.steps) for name, kind in kinds.items()}
    say("memory")
    with open_engine(options, MEMORY_BATCH, ROW_TOKENS) as engine:
        memory = list(memory_over_requests(engine, text, sizes.requests, sizes.tokens_per_request))
    return Growth(batch, context, queue, shares, memory)


def read_tokens(options: argparse.Namespace) -> list[int]:
    from compiled_engine.engine.tokenizer import Tokenizer
    from compiled_engine.models import find_model

    return Tokenizer.from_folder(find_model(options.model).folder).encode(TEXT.read_text("utf-8"))


@contextmanager
def open_engine(options: argparse.Namespace, max_num_seqs: int, max_model_len: int) -> Iterator[Engine]:
    """An engine for at most ``max_num_seqs`` rows of ``max_model_len`` tokens, or of what the model can."""
    settings: dict[str, Any] = {
        "model": options.model,
        "dtype": options.dtype,
        "quantization": options.quantization,
        "piece_compiler": options.piece_compiler,
        "num_threads": options.threads,
        "max_num_seqs": max_num_seqs,
        "max_model_len": min(max_model_len, model_limit(options.model) or max_model_len),
    }
    engine = Engine.from_config(EngineConfig(**settings), Ledger())
    try:
        yield engine
    finally:
        engine.close()


def model_limit(model: str | None) -> int | None:
    from compiled_engine.models import find_model

    config = json.loads((find_model(model).folder / "config.json").read_text("utf-8"))
    limit = config.get("max_position_embeddings")
    return None if limit is None else int(limit)


def prompt(text: Sequence[int], number: int, num_tokens: int = PROMPT_TOKENS) -> list[int]:
    """``num_tokens`` tokens of the text, which is read in a circle. Different numbers begin at different places."""
    start = number * PROMPT_STRIDE
    return [text[(start + index) % len(text)] for index in range(num_tokens)]


def add(engine: Engine, prompts: Sequence[list[int]], new_tokens: int, sampling: Mapping[str, Any] = GREEDY) -> None:
    for ids in prompts:
        engine.add_request(ids, SamplingParams(max_tokens=new_tokens, ignore_eos=True, **sampling))


def batch_step(engine: Engine, text: Sequence[int], size: int, steps: int) -> float:
    """Median seconds of a step in which ``size`` requests get a token each."""
    start_decoding(engine, [prompt(text, number) for number in range(size)], steps)
    seconds = timed_steps(engine, steps)
    run_to_end(engine)
    return median(seconds)


def context_step(engine: Engine, text: Sequence[int], size: int, steps: int) -> float:
    """Median seconds of a step that adds one of the last tokens to a single request of ``size`` tokens.

    Longer prompts begin like shorter ones, so that the prefix cache saves computing most of them again.
    """
    start_decoding(engine, [prompt(text, 0, size - steps - SPARE_TOKENS)], steps)
    seconds = timed_steps(engine, steps)
    run_to_end(engine)
    return median(seconds)


def queue_time(engine: Engine, text: Sequence[int], waiting: int, steps: int) -> QueueTime:
    """Each step ends all running requests and admits the next ones, while about ``waiting`` others wait."""
    prompts = [prompt(text, number) for number in range(waiting + QUEUE_BATCH)]
    start = time.perf_counter()
    add(engine, prompts, new_tokens=1)
    add_s = (time.perf_counter() - start) / len(prompts)
    with stopwatch() as parts:
        scheduling = []
        for _ in range(min(steps, len(prompts) // QUEUE_BATCH)):
            engine.step()
            scheduling.append(parts.pop("scheduling"))
    engine.abort_all()
    return QueueTime(waiting, median(scheduling), add_s)


def step_shares(engine: Engine, text: Sequence[int], sampling: Mapping[str, Any], steps: int) -> dict[str, float]:
    """Median seconds of the parts of a step in which ``SHARE_BATCH`` requests get a token each."""
    start_decoding(engine, [prompt(text, number) for number in range(SHARE_BATCH)], steps, sampling)
    taken: dict[str, list[float]] = {name: [] for name in (*PARTS, REST)}
    with stopwatch() as parts:
        for _ in range(steps):
            parts.clear()
            (step_s,) = timed_steps(engine, 1)
            for name in PARTS:
                taken[name].append(parts[name])
            taken[REST].append(step_s - sum(parts.values()))
    run_to_end(engine)
    return {name: median(seconds) for name, seconds in taken.items()}


def memory_over_requests(engine: Engine, text: Sequence[int], requests: int, new_tokens: int) -> Iterator[Memory]:
    """Memory at the start, and again after each twentieth of ``requests``."""
    add(engine, [prompt(text, number) for number in range(requests)], new_tokens)
    yield Memory(0, resident_bytes())
    finished, next_reading = 0, requests / MEMORY_READINGS
    while engine.has_unfinished():
        finished += len(engine.step())
        if finished >= next_reading:
            yield Memory(finished, resident_bytes())
            next_reading += requests / MEMORY_READINGS


def start_decoding(
    engine: Engine, prompts: Sequence[list[int]], steps: int, sampling: Mapping[str, Any] = GREEDY
) -> None:
    """Add requests and run steps until one has given each of them a token and done nothing else.

    Their tokens last for ``steps`` more such steps, provided that prompts took no more than ``SPARE_TOKENS`` steps; if
    they took much longer, raises ``RuntimeError``.
    """
    add(engine, prompts, steps + SPARE_TOKENS, sampling)
    while engine.has_unfinished():
        computed, sampled = engine.num_computed_tokens, engine.num_sampled_tokens
        engine.step()
        if engine.num_computed_tokens - computed == engine.num_sampled_tokens - sampled == len(prompts):
            return
    raise RuntimeError(f"{len(prompts)} requests never decoded together: raise SPARE_TOKENS")


def timed_steps(engine: Engine, steps: int) -> list[float]:
    """Seconds of each of the next ``steps`` steps. Raises ``RuntimeError`` if a request ends in one of them."""
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        finished = engine.step()
        seconds.append(time.perf_counter() - start)
        if finished:
            raise RuntimeError(f"request {finished[0].request_id} ended while steps were timed: raise SPARE_TOKENS")
    return seconds


def run_to_end(engine: Engine) -> None:
    while engine.has_unfinished():
        engine.step()


@contextmanager
def stopwatch() -> Iterator[defaultdict[str, float]]:
    """Seconds spent in each of ``PARTS`` since the last ``clear``. Raises ``AttributeError`` if one is gone."""
    seconds: defaultdict[str, float] = defaultdict(float)
    with ExitStack() as patches:
        for part, functions in PARTS.items():
            for owner, name in functions:
                patches.enter_context(patch.object(owner, name, timed(getattr(owner, name), part, seconds)))
        yield seconds


def timed(function: Callable[..., Any], part: str, seconds: defaultdict[str, float]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*arguments, **named)
        finally:
            seconds[part] += time.perf_counter() - start

    return call


def resident_bytes() -> int:
    """Bytes of this process that are in memory now (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def summary(growth: Growth) -> Iterator[str]:
    for row in growth.batch:
        yield f"batch {row.size}: {row.step_s * MS:.1f} ms a step, {row.size / row.step_s:.0f} tokens/s"
    for row in growth.context:
        yield f"context {row.size}: {row.step_s * MS:.1f} ms a step"
    for entry in growth.queue:
        yield f"{entry.waiting} waiting: {entry.schedule_s * US:.0f} us to schedule, {entry.add_s * US:.0f} us to add"
    for kind, parts in growth.shares.items():
        total = sum(parts.values())
        yield f"batch {SHARE_BATCH}, {kind}: " + ", ".join(f"{name} {s / total:.1%}" for name, s in parts.items())
    first, last = growth.memory[0], growth.memory[-1]
    # Prefix caching fills the whole cache once, and only then touches all of the memory that was reserved for it.
    full = next(row for row in growth.memory if row.resident >= max(row.resident for row in growth.memory))
    yield (
        f"memory: {first.resident / MIB:.0f} MiB at first, {full.resident / MIB:.0f} after {full.finished} requests, "
        f"{last.resident / MIB:.0f} after {last.finished}"
    )


def plots_page(growth: Growth, options: argparse.Namespace) -> str:
    model = ", ".join(filter(None, (options.model or "the default model", options.dtype, options.quantization)))
    introduction = f"{describe_machine(options.threads)['cpu']}, {options.threads} threads; {model}. Times are medians."
    return page("How a step grows", introduction, list(figures(growth)))


def figures(growth: Growth) -> Iterator[tuple[str, str]]:
    sizes = [row.size for row in growth.batch]
    per_step = Series("a step", [(row.size, row.step_s * MS) for row in growth.batch])
    per_token = Series("a token of it", [(row.size, row.step_s * MS / row.size) for row in growth.batch])
    batch_axis, time_axis = Axis("requests in the batch", log=True, ticks=sizes), Axis("milliseconds", log=True)
    yield "Time against batch", line_plot(batch_axis, time_axis, [per_step, per_token])

    contexts = Series("a step of one request", [(row.size, row.step_s * MS) for row in growth.context])
    context_axis = Axis("tokens in the context", log=True, ticks=[row.size for row in growth.context])
    yield "Time against context", line_plot(context_axis, Axis("milliseconds"), [contexts])

    waiting = Series("to schedule a step", [(row.waiting, row.schedule_s * US) for row in growth.queue])
    adding = Series("to add a request", [(row.waiting, row.add_s * US) for row in growth.queue])
    queue_axis = Axis("requests waiting", log=True, ticks=[row.waiting for row in growth.queue])
    yield "Time against queue", line_plot(queue_axis, Axis("microseconds", log=True), [waiting, adding])

    memory = Series("resident", [(row.finished, row.resident / MIB) for row in growth.memory])
    yield "Memory over requests", line_plot(Axis("requests finished"), Axis("MiB"), [memory])

    panels = [
        Figure(name, "ms", False, {part: seconds * MS for part, seconds in parts.items()})
        for name, parts in growth.shares.items()
    ]
    title = f"Parts of a step at batch {SHARE_BATCH}"
    yield title, svg(title, panels)


if __name__ == "__main__":
    sys.exit(main())
