"""This engine and transformers' ``generate`` side by side: the same prompts, greedy, float32, on this machine's CPU.

Each round measures both engines one after the other, never both at once, each in a process of its own: its peak
memory is its own and no thread pool of the other spins beside it. Rounds alternate which engine goes first, and the
table shows medians over the rounds.

How the rates are made: every batch is run once with 1 new token and once with all of them. Prompt tokens per second
come from the first run, output tokens per second from the second, end to end with tokenizing and detokenizing, and
decoded tokens per second from the difference of the two. A warm-up run of 2 tokens goes before. End tokens are
ignored on both sides, so that both make exactly the same number of tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from worker import ENGINES, BatchReport, Report, Task, Texts

HERE = Path(__file__).resolve().parent
OURS, THEIRS = "compiled_engine", "transformers"
FLOAT32_BYTES = 4
BLOCK_SIZE = 16
MIB = 2**20


@dataclass(frozen=True)
class Rates:
    """Medians over the rounds of one engine at one batch size, in tokens per second."""

    prompt: float
    output: float
    decoded: float | None


@dataclass(frozen=True)
class Agreement:
    """How many of a batch's texts are the same in both engines, and the token where each of the others parts."""

    batch_size: int
    same_prompts: bool
    equal_texts: int
    first_differences: dict[int, int]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    console = Console(stderr=True)
    model_folder = find_folder(options.model)
    weights_bytes = parameter_count(model_folder) * FLOAT32_BYTES
    max_model_len = choose_max_model_len(options.new_tokens)
    cache_bytes = kv_cache_bytes(model_folder, max_model_len, max(options.batch))
    reports: dict[str, list[Report]] = {engine: [] for engine in options.only}
    failed: list[str] = []
    for number in range(options.rounds):
        order = options.only if number % 2 == 0 else options.only[::-1]
        for engine in order:
            console.print(f"round {number + 1} of {options.rounds}: {engine}", highlight=False)
            report = run_worker(engine, options, model_folder, max_model_len, cache_bytes)
            if report is None:
                failed.append(engine)
            else:
                reports[engine].append(report)
    reports = {engine: rounds for engine, rounds in reports.items() if rounds}
    agreements = compare_texts(reports)
    show(Console(), reports, agreements, weights_bytes, cache_bytes, options)
    result = {
        "made_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": describe_machine(options.threads),
        "options": {"model": str(model_folder), "new_tokens": options.new_tokens, "max_model_len": max_model_len},
        "weights_bytes_float32": weights_bytes,
        "kv_cache_bytes": cache_bytes,
        "medians": {engine: medians(rounds) for engine, rounds in reports.items()},
        "agreement": [asdict(agreement) for agreement in agreements],
        "rounds": {engine: [without_texts(report) for report in rounds] for engine, rounds in reports.items()},
        "failed": failed,
    }
    path = options.json or HERE / "results" / time.strftime("offline-%Y%m%d-%H%M%S.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"written: {path}", highlight=False, soft_wrap=True)
    return 1 if failed else 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measure this engine and transformers' generate with the same prompts. The figures never decide "
        "the exit code: it is 0 unless an engine failed to run.",
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument(
        "--batch", type=positive, nargs="+", default=[1, 8, 32], metavar="N", help="batch sizes (1 8 32)"
    )
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="rounds; the table shows medians (3)")
    parser.add_argument("--new-tokens", type=at_least_two, default=64, metavar="N", help="new tokens per prompt (64)")
    parser.add_argument("--model", metavar="M", help="folder, GGUF file or hub id (the default model)")
    parser.add_argument("--only", choices=sorted(ENGINES), help="measure one engine alone")
    parser.add_argument("--threads", type=positive, default=cores, metavar="N", help=f"CPU threads for both ({cores})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the result goes (a new file in results/)")
    options = parser.parse_args(arguments)
    options.only = [options.only] if options.only else [OURS, THEIRS]
    return options


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


def find_folder(model: str | None) -> Path:
    """Folder of the model. Found in a process of its own: a first conversion would leave its memory in this one."""
    program = "import sys; from compiled_engine.models import find_model; print(find_model(*sys.argv[1:]).folder)"
    command = [sys.executable, "-c", program, *([model] if model else [])]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if found.returncode:
        sys.exit("the model was not found: see the message above")
    return Path(found.stdout.splitlines()[-1])


def parameter_count(folder: Path) -> int:
    """Numbers in the folder's safetensors files, read from their headers (8 bytes of length, then JSON)."""
    count = 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        count += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return count


def choose_max_model_len(new_tokens: int) -> int:
    """Room for the longest shipped prompt, about 120 tokens, and the new tokens, in steps of 128."""
    return -(-(128 + new_tokens) // 128) * 128


def kv_cache_bytes(folder: Path, max_model_len: int, max_num_seqs: int) -> int | None:
    """Bytes of a float32 cache that holds every request at full length, and the reserved block.

    None for a model whose config does not say it in the usual words; the engine then chooses the size itself.
    """
    config = json.loads((folder / "config.json").read_text())
    try:
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
    except KeyError:
        return None
    blocks = max_num_seqs * -(-max_model_len // BLOCK_SIZE) + 1
    return int(blocks * BLOCK_SIZE * 2 * layers * kv_heads * head_dim * FLOAT32_BYTES)


def run_worker(
    engine: str, options: argparse.Namespace, model_folder: Path, max_model_len: int, cache_bytes: int | None
) -> Report | None:
    """Measure one engine in a new process. None when it failed; what it said is on stderr."""
    with tempfile.TemporaryDirectory() as folder:
        report_path = Path(folder) / "report.json"
        task = Task(
            engine=engine,
            model_folder=str(model_folder),
            prompts=(HERE / "prompts.txt").read_text().splitlines(),
            batch_sizes=options.batch,
            new_tokens=options.new_tokens,
            threads=options.threads,
            max_model_len=max_model_len,
            kv_cache_bytes=cache_bytes,
            report_path=str(report_path),
            started_at=time.monotonic(),
        )
        environment = os.environ | {
            "OMP_NUM_THREADS": str(options.threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [sys.executable, str(HERE / "worker.py"), json.dumps(asdict(task))]
        finished = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
        if finished.returncode or not report_path.exists():
            print(f"{engine} failed with exit code {finished.returncode}", file=sys.stderr)
            return None
        return read_report(json.loads(report_path.read_text()))


def read_report(data: dict[str, Any]) -> Report:
    batches = [BatchReport(**(entry | {"texts": Texts(**entry["texts"])})) for entry in data["batches"]]
    return Report(**(data | {"batches": batches}))


def rates(batches: Sequence[BatchReport]) -> Rates:
    """Medians over the rounds of one batch size."""
    decoding = [
        (batch.output_tokens - batch.batch_size) / (batch.all_tokens_s - batch.first_token_s)
        for batch in batches
        if batch.all_tokens_s > batch.first_token_s
    ]
    return Rates(
        prompt=statistics.median(batch.prompt_tokens / batch.first_token_s for batch in batches),
        output=statistics.median(batch.output_tokens / batch.all_tokens_s for batch in batches),
        decoded=statistics.median(decoding) if decoding else None,
    )


def by_batch_size(rounds: Sequence[Report]) -> dict[int, Rates]:
    return {
        first.batch_size: rates([report.batches[index] for report in rounds])
        for index, first in enumerate(rounds[0].batches)
    }


def medians(rounds: Sequence[Report]) -> dict[str, Any]:
    return {
        "versions": rounds[0].versions,
        "startup_s": statistics.median(report.startup_s for report in rounds),
        "peak_rss_at_ready": statistics.median(report.peak_rss_at_ready for report in rounds),
        "peak_rss": statistics.median(report.peak_rss for report in rounds),
        "tokens_per_s": {size: asdict(entry) for size, entry in by_batch_size(rounds).items()},
    }


def compare_texts(reports: dict[str, list[Report]]) -> list[Agreement]:
    """The first round of each engine, batch by batch. Empty when only one engine ran."""
    if set(reports) != {OURS, THEIRS}:
        return []
    pairs = zip(reports[OURS][0].batches, reports[THEIRS][0].batches, strict=True)
    return [compare_batch(ours, theirs) for ours, theirs in pairs]


def compare_batch(ours: BatchReport, theirs: BatchReport) -> Agreement:
    rows = zip(ours.texts.output_token_ids, theirs.texts.output_token_ids, strict=True)
    differences = {}
    for index, (our_row, their_row) in enumerate(rows):
        parted = [place for place, (a, b) in enumerate(zip(our_row, their_row, strict=True)) if a != b]
        if parted:
            differences[index] = parted[0]
    same_prompts = ours.texts.prompt_token_ids == theirs.texts.prompt_token_ids
    return Agreement(ours.batch_size, same_prompts, ours.batch_size - len(differences), differences)


def without_texts(report: Report) -> dict[str, Any]:
    data = asdict(report)
    for batch in data["batches"]:
        del batch["texts"]
    return data


def describe_machine(threads: int) -> dict[str, Any]:
    return {"cpu": cpu_name(), "threads": threads, "system": platform.platform(), "python": platform.python_version()}


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def show(
    console: Console,
    reports: dict[str, list[Report]],
    agreements: Iterable[Agreement],
    weights_bytes: int,
    cache_bytes: int | None,
    options: argparse.Namespace,
) -> None:
    """Print the tables: speed, start-up and memory, and whether the texts agree."""
    console.print(f"{cpu_name()}, {options.threads} threads; {options.new_tokens} new tokens, {options.rounds} rounds")
    console.print(speed_table({engine: by_batch_size(rounds) for engine, rounds in reports.items()}))
    console.print(memory_table(reports, weights_bytes, cache_bytes))
    for entry in agreements:
        console.print(agreement_line(entry), highlight=False)


def speed_table(speeds: dict[str, dict[int, Rates]]) -> Table:
    table = Table(title="Tokens per second (medians); ratio = compiled_engine / transformers")
    table.add_column("batch", justify="right")
    table.add_column("what")
    for engine in speeds:
        table.add_column(engine, justify="right")
    table.add_column("ratio", justify="right")
    for size in next(iter(speeds.values()), {}):
        for what in ("prompt", "decoded", "output"):
            values = {engine: getattr(rows[size], what) for engine, rows in speeds.items()}
            ours, theirs = values.get(OURS), values.get(THEIRS)
            ratio = f"{ours / theirs:.2f}" if ours and theirs else "-"
            label = "output, end to end" if what == "output" else what
            cells = ["-" if value is None else f"{value:.1f}" for value in values.values()]
            table.add_row(str(size), label, *cells, ratio, end_section=what == "output")
    return table


def memory_table(reports: dict[str, list[Report]], weights_bytes: int, cache_bytes: int | None) -> Table:
    table = Table(title="Start-up in seconds, memory in MiB (medians); rest = peak - weights - cache")
    table.add_column("engine", no_wrap=True)
    for column in ("start-up", "peak at ready", "peak", "weights", "cache", "rest"):
        table.add_column(column, justify="right")
    for engine, rounds in reports.items():
        middle = medians(rounds)
        # transformers' cache grows with the texts; only this engine's is a known amount, reserved at the start.
        cache = cache_bytes if engine == OURS else None
        rest = middle["peak_rss"] - weights_bytes - cache if cache is not None else None
        amounts = [middle["peak_rss_at_ready"], middle["peak_rss"], weights_bytes, cache, rest]
        cells = ["-" if amount is None else f"{amount / MIB:.0f}" for amount in amounts]
        table.add_row(engine, f"{middle['startup_s']:.1f}", *cells)
    return table


def agreement_line(entry: Agreement) -> str:
    line = f"batch {entry.batch_size}: {entry.equal_texts} of {entry.batch_size} texts have the same token ids"
    if entry.first_differences:
        places = ", ".join(f"{index} at {place}" for index, place in entry.first_differences.items())
        line += f"; first difference (text at token): {places}"
    return line if entry.same_prompts else line + "; the engines read different prompt tokens"


if __name__ == "__main__":
    sys.exit(main())
