"""Which requests run in the next step, and with how many tokens each."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass

from compiled_engine.engine.kv_cache_manager import KVCacheManager
from compiled_engine.engine.request import Request, RequestStatus
from compiled_engine.runners.batch import ScheduledRequest


@dataclass(frozen=True)
class ScheduledTokens:
    """The next ``num_tokens`` uncomputed tokens of ``request`` run in this step."""

    request: Request
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether this step reaches the request's last token, so that a new one follows."""
        return self.request.num_computed_tokens + self.num_tokens == self.request.num_tokens

    def as_row(self, block_size: int) -> ScheduledRequest:
        """The same in the runner's terms. A snapshot: make it before ``Scheduler.update``."""
        request = self.request
        start, end = request.num_computed_tokens, request.num_computed_tokens + self.num_tokens
        num_blocks = -(-end // block_size)  # a prompt holds the blocks of its later chunks already
        return ScheduledRequest(
            request_id=request.request_id,
            token_ids=tuple(request.token_ids[start:end]),
            num_computed_tokens=start,
            block_tables=tuple(tuple(table[:num_blocks]) for table in request.block_ids),
            samples=self.samples,
        )


def _arrival(request: Request) -> int:
    return request.arrival


class Scheduler:
    """Continuous batching under one token budget; first come, first served; preemption by recompute.

    Each step first serves the running requests in order of arrival, then admits waiting ones while budget, rows and
    blocks last. Prompts longer than the remaining budget, or than the free blocks of a sliding-window group, are
    computed in chunks. A request is admitted only when the full-attention groups have blocks for all tokens that it
    has, and the others for one at least. What the cache holds of it already is not computed again. When a running
    request needs a block and none is free, the latest arrived running request is set back: its blocks are freed, and
    once readmitted, in a later step, it computes again what the cache has lost of prompt and outputs.

    Progress: each step schedules at least one token while any request is unfinished. For ``add`` refuses a request that
    needs more blocks than a whole group has (``KVCacheManager.least_blocks``), and only running requests hold blocks.
    The earliest running request is served first, and never set back in favour of another: when only it is left, every
    other block is free, which is enough for its next token. With nothing running all blocks are free, so the first
    waiting request is admitted. It computes at least one token, as a hit never covers all tokens.
    """

    def __init__(self, cache: KVCacheManager, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def check_fits(self, request: Request) -> None:
        """Raise ``RequestError`` if ``request`` could not run to its end with the whole cache to itself."""
        self.cache.check_fits(request)

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
        num_running = len(self.running)
        # Set-back requests come from the end of `running`, behind those already scheduled.
        while budget > 0 and len(scheduled) < len(self.running):
            request = self.running[len(scheduled)]
            wanted = min(request.num_tokens - request.num_computed_tokens, budget)
            while (num_tokens := self.cache.grow(request, wanted)) == 0:
                if self._preempt_latest() is request:
                    break
            else:
                scheduled.append(ScheduledTokens(request, num_tokens))
                budget -= num_tokens
        if len(self.running) == num_running:  # what was just set back must not take the blocks that it gave up
            self._admit(scheduled, budget)
        return scheduled

    def update(self, scheduled: Iterable[ScheduledTokens]) -> None:
        """Record that a step has run: its tokens' K/V is in the cache now. Call before sampled tokens are appended."""
        for item in scheduled:
            num_computed_before = item.request.num_computed_tokens
            item.request.num_computed_tokens += item.num_tokens
            self.cache.record_computed(item.request, num_computed_before)

    def finish(self, request: Request) -> None:
        """Take a request out, whether it is waiting or running, and free its blocks."""
        queue = self.running if request.status is RequestStatus.RUNNING else self.waiting
        queue.remove(request)
        self.cache.release(request)
        request.status = RequestStatus.FINISHED

    def abort_all(self) -> None:
        """Drop every request and free and empty every block; right even if a step was interrupted half-way."""
        for request in self.waiting + self.running:
            request.block_ids = [[] for _ in request.block_ids]
            request.status = RequestStatus.FINISHED
        self.waiting.clear()
        self.running.clear()
        self.cache.reset()

    def _admit(self, scheduled: list[ScheduledTokens], budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            num_cached = self.cache.find_cached(request)
            num_tokens = self.cache.admit(request, num_cached, min(request.num_tokens - num_cached, budget))
            if num_tokens == 0:
                return  # no overtaking: a small request must not starve a large one
            self.running.append(self.waiting.pop(0))
            if request.status is RequestStatus.WAITING:
                request.num_cached_tokens = num_cached
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = num_cached
            scheduled.append(ScheduledTokens(request, num_tokens))
            budget -= num_tokens

    def _preempt_latest(self) -> Request:
        request = self.running.pop()
        self.cache.release(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        insort(self.waiting, request, key=_arrival)
        return request
