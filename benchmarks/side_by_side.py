"""The driver of the benchmarks: the same prompts through several engines, greedy, on this machine's CPU.

Each round measures the engines one after the other, never two at once, each in a process of its own with the Python
of its own environment: its peak memory is its own and no thread pool of another spins beside it. Every other round
runs in reversed order, and the tables show medians over the rounds.

How the rates are made: every batch is run once with 1 new token and once with all of them. Prompt tokens per second
come from the first run, new tokens per second end to end from the second, and those of decoding alone from the
difference of the two. A warm-up run of 2 tokens goes before. End tokens are ignored everywhere, so that all engines
make exactly the same number of tokens. No engine may keep a prefix cache. Prompts are given as token ids, so that all
read the same; turning the new ones into text is inside the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bar_chart import svg
from busy import BusyClock
from catalogue import ENGINES, REFERENCE, EngineEntry
from figures import number
from machine import cpu_name, describe_machine
from model_files import HERE, ModelFiles, find_model_files
from report_tables import rate_figures, show, single_figures
from summary import Summary, compare_texts, summarise
from task import Report, Task, read_report, write_json

LONG_PROMPT_TOKENS = 512


@dataclass(frozen=True)
class Measured:
    """One engine's report in one round, and the share of all CPU time that other processes took meanwhile."""

    report: Report
    others_cpu: float | None


def main(name: str, engines: Sequence[str], rounds: int, arguments: Sequence[str] | None = None) -> int:
    """Measure and write ``name-<time>.json`` and ``.svg``. The exit code is 0 unless an engine failed to run."""
    options = parse_arguments(name, engines, rounds, arguments)
    console = Console(stderr=True)
    files = find_model_files(options.model)
    entries = [ENGINES[engine] for engine in options.engines]
    refuse_missing(entries, files)
    task = make_task(options, files)
    measured, failed = run_rounds(entries, task, options.rounds, console)
    result: dict[str, Any] = {
        "made_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": describe_machine(options.threads),
        "model": (files.gguf_file or files.folder).name,
        "new_tokens": task.new_tokens,
        "long_prompt_tokens": len(task.long_prompt),
        "failed": failed,
    }
    path = options.json or HERE / "results" / time.strftime(f"{name}-%Y%m%d-%H%M%S.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    if measured:
        result |= publish(measured, task, path.with_suffix(".svg"))
    path.write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"written: {path}", highlight=False, soft_wrap=True)
    return 1 if failed else 0


def parse_arguments(
    name: str, engines: Sequence[str], rounds: int, arguments: Sequence[str] | None
) -> argparse.Namespace:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = argparse.ArgumentParser(
        prog=f"{name}.py",
        description="Measure engines side by side with the same prompts. The figures never decide the exit code.",
    )
    add = parser.add_argument
    add("--engines", nargs="+", choices=list(ENGINES), default=list(engines), metavar="E", help=", ".join(ENGINES))
    add("--batch", type=positive, nargs="+", default=[1, 8, 32], metavar="N", help="batch sizes (1 8 32)")
    add("--rounds", type=positive, default=rounds, metavar="N", help=f"rounds; the tables show medians ({rounds})")
    add("--new-tokens", type=at_least_two, default=64, metavar="N", help="new tokens per prompt (64)")
    add("--model", metavar="M", help="folder, GGUF file or hub id (the default model)")
    add("--threads", type=positive, default=cores, metavar="N", help=f"CPU threads of every engine ({cores})")
    add("--json", type=Path, metavar="FILE", help="where the result goes (a new file in results/)")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def at_least_two(text: str) -> int:
    # One token is the prefill alone: there would be no decoding to measure.
    number = int(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"{text} is less than 2")
    return number


def refuse_missing(entries: Sequence[EngineEntry], files: ModelFiles) -> None:
    """Exit before the first round rather than after an hour."""
    problems = [f"{entry.name}: there is no {entry.python}" for entry in entries if not entry.python.exists()]
    if problems:
        problems.append("`make bench-peers` makes the peers' environments; --engines chooses among them")
    if files.gguf_file is None:
        problems += [f"{entry.name} reads GGUF files only" for entry in entries if entry.needs_gguf]
    if problems:
        sys.exit("\n".join(problems))


def make_task(options: argparse.Namespace, files: ModelFiles) -> Task:
    """What all engines are asked; ``Task.for_engine`` adds what differs."""
    prompts = files.tokenize((HERE / "prompts.txt").read_text().splitlines())
    long_prompt = [token for prompt in prompts for token in prompt][:LONG_PROMPT_TOKENS]
    row_tokens = max(map(len, prompts)) + options.new_tokens
    return Task(
        module="",
        options={},
        model_folder=str(files.folder),
        gguf_file=str(files.gguf_file) if files.gguf_file else None,
        prompts=prompts,
        long_prompt=long_prompt,
        batch_sizes=options.batch,
        new_tokens=options.new_tokens,
        threads=options.threads,
        row_tokens=row_tokens,
        max_model_len=-(-max(row_tokens, len(long_prompt) + 1) // 128) * 128,
        token_floats=files.token_floats(),
        started_at=0.0,
    )


def run_rounds(
    entries: Sequence[EngineEntry], task: Task, rounds: int, console: Console
) -> tuple[dict[str, list[Measured]], list[str]]:
    """Reports of every engine that ran, and the names of those that failed; these are not started again."""
    measured: dict[str, list[Measured]] = {entry.name: [] for entry in entries}
    failed: list[str] = []
    for index in range(rounds):
        for entry in entries if index % 2 == 0 else entries[::-1]:
            if entry.name in failed:
                continue
            console.print(f"round {index + 1} of {rounds}: {entry.name}", highlight=False)
            one = run_worker(entry, task)
            if one is None:
                failed.append(entry.name)
            else:
                measured[entry.name].append(one)
                console.print(f"  {one_line(one)}", highlight=False, soft_wrap=True)
    return {name: reports for name, reports in measured.items() if reports}, failed


def run_worker(entry: EngineEntry, shared: Task) -> Measured | None:
    """Measure one engine in a new process. None when it failed; what it said is on stderr."""
    with tempfile.TemporaryDirectory() as folder:
        task_path, report_path = Path(folder) / "task.json", Path(folder) / "report.json"
        command = [str(entry.python), str(HERE / "engines" / "worker.py"), str(task_path), str(report_path)]
        clock = BusyClock.start()
        write_json(task_path, shared.for_engine(entry.module, dict(entry.options), time.monotonic()))
        finished = subprocess.run(
            command,
            env=entry.environment(shared.threads),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            check=False,
        )
        if finished.returncode or not report_path.exists():
            print(f"{entry.name} failed with exit code {finished.returncode}", file=sys.stderr)
            return None
        return Measured(read_report(report_path), clock.others_share())


def one_line(one: Measured) -> str:
    rates = summarise([one.report]).rates
    speeds = ", ".join(f"{number(rate.output)} at batch {size}" for size, rate in rates.items())
    others = "" if one.others_cpu is None else f"; other processes took {one.others_cpu:.0%} of the CPUs"
    return f"new tokens per second {speeds}{others}"


def publish(measured: dict[str, list[Measured]], task: Task, chart_path: Path) -> dict[str, Any]:
    """Print the tables, draw the chart, and return what the JSON file says of the engines."""
    reports = {engine: [one.report for one in rounds] for engine, rounds in measured.items()}
    summaries = {engine: summarise(rounds) for engine, rounds in reports.items()}
    agreements = compare_texts(reports, REFERENCE)
    show(Console(), summaries, agreements, len(task.long_prompt))
    chart_path.write_text(draw(summaries, task))
    return {
        "medians": {engine: asdict(summary) for engine, summary in summaries.items()},
        "agreement": [asdict(agreement) for agreement in agreements],
        "rounds": {engine: [round_data(one) for one in rounds] for engine, rounds in measured.items()},
    }


def draw(summaries: dict[str, Summary], task: Task) -> str:
    title = f"{Path(task.gguf_file or task.model_folder).name} on {cpu_name()}, {task.threads} threads"
    rates = [replace(figure, label=f"new tokens, {figure.label}") for figure in rate_figures(summaries, "output")]
    return svg(title, [*rates, *single_figures(summaries, len(task.long_prompt))])


def round_data(one: Measured) -> dict[str, Any]:
    data = asdict(one.report)
    for batch in data["batches"]:
        del batch["token_ids"]
        if batch["batch_size"] > 1:
            del batch["token_gaps_s"]
    return data | {"others_cpu": one.others_cpu}
