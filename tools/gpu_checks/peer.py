"""Decode steps of transformers: StaticCache and torch.compile(mode="reduce-overhead")."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpu_checks.lab import Lab


@dataclass(frozen=True)
class PeerTimes:
    """``step``: median seconds of a decode step, until its tokens are on the host. ``compile``: seconds of the first.

    ``tokens``: what was written. ``skipped_graphs``: how often Inductor gave a CUDA graph up; None: it does not tell.
    """

    step: float
    compile: float
    tokens: list[list[int]]
    skipped_graphs: int | None


def compiler_settings(lab: Lab) -> dict[str, str]:
    """What ``torch.compile`` is told. Without a GPU there are no CUDA graphs to be had: steps are only traced."""
    return {"mode": "reduce-overhead"} if lab.on_gpu else {"backend": "eager"}


def peer_times(model: Any, prompts: Sequence[list[int]], steps: int, warm_up: int, lab: Lab) -> PeerTimes:
    """Prompts of one length are computed eagerly, then ``warm_up`` and ``steps`` decode steps follow."""
    torch._dynamo.reset()
    decode = torch.compile(model, dynamic=False, **compiler_settings(lab))  # type: ignore[call-overload]
    prompt_tokens = len(prompts[0])
    step = _StaticSteps(model, len(prompts), prompt_tokens + steps + warm_up + 2, lab)
    skipped = _skipped_graphs()
    token_ids = step.run(model, torch.tensor(prompts, device=lab.device))
    written, seconds = [token_ids.flatten().tolist()], []
    for _ in range(warm_up + steps):
        begin = time.perf_counter()
        token_ids = step.run(decode, token_ids)
        written.append(token_ids.flatten().tolist())
        lab.synchronize()
        seconds.append(time.perf_counter() - begin)
    skipped_after = _skipped_graphs()
    return PeerTimes(
        statistics.median(seconds[warm_up:]),
        seconds[0],
        [list(text) for text in zip(*written, strict=True)],
        None if skipped is None or skipped_after is None else skipped_after - skipped,
    )


class _StaticSteps:
    """Greedy steps over one static cache. Arguments go by the names that this version of transformers knows."""

    def __init__(self, model: Any, batch: int, max_tokens: int, lab: Lab) -> None:
        from transformers import StaticCache

        self._cache = StaticCache(config=model.config, max_cache_len=max_tokens)
        known = inspect.signature(model.forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in known else "cache"
        self._wants_cache_position = "cache_position" in known
        self._lab = lab
        self._positions = torch.arange(max_tokens, device=lab.device)
        self._done = 0

    @torch.no_grad()
    def run(self, forward: Any, token_ids: torch.Tensor) -> torch.Tensor:
        """The next tokens [batch, 1] after ``token_ids`` [batch, n]."""
        batch, count = token_ids.shape
        positions = self._positions[self._done : self._done + count].clone()
        self._done += count
        arguments: dict[str, Any] = {
            self._cache_name: self._cache,
            "position_ids": positions.expand(batch, count).clone(),
            "use_cache": True,
            "logits_to_keep": 1,
        }
        if self._wants_cache_position:
            arguments["cache_position"] = positions
        if self._lab.on_gpu:
            torch.compiler.cudagraph_mark_step_begin()
        logits = forward(input_ids=token_ids, **arguments).logits
        # Not in the graph's memory, which the next step overwrites.
        return logits[:, -1].argmax(-1, keepdim=True).clone()


def _skipped_graphs() -> int | None:
    try:
        from torch._dynamo.utils import counters
    except ImportError:
        return None
    return int(counters["inductor"]["cudagraph_skips"])
