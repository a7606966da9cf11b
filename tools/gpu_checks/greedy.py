"""Greedy tokens in every graph mode against transformers' ``generate``, in float32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compiled_engine.compile.graphs.keys import GraphMode
from compiled_engine.engine.core import Engine
from compiled_engine.runners.base import Runner, RunnerLimits
from compiled_engine.runners.batch import ScheduledBatch, StepOutput
from compiled_engine.runners.gpu import GpuRunner, shape_of
from compiled_engine.runners.inputs import build_step_inputs
from gpu_checks.lab import Lab, load_transformers_model, make_prompts, write
from gpu_checks.report import Outcome, passed_if

_NEAR_TIE = 2e-4
"""Two tokens whose logits differ by less than this share of the range of all logits: float32 may take either."""


@dataclass(frozen=True)
class _Difference:
    """Where tokens part: prompt ``row`` of a batch, at its new token ``index``."""

    batch: int
    row: int
    index: int
    token: int


def check(lab: Lab) -> Outcome:
    """Batches of several sizes of mixed prompts, longer ones in chunks; caches hold NaN at first."""
    sizes = lab.sizes
    folder = lab.model or lab.random_llama(min(sizes.layers, 2), torch.float32)
    model = load_transformers_model(folder, torch.float32, lab.device)
    prompts = make_prompts(max(sizes.greedy_batches), 1, sizes.longest_prompt, model.config.vocab_size)
    expected = [_generate(model, prompt, sizes.greedy_tokens) for prompt in prompts]
    del model
    rows, differences = [], []
    for mode in GraphMode:
        row, found = _run_mode(lab, folder, mode, prompts, expected)
        rows.append(row)
        differences += [(mode, difference) for difference in found]
    faults, num_ties = _judge(lab, folder, prompts, expected, differences)
    compared = sum(sizes.greedy_batches) * sizes.greedy_tokens
    summary = f"{len(rows)} modes write transformers' {compared} tokens in batches of {sorted(sizes.greedy_batches)}"
    if num_ties:
        summary += f", but for {num_ties} texts that part at a near tie"
    figures = {
        "model": "given" if lab.model else "random",
        "near_ties": num_ties,
        "distinct_tokens": _distinct(expected),
    }
    return passed_if(faults, summary, figures=figures, rows=rows)


class _CountingRunner(Runner):
    """Counts which kind of graph serves each step of ``runner``."""

    def __init__(self, runner: GpuRunner) -> None:
        self._runner = runner
        self.served: Counter[str] = Counter()

    @property
    def limits(self) -> RunnerLimits:
        return self._runner.limits

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        key = self._runner.decide(shape_of(build_step_inputs(batch.requests, self.limits.block_size))).key
        self.served["eager" if key is None else key.kind.value] += 1
        return self._runner.execute(batch)

    def close(self) -> None:
        self._runner.close()


def _run_mode(
    lab: Lab, folder: Path, mode: GraphMode, prompts: Sequence[list[int]], expected: Sequence[list[int]]
) -> tuple[dict[str, Any], list[_Difference]]:
    sizes = lab.sizes
    largest = max(sizes.greedy_batches)
    settings: dict[str, Any] = {
        "graph_mode": mode.value,
        "dtype": "float32",
        "max_num_seqs": largest,
        "max_num_batched_tokens": 64,
        "max_model_len": sizes.longest_prompt + sizes.greedy_tokens + 1,
        # Batches between these sizes are padded, and steps of more than 48 tokens fit no graph.
        "graph_sizes": (1, 2, 4, 8, 16, 32),
        "max_graph_size": 48,
    }
    found = []
    with lab.runner(folder, **settings) as runner:
        for layer in runner.static_context.values():
            layer.kv_cache.fill_(float("nan"))
        counting = _CountingRunner(runner)
        engine = Engine(counting, enable_prefix_caching=False)
        for batch in sizes.greedy_batches:
            texts = write(engine, prompts[:batch], sizes.greedy_tokens)
            found += _differences(batch, texts, expected)
        num_graphs = len(runner.graph_records)
    served = {f"{kind}_steps": counting.served[kind] for kind in ("full", "piecewise", "eager")}
    return {"mode": mode.value, "graphs": num_graphs, **served, "texts_that_differ": len(found)}, found


def _differences(batch: int, texts: Sequence[list[int]], expected: Sequence[list[int]]) -> list[_Difference]:
    found = []
    for row, text in enumerate(texts):
        index = next(
            (i for i, (ours, theirs) in enumerate(zip(text, expected[row], strict=True)) if ours != theirs), None
        )
        if index is not None:
            found.append(_Difference(batch, row, index, text[index]))
    return found


def _judge(
    lab: Lab,
    folder: Path,
    prompts: Sequence[list[int]],
    expected: Sequence[list[int]],
    differences: Sequence[tuple[GraphMode, _Difference]],
) -> tuple[list[str], int]:
    """The differences that are faults, and how many are near ties by the logits of a float64 run."""
    if not differences:
        return [], 0
    model = load_transformers_model(folder, torch.float64, lab.device)
    faults = []
    for mode, found in differences:
        ids = torch.tensor([prompts[found.row] + expected[found.row][: found.index]], device=lab.device)
        with torch.inference_mode():
            logits = model(ids, use_cache=False).logits[0, -1]
        gap = float((logits.max() - logits[found.token]) / (logits.max() - logits.min()))
        if gap > _NEAR_TIE:
            faults.append(
                f"{mode.value}: prompt {found.row} of a batch of {found.batch} parts from transformers at token "
                f"{found.index}, by {gap:.2g} of the logits' range"
            )
    return faults, len(differences) - len(faults)


def _generate(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """The ``num_tokens`` most likely tokens after ``prompt``, whatever they are."""
    # A config's end-of-text token would end the text: the engine is told to go on.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        written = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens)
    return written[0, len(prompt) :].tolist()


def _distinct(texts: Sequence[list[int]]) -> int:
    return len({token for text in texts for token in text})
