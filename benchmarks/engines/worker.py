"""One engine, measured in a process of its own: start it, time it at every batch size, read its peak memory.

The driver starts this file with the Python of the engine's environment: ``python worker.py TASK.json REPORT.json``.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from memory import peak_memory
from task import BatchReport, Engine, Report, Task, read_task, write_json

WARM_UP_TOKENS = 2
LONG_PROMPT_CALLS = 3


def run(task: Task) -> Report:
    engine: Engine = importlib.import_module(task.module).open_engine(task)
    startup_s = time.monotonic() - task.started_at
    at_ready = peak_memory()
    long_prompt_s = measure_long_prompt(engine, task.long_prompt)
    batches = [measure_batch(engine, prompts_of(task, size), task.new_tokens) for size in task.batch_sizes]
    report = Report(engine.versions(), startup_s, at_ready, peak_memory(), long_prompt_s, batches)
    engine.close()
    return report


def prompts_of(task: Task, size: int) -> list[list[int]]:
    return [task.prompts[index % len(task.prompts)] for index in range(size)]


def measure_long_prompt(engine: Engine, prompt: list[int]) -> float:
    """Median seconds to the first token, after one call to warm up."""
    engine.generate([prompt], 1)
    seconds = []
    for _ in range(LONG_PROMPT_CALLS):
        start = time.perf_counter()
        engine.generate([prompt], 1)
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def measure_batch(engine: Engine, prompts: Sequence[list[int]], new_tokens: int) -> BatchReport:
    """Time one batch twice, with one new token and with all of them; the difference is what decoding takes."""
    engine.generate(prompts, min(WARM_UP_TOKENS, new_tokens))
    start = time.perf_counter()
    engine.generate(prompts, 1)
    middle = time.perf_counter()
    completions = engine.generate(prompts, new_tokens)
    end = time.perf_counter()
    made = [len(row) for row in completions.token_ids]
    if made != [new_tokens] * len(prompts) or len(completions.times) != new_tokens:
        raise RuntimeError(
            f"wanted {new_tokens} tokens for each of {len(prompts)} prompts, got {made} with "
            f"{len(completions.times)} times"
        )
    return BatchReport(
        batch_size=len(prompts),
        prompt_tokens=sum(map(len, prompts)),
        output_tokens=sum(made),
        first_token_s=middle - start,
        all_tokens_s=end - middle,
        token_gaps_s=[later - earlier for earlier, later in pairwise(completions.times)],
        token_ids=completions.token_ids,
    )


if __name__ == "__main__":
    task_path, report_path = map(Path, sys.argv[1:])
    write_json(report_path, run(read_task(task_path)))
