"""What every rung runs: prompts, the tokens that follow them whatever a rung samples, and the steps they take."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from compiled_engine.engine.kv_cache_manager import KVCacheManager
from compiled_engine.engine.request import Request
from compiled_engine.engine.scheduler import Scheduler
from compiled_engine.ops.sampling import greedy_batch
from compiled_engine.runners.base import RunnerLimits
from compiled_engine.runners.batch import ScheduledBatch

# Lengths of the prompts without --prompt: one token, and about one block of 16 tokens, two and a bit more.
STANDARD_LENGTHS = (1, 5, 16, 34)
# Ids below are often those of special tokens.
_FIRST_PLAIN_ID = 4


@dataclass(frozen=True)
class Text:
    """One request: the ids of its prompt, and those that follow it in every rung."""

    request_id: str
    prompt: tuple[int, ...]
    continuation: tuple[int, ...]

    @property
    def num_computed(self) -> int:
        """Tokens that get K/V: the last one is sampled and never computed."""
        return len(self.prompt) + len(self.continuation) - 1


def standard_prompts(vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of ``STANDARD_LENGTHS`` token ids, the same at every call."""
    generator = random.Random(seed)
    first = min(_FIRST_PLAIN_ID, vocab_size - 1)
    return [[generator.randrange(first, vocab_size) for _ in range(length)] for length in STANDARD_LENGTHS]


def plan_steps(texts: Sequence[Text], limits: RunnerLimits) -> tuple[ScheduledBatch, ...]:
    """The steps in which the engine's own scheduler computes ``texts``, each with the continuation it is given.

    Raises ``RequestError`` for a text that does not fit.
    """
    cache = KVCacheManager(limits.cache_groups, limits.block_size, enable_prefix_caching=False)
    scheduler = Scheduler(cache, max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.max_num_batched_tokens)
    following = {}
    for arrival, text in enumerate(texts):
        following[text.request_id] = text.continuation
        scheduler.add(
            Request(
                text.request_id,
                text.prompt,
                arrival=arrival,
                max_output_tokens=len(text.continuation),
                num_cache_groups=len(limits.cache_groups),
            )
        )
    steps = []
    while scheduler.has_unfinished():
        scheduled = scheduler.schedule()
        rows = tuple(item.as_row(limits.block_size) for item in scheduled)
        sampling = [item.request for item in scheduled if item.samples]
        steps.append(ScheduledBatch(rows, greedy_batch(len(sampling))))
        scheduler.update(scheduled)
        for request in sampling:
            request.append(following[request.request_id][request.num_output_tokens])
            if request.num_output_tokens == request.max_output_tokens:
                scheduler.finish(request)
    return tuple(steps)
