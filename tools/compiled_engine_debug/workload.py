"""The work that tools run when nobody gives them prompts: small, mixed, and the same every time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compiled_engine.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from compiled_engine.engine.prompts import Prompt
    from compiled_engine.runners.base import RunnerLimits

DEFAULT_REQUESTS = 12
DEFAULT_MAX_TOKENS = 24


@dataclass(frozen=True)
class Workload:
    """Prompts, and the sampling parameters of each: what ``LLM.generate`` takes."""

    prompts: tuple[Prompt, ...]
    params: tuple[SamplingParams, ...]

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.params):
            raise ValueError(f"{len(self.params)} sampling parameters for {len(self.prompts)} prompts")


def standard_workload(
    limits: RunnerLimits,
    num_requests: int = DEFAULT_REQUESTS,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    seed: int = 0,
) -> Workload:
    """Prompts of token ids, short and long in turn, every third sampled and the others greedy.

    The longest is computed in chunks where it fits, and every fourth begins like the longest one before it, as far as
    there is room. Each asks for another number of new tokens, at most ``max_tokens``, so that requests end one by one.
    """
    generator = random.Random(seed)
    room = max(1, limits.max_model_len - 1)
    lengths = _lengths(limits, max(1, room - max_tokens))
    prompts: list[tuple[int, ...]] = []
    for number in range(num_requests):
        length = lengths[number % len(lengths)]
        prefix = max(prompts, key=len)[: length - 1] if number % 4 == 3 else ()
        fresh = [generator.randrange(limits.vocab_size) for _ in range(length - len(prefix))]
        prompts.append((*prefix, *fresh))
    params = [
        SamplingParams(
            temperature=0.8 if number % 3 == 2 else 0.0,
            max_tokens=max(1, max_tokens - number % 5),
            ignore_eos=True,
            seed=seed + number,
        )
        for number in range(num_requests)
    ]
    return Workload(tuple(prompts), tuple(params))


def workload_of(prompts: Sequence[Prompt], max_tokens: int = DEFAULT_MAX_TOKENS) -> Workload:
    """``prompts``, each with up to ``max_tokens`` greedy tokens."""
    return Workload(tuple(prompts), (SamplingParams(temperature=0, max_tokens=max_tokens),) * len(prompts))


def _lengths(limits: RunnerLimits, most: int) -> list[int]:
    """Lengths of prompts around the sizes at which an engine does something else, none above ``most``."""
    block, budget = limits.block_size, limits.max_num_batched_tokens
    wanted = (3, 2 * block + 1, 1, budget + block, block, 4 * block - 1, block - 1)
    return [max(1, min(length, most)) for length in wanted]
