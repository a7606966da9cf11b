"""How long a decode step takes, here and in transformers with a static cache and CUDA graphs of its own."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

from compiled_engine.engine.core import Engine
from gpu_checks.lab import Lab, TimedRunner, greedy, load_transformers_model, make_prompts, name_of
from gpu_checks.peer import PeerTimes, compiler_settings, peer_times
from gpu_checks.report import Outcome, Verdict

_WARM_UP = 4
"""Decode steps that are not counted."""
_FIRST_PEER_SECONDS = 30.0


@dataclass(frozen=True)
class _OurTimes:
    """Medians in seconds: of the runner alone, until its tokens are on the host, and of the whole engine."""

    execute: float
    step: float
    tokens: list[list[int]]


def check(lab: Lab) -> Outcome:
    """Medians over many steps, at every batch size; the peer's ratio is to the whole engine's step.

    Both start from the same prompts, and every step of both ends with its tokens on the host. The peer compiles for
    each batch size: sizes for which no time is left are measured without it.
    """
    folder, dtype = lab.measured_llama()
    ours = _our_times(lab)
    rows, left_out = [], []
    # For the first one it is a guess, for the others what the one before took.
    peer_seconds = _FIRST_PEER_SECONDS
    model = load_transformers_model(folder, dtype, lab.device)
    for batch, times in ours.items():
        peer = None
        if lab.seconds_left > peer_seconds:
            begin = time.monotonic()
            peer = peer_times(model, _prompts(lab, batch), lab.sizes.steps, _WARM_UP, lab)
            peer_seconds = time.monotonic() - begin
        else:
            left_out.append(batch)
        rows.append(_row(batch, times, peer))
    ratios = [f"{row['batch']}: {row['step_ms']:.3g} ms" + _ratio_text(row) for row in rows]
    summary = f"decode step at batch {'; '.join(ratios)}"
    if left_out:
        summary += f"; no time was left for the peer at batch {left_out}"
    figures = {"dtype": name_of(dtype), "prompt_tokens": lab.sizes.prompt_tokens, "peer": compiler_settings(lab)}
    return Outcome(Verdict.PASSED, summary, figures, rows)


def _our_times(lab: Lab) -> dict[int, _OurTimes]:
    sizes = lab.sizes
    folder, dtype = lab.measured_llama()
    most, context = max(sizes.batches), sizes.prompt_tokens + sizes.steps + _WARM_UP + 2
    settings: dict[str, Any] = {
        "graph_mode": "full_decode_only",
        "dtype": name_of(dtype),
        "max_num_seqs": most,
        "max_num_batched_tokens": min(2048, most * context),
        "max_model_len": context,
        "graph_sizes": sizes.batches,
    }
    with lab.runner(folder, **settings) as runner:
        return {batch: _time_steps(lab, TimedRunner(runner, lab.synchronize), batch) for batch in sizes.batches}


def _time_steps(lab: Lab, runner: TimedRunner, batch: int) -> _OurTimes:
    engine = Engine(runner, enable_prefix_caching=False)
    # One token comes from the prompt's own step.
    params = greedy(_WARM_UP + lab.sizes.steps + 1)
    ids = [engine.add_request(prompt, params) for prompt in _prompts(lab, batch)]
    seconds: list[float] = []
    outputs: dict[str, list[int]] = {}
    while engine.has_unfinished():
        begin = time.perf_counter()
        finished = engine.step()
        seconds.append(time.perf_counter() - begin)
        outputs.update((output.request_id, list(output.outputs[0].token_ids)) for output in finished)
    is_decode = [step.num_requests == step.num_tokens == batch for step in runner.steps]
    decodes = [index for index, decode in enumerate(is_decode) if decode][_WARM_UP:]
    return _OurTimes(
        execute=statistics.median(runner.steps[index].seconds for index in decodes),
        step=statistics.median(seconds[index] for index in decodes),
        tokens=[outputs[request_id] for request_id in ids],
    )


def _prompts(lab: Lab, batch: int) -> list[list[int]]:
    length = lab.sizes.prompt_tokens
    return make_prompts(batch, length, length, lab.sizes.vocab, seed=batch)


def _row(batch: int, ours: _OurTimes, peer: PeerTimes | None) -> dict[str, Any]:
    return {
        "batch": batch,
        "step_ms": 1e3 * ours.step,
        "execute_ms": 1e3 * ours.execute,
        "tokens_per_s": batch / ours.step,
        "peer_step_ms": None if peer is None else 1e3 * peer.step,
        "peer_by_ours": None if peer is None else peer.step / ours.step,
        "peer_compile_s": None if peer is None else peer.compile,
        "peer_skipped_graphs": None if peer is None else peer.skipped_graphs,
        "same_tokens": None if peer is None else _same_share(ours.tokens, peer.tokens),
    }


def _same_share(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of tokens that are equal up to where two texts part: 16-bit texts part at near ties."""
    pairs = [(a, b) for mine, other in zip(ours, theirs, strict=True) for a, b in zip(mine, other, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def _ratio_text(row: dict[str, Any]) -> str:
    return "" if row["peer_by_ours"] is None else f" (transformers takes {row['peer_by_ours']:.2f} times that)"
