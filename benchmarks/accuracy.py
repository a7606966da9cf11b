"""What quantisation costs in quality: next-token distributions against those of float32, on a fixed text.

Every model reads ``accuracy_text.txt`` in windows of 512 tokens, each from its first token. At every position the whole
distribution over the vocabulary is compared with that of this engine in float32: the mean Kullback-Leibler divergence
KL(float32 || model) in nats, and how often both have the same likeliest token. transformers in float32 is the
independent check. Perplexity is that of the text itself; it says what KL means, and is noisier.

A GGUF file holds numbers that are quantised already, so 4 bits lose next to nothing of a 4-bit file. So that int4 is
seen at work, a second table measures a model as it might have been before: the same weights, each number that sits on a
4-bit grid moved by a random part of half a step either way. It stands for no published model; its float32 is its own
reference.

    python benchmarks/accuracy.py --windows 2
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from compiled_engine.compile.ledger import Ledger
from compiled_engine.config import EngineConfig
from compiled_engine.context import StepKind
from compiled_engine.models import find_model
from compiled_engine.ops.quantize import quantize_rows
from compiled_engine.runners.batch import ScheduledRequest
from compiled_engine.runners.cpu import CpuRunner
from compiled_engine.runners.inputs import build_step_inputs
from machine import describe_machine
from model_files import CACHE, HERE, ModelFiles, find_model_files

Logits = Callable[[Sequence[int]], torch.Tensor]
"""Token ids of a window to logits [num_tokens, vocab_size]: row i is what follows token i."""

REFERENCE, CHECK = "float32", "transformers"
TEXT = HERE / "accuracy_text.txt"
BLOCK_SIZE = 16
ROWS_AT_ONCE = 64
MIB = 2**20


class LogitsRunner(CpuRunner):
    """The engine's CPU runner for one sequence, giving the logits of all tokens instead of sampling after the last."""

    def __init__(self, config: EngineConfig) -> None:
        self.ledger = Ledger()
        super().__init__(config, find_model(config.model), self.ledger)

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take in memory, by the runner's ledger."""
        return next(phase.num_bytes or 0 for phase in self.ledger.phases if phase.name == "weights")

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits [num_tokens, vocab_size] of one sequence, computed in steps of ``max_num_batched_tokens``."""
        table = tuple(range(1, -(-len(token_ids) // BLOCK_SIZE) + 1))
        tables = (table,) * len(self.limits.cache_groups)
        size = self.limits.max_num_batched_tokens
        rows = []
        for start in range(0, len(token_ids), size):
            part = ScheduledRequest("text", tuple(token_ids[start : start + size]), start, tables, True)
            inputs = build_step_inputs([part], BLOCK_SIZE)
            inputs = replace(inputs, logits_indices=torch.arange(part.num_scheduled_tokens))
            rows.append(self._forward(inputs, StepKind.REAL))
        return torch.cat(rows)


@dataclass
class Sums:
    """What one model has collected over the windows so far; ``*_equal`` count positions."""

    positions: int = 0
    divergence: float = 0.0
    reference_equal: int = 0
    check_equal: int = 0
    text_positions: int = 0
    text_log_likelihood: float = 0.0

    def add(self, logits: torch.Tensor, reference: torch.Tensor, check: torch.Tensor, tokens: Sequence[int]) -> None:
        """Take one window. logits, reference, check: [num_tokens, vocab_size]; what follows the last token is unknown
        and does not count for the perplexity."""
        targets = torch.tensor([*tokens[1:], 0])
        for first in range(0, len(tokens), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            ours, expected = (part[rows].double().log_softmax(1) for part in (logits, reference))
            self.divergence += float((expected.exp() * (expected - ours)).sum())
            self.reference_equal += int((ours.argmax(1) == expected.argmax(1)).sum())
            self.check_equal += int((ours.argmax(1) == check[rows].argmax(1)).sum())
            known = min(len(ours), len(tokens) - 1 - first)
            self.text_log_likelihood += float(ours[:known].gather(1, targets[rows][:known, None]).sum())
            self.text_positions += known
        self.positions += len(tokens)

    def accuracy(self, weight_bytes: int | None, num_weights: int) -> Accuracy:
        """The means; perplexity per token."""
        return Accuracy(
            weight_bytes=weight_bytes,
            bits_per_weight=None if weight_bytes is None else 8 * weight_bytes / num_weights,
            divergence=self.divergence / self.positions,
            reference_agreement=self.reference_equal / self.positions,
            check_agreement=self.check_equal / self.positions,
            perplexity=float(torch.tensor(-self.text_log_likelihood / self.text_positions).exp()),
        )


@dataclass(frozen=True)
class Accuracy:
    """One row of the table. divergence: mean KL(float32 || model), nats. Agreements: share of positions at which the
    likeliest token is that of this engine in float32, and of transformers in float32."""

    weight_bytes: int | None
    bits_per_weight: float | None
    divergence: float
    reference_agreement: float
    check_agreement: float
    perplexity: float


@dataclass(frozen=True)
class Candidate:
    """A model to measure: what it is called, where its weights are and how the engine is to store them."""

    name: str
    model: str
    quantization: str | None


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    console = Console(stderr=True)
    files = find_model_files(options.model)
    tables = {"as it is": measure(files.folder, candidates_of(files), options, console)}
    if files.gguf_file is not None:
        folder = spread_folder(files.folder)
        tables["before 4 bits"] = measure(folder, candidates_of(ModelFiles(folder, None)), options, console)
    for title, rows in tables.items():
        Console().print(accuracy_table(f"{files.folder.name}, {title}", rows))
    result = {
        "made_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": describe_machine(options.threads),
        "model": str(files.gguf_file or files.folder),
        "options": {name: value for name, value in vars(options).items() if name != "json"},
        "tables": {title: {name: asdict(row) for name, row in rows.items()} for title, rows in tables.items()},
    }
    path = options.json or HERE / "results" / time.strftime("accuracy-%Y%m%d-%H%M%S.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"written: {path}", highlight=False, soft_wrap=True)
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what quantisation changes in next-token distributions.")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--model", metavar="M", help="folder, GGUF file or hub id (the default model)")
    parser.add_argument("--windows", type=int, metavar="N", help="read only the first N windows of the text")
    parser.add_argument("--window-tokens", type=int, default=512, metavar="N", help="tokens of a window (512)")
    parser.add_argument(
        "--step-tokens",
        type=int,
        default=512,
        metavar="N",
        help="tokens computed in one step (512); few take the kernels that decoding takes",
    )
    parser.add_argument("--piece-compiler", default="aoti", help="as in EngineConfig (aoti)")
    parser.add_argument("--threads", type=int, default=cores, metavar="N", help=f"CPU threads ({cores})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the result goes (a new file in results/)")
    return parser.parse_args(arguments)


def candidates_of(files: ModelFiles) -> list[Candidate]:
    folder = str(files.folder)
    stored = [] if files.gguf_file is None else [Candidate("GGUF blocks", str(files.gguf_file), None)]
    return [
        Candidate(REFERENCE, folder, None),
        *stored,
        Candidate("int8", folder, "int8"),
        Candidate("int4", folder, "int4"),
    ]


def measure(
    folder: Path, candidates: Sequence[Candidate], options: argparse.Namespace, console: Console
) -> dict[str, Accuracy]:
    """Read the text with all ``candidates``, the first of which is the reference, and with transformers.

    folder: for the tokenizer and for transformers.
    """
    windows = read_windows(folder, options.window_tokens)[: options.windows]
    with ExitStack() as open_models:
        runners = {}
        for candidate in candidates:
            console.print(f"opening {candidate.name}", highlight=False)
            runners[candidate.name] = open_models.enter_context(open_runner(candidate, options))
        console.print(f"opening {CHECK}", highlight=False)
        check = TransformersLogits(folder)
        models: dict[str, Logits] = {name: runner.logits for name, runner in runners.items()}
        models[CHECK] = check
        weight_bytes = {name: runner.weight_bytes for name, runner in runners.items()}
        sums = read_text(models, windows, console)
    count = sum(parameter.numel() for parameter in check.parameters())
    weight_bytes[CHECK] = sum(parameter.nbytes for parameter in check.parameters())
    return {name: total.accuracy(weight_bytes[name], count) for name, total in sums.items()}


def read_windows(folder: Path, window_tokens: int) -> list[list[int]]:
    """The text cut into windows; a remainder of less than half a window is left out."""
    (ids,) = ModelFiles(folder, None).tokenize([TEXT.read_text("utf-8")])
    windows = [ids[first : first + window_tokens] for first in range(0, len(ids), window_tokens)]
    return [window for window in windows if 2 * len(window) >= window_tokens]


@contextmanager
def open_runner(candidate: Candidate, options: argparse.Namespace) -> Iterator[LogitsRunner]:
    settings: dict[str, Any] = {
        "model": candidate.model,
        "quantization": candidate.quantization,
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "max_model_len": options.window_tokens,
        "max_num_seqs": 1,
        "max_num_batched_tokens": options.step_tokens,
        "num_threads": options.threads,
        "piece_compiler": options.piece_compiler,
    }
    runner = LogitsRunner(EngineConfig(**settings))
    try:
        yield runner
    finally:
        runner.close()


class TransformersLogits:
    """transformers' own model and attention in float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def __call__(self, token_ids: Sequence[int]) -> torch.Tensor:
        return self._model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]

    def parameters(self) -> Iterator[torch.Tensor]:
        """Every parameter once, tied ones too."""
        yield from self._model.parameters()


def read_text(models: Mapping[str, Logits], windows: Sequence[list[int]], console: Console) -> dict[str, Sums]:
    """Every window through every model, one window at a time: no more than its logits is kept."""
    sums = {name: Sums() for name in models}
    for number, tokens in enumerate(windows, start=1):
        console.print(f"window {number} of {len(windows)}", highlight=False)
        reference, check = models[REFERENCE](tokens), models[CHECK](tokens)
        for name, model in models.items():
            logits = {REFERENCE: reference, CHECK: check}.get(name)
            sums[name].add(model(tokens) if logits is None else logits, reference, check, tokens)
    return sums


def spread_folder(folder: Path) -> Path:
    """A copy of the model in ``folder`` in which weights that sit on 4-bit grids are spread over the grids' steps.

    Made once, beside the other models of the benchmarks.
    """
    from safetensors.torch import load_file, save_file

    spread = CACHE / f"{folder.name}-spread"
    if spread.is_dir():
        return spread
    unfinished = spread.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(folder, unfinished)
    random = torch.Generator().manual_seed(0)
    for file in unfinished.glob("*.safetensors"):
        weights = {name: spread_weight(weight, random) for name, weight in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})
    unfinished.rename(spread)
    return spread


def spread_weight(weight: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """``weight``, and where it is a matrix on a 4-bit grid, plus uniform noise of half a step either way."""
    if weight.dim() != 2:
        return weight
    grid = quantize_rows(weight, 4)
    # float32 forms of one grid may differ in the last digits.
    if grid.bits != 4 or not torch.allclose(
        grid.dequantize(), weight, rtol=1e-6, atol=1e-6 * float(weight.abs().max())
    ):
        return weight
    noise = torch.rand(weight.shape, generator=random) - 0.5
    return weight + noise * grid.scales.float().repeat_interleave(grid.group_size, 1)


def accuracy_table(title: str, rows: Mapping[str, Accuracy]) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("weights", no_wrap=True)
    for column in (
        "bits per\nweight",
        "weights\nMiB",
        "KL\nnats",
        "top 1 as\nfloat32",
        "top 1 as\ntransf.",
        "ppl",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for name, row in rows.items():
        table.add_row(
            name,
            "-" if row.bits_per_weight is None else f"{row.bits_per_weight:.2f}",
            "-" if row.weight_bytes is None else f"{row.weight_bytes / MIB:.1f}",
            f"{row.divergence:.2e}",
            f"{row.reference_agreement:.2%}",
            f"{row.check_agreement:.2%}",
            f"{row.perplexity:.3f}",
        )
    return table


if __name__ == "__main__":
    raise SystemExit(main())
