"""Which requests run in the next step, and with how many tokens each."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass

from compiled_engine.engine.block_pool import BlockPool
from compiled_engine.engine.request import Request, RequestStatus
from compiled_engine.errors import RequestError


@dataclass(frozen=True)
class ScheduledTokens:
    """The next ``num_tokens`` uncomputed tokens of ``request`` run in this step."""

    request: Request
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether this step reaches the request's last token, so that a new one follows."""
        return self.request.num_computed_tokens + self.num_tokens == self.request.num_tokens


def _arrival(request: Request) -> int:
    return request.arrival


class Scheduler:
    """Continuous batching under one token budget; first come, first served; preemption by recompute.

    Each step first serves the running requests in order of arrival, then admits waiting ones while budget, rows and
    blocks last. Prompts longer than the remaining budget are computed in chunks. A request is admitted only when there
    are blocks for all tokens that it has; so a prompt is never dropped half-way for its own size. When a running
    request needs a block and none is free, the latest arrived running request is set back: its blocks are freed, and
    once readmitted it computes prompt and outputs again.

    Progress: ``add`` refuses what cannot fit alone, the earliest running request is never set back in favour of
    another, and with nothing running the first waiting request can be admitted. So each step schedules at least one
    token while any request is unfinished.
    """

    def __init__(self, pool: BlockPool, *, block_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def check_fits(self, request: Request) -> None:
        """Raise ``RequestError`` if ``request`` could not run to its end with the whole cache to itself."""
        needed = self._blocks_for(request.max_cached_tokens) * len(request.block_ids)
        if needed > self.pool.num_usable_blocks:
            raise RequestError(
                f"the request needs {needed} cache blocks of {self.block_size} tokens for {request.num_prompt_tokens} "
                f"prompt and up to {request.max_output_tokens} new tokens, the whole cache has "
                f"{self.pool.num_usable_blocks}: shorten the prompt, lower max_tokens, or raise kv_cache_memory"
            )

    def add(self, request: Request) -> None:
        """Queue a request. Raises ``RequestError`` as ``check_fits`` does."""
        self.check_fits(request)
        insort(self.waiting, request, key=_arrival)

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> list[ScheduledTokens]:
        """The requests of the next step in order of arrival, with blocks for the tokens that they compute."""
        budget = self.max_num_batched_tokens
        scheduled: list[ScheduledTokens] = []
        # Set-back requests come from the end of `running`, behind those already scheduled.
        while budget > 0 and len(scheduled) < len(self.running):
            request = self.running[len(scheduled)]
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            while not self._grow(request, request.num_computed_tokens + num_tokens):
                if self._preempt_latest() is request:
                    break
            else:
                scheduled.append(ScheduledTokens(request, num_tokens))
                budget -= num_tokens
        self._admit(scheduled, budget)
        return scheduled

    def update(self, scheduled: Iterable[ScheduledTokens]) -> None:
        """Record that a step has run: its tokens' K/V is in the cache now. Call before sampled tokens are appended."""
        for item in scheduled:
            item.request.num_computed_tokens += item.num_tokens

    def finish(self, request: Request) -> None:
        """Take a request out, whether it is waiting or running, and free its blocks."""
        queue = self.running if request.status is RequestStatus.RUNNING else self.waiting
        queue.remove(request)
        self._release(request)
        request.status = RequestStatus.FINISHED

    def abort_all(self) -> None:
        """Drop every request and free every block; right even if a step was interrupted half-way."""
        for request in self.waiting + self.running:
            request.block_ids = [[] for _ in request.block_ids]
            request.status = RequestStatus.FINISHED
        self.waiting.clear()
        self.running.clear()
        self.pool.reset()

    def _admit(self, scheduled: list[ScheduledTokens], budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            if not self._grow(request, request.num_tokens):
                return  # no overtaking: a small request must not starve a large one
            self.running.append(self.waiting.pop(0))
            request.status = RequestStatus.RUNNING
            num_tokens = min(request.num_tokens, budget)
            scheduled.append(ScheduledTokens(request, num_tokens))
            budget -= num_tokens

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Give ``request`` blocks for its first ``num_tokens`` tokens in every cache group; False: nothing changed."""
        wanted = self._blocks_for(num_tokens)
        missing = [max(0, wanted - len(table)) for table in request.block_ids]
        blocks = self.pool.allocate(sum(missing))
        if blocks is None:
            return False
        for table, count in zip(request.block_ids, missing, strict=True):
            table.extend(blocks[:count])
            del blocks[:count]
        return True

    def _preempt_latest(self) -> Request:
        request = self.running.pop()
        self._release(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        insort(self.waiting, request, key=_arrival)
        return request

    def _release(self, request: Request) -> None:
        for table in request.block_ids:
            self.pool.free(table)
            table.clear()

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
