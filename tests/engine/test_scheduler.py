"""Scheduler as a state machine on tiny pools: budget, rows, order of arrival, blocks, contents, progress, abort."""

from __future__ import annotations

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from compiled_engine.engine.kv_cache_manager import KVCacheManager
from compiled_engine.engine.prefix_index import hash_block
from compiled_engine.engine.request import Request, RequestStatus, derive_seed
from compiled_engine.engine.scheduler import Scheduler
from compiled_engine.errors import RequestError
from compiled_engine.runners.base import CacheGroupLimits

BASE = [0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 1]
prompts = st.builds(
    lambda shared, own: BASE[:shared] + own,
    st.integers(0, len(BASE)),
    st.lists(st.integers(0, 1), min_size=1, max_size=3),
)
work = st.lists(st.tuples(prompts, st.integers(1, 8)), min_size=1, max_size=5)
cache_groups = st.lists(
    st.builds(CacheGroupLimits, st.integers(2, 9) | st.integers(6, 9), st.none() | st.integers(1, 7)),
    min_size=1,
    max_size=3,
)


def two_bits(parent_hash: int, token_ids: tuple[int, ...]) -> int:
    return hash_block(parent_hash, token_ids) & 3


def next_token(token_ids: list[int]) -> int:
    """Our model: the same prefix always goes on alike."""
    return hash(tuple(token_ids)) >> 5 & 1


def make_scheduler(num_blocks=8, block_size=2, max_num_seqs=3, budget=5, caching=False) -> Scheduler:
    cache = KVCacheManager([CacheGroupLimits(num_blocks)], block_size, enable_prefix_caching=caching)
    return Scheduler(cache, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)


def make_request(arrival: int, prompt: int, output: int) -> Request:
    return Request(str(arrival), range(prompt), arrival=arrival, max_output_tokens=output)


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, steps and aborts in any order.

    ``computed`` is our own account of how many tokens each request has in its blocks, ``stored`` of what was written
    to each slot of each cache group: the whole prefix that ends there.
    """

    @initialize(
        groups=cache_groups,
        block_size=st.integers(1, 4),
        rows=st.integers(1, 4),
        budget=st.integers(1, 9),
        caching=st.sampled_from([True, True, False]),
    )
    def start(self, groups, block_size, rows, budget, caching):
        self.cache = KVCacheManager(groups, block_size, enable_prefix_caching=caching, hash_block=two_bits)
        self.scheduler = Scheduler(self.cache, max_num_seqs=rows, max_num_batched_tokens=budget)
        self.block_size = block_size
        self.requests: dict[int, Request] = {}
        self.arrivals = 0
        self.computed: dict[int, int] = {}
        self.stored: list[dict[int, tuple[int, ...]]] = [{} for _ in groups]

    # What a group needs, position by position.

    def visible(self, window, position, end) -> range:
        """Positions before ``end`` that the token at ``position`` can see."""
        return range(0 if window is None else max(0, position - window + 1), end)

    def columns(self, window, start, end) -> set[int]:
        """Columns of the block table that tokens at ``start`` to ``end - 1`` can see or write."""
        return {position // self.block_size for position in self.visible(window, start, end)}

    def least_columns(self, window, num_tokens) -> int:
        """Blocks for a request that computes token by token."""
        return max(len(self.columns(window, position, position + 1)) for position in range(num_tokens))

    def groups(self, request=None):
        """Of each group its pool, its window, what is stored in it, and the block table of ``request``."""
        tables = [[] for _ in self.stored] if request is None else request.block_ids
        return zip(self.cache.pools, self.cache.windows, self.stored, tables, strict=True)

    def slot(self, table, position) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def contents(self, pool) -> list[list[int]]:
        blocks = (pool.content(block) for block in range(1, pool.num_blocks))
        return [content.all_token_ids() for content in blocks if content is not None]

    def longest_hit(self, request) -> int:
        """The slow account of a hit: the longest length where all blocks that are seen, and the last, are published."""
        tokens, size = request.token_ids, self.block_size
        contents = [self.contents(pool) for pool in self.cache.pools]
        return max(
            length
            for length in range(0, len(tokens), size)
            if all(
                tokens[: (column + 1) * size] in known
                for known, window in zip(contents, self.cache.windows, strict=True)
                for column in {position // size for position in self.visible(window, length, length)}
                | {position // size for position in range(length)[-1:]}
            )
        )

    # Operations.

    @rule(work=work, times=st.integers(0, 12))
    def add_several_and_step(self, work, times):
        for prompt, output in work:
            self.add(prompt, output)
        self.steps(times)

    @rule(prompt=prompts, output=st.integers(1, 8))
    def add(self, prompt, output):
        request = Request(
            str(self.arrivals),
            prompt,
            arrival=self.arrivals,
            max_output_tokens=output,
            num_cache_groups=self.cache.num_groups,
        )
        for pool, window, *_ in self.groups():
            least = self.least_columns(window, len(prompt) + output - 1)
            if least > pool.num_usable_blocks:
                message = f"needs {least} cache blocks .* cache has {pool.num_usable_blocks}: "
                with pytest.raises(RequestError, match=message):
                    self.scheduler.add(request)
                event("refused")
                return
        self.scheduler.add(request)
        self.requests[self.arrivals] = request
        self.computed[self.arrivals] = 0
        self.arrivals += 1

    @rule(place=st.integers(0, 5))
    def abort_one(self, place):
        for arrival in sorted(self.requests)[place : place + 1]:
            request = self.requests.pop(arrival)
            self.scheduler.finish(request)
            assert request.status is RequestStatus.FINISHED

    @rule(reset=st.booleans())
    def forget(self, reset):
        if reset:
            self.reset_prefix_cache()
        else:
            self.abort_all()

    def abort_all(self):
        self.scheduler.abort_all()
        assert not self.scheduler.has_unfinished()
        self.requests.clear()
        self.nothing_is_held()
        assert not any(self.contents(pool) for pool in self.cache.pools)

    def reset_prefix_cache(self):
        self.cache.forget_contents()
        assert not any(self.contents(pool) for pool in self.cache.pools)
        for request in self.requests.values():
            if request.status is not RequestStatus.RUNNING:
                assert self.cache.find_cached(request) == 0

    @rule(times=st.integers(2, 20))
    def steps(self, times):
        for _ in range(times):
            self.step()

    @rule()
    def step(self):
        scheduler = self.scheduler
        before = {r.arrival: (r.status, r.num_preemptions) for r in self.requests.values()}
        for request in scheduler.waiting:
            assert self.cache.find_cached(request) == (self.longest_hit(request) if self.caching else 0)
        scheduled = scheduler.schedule()
        # Progress, budget, rows, order.
        assert bool(scheduled) == bool(self.requests)
        total = sum(item.num_tokens for item in scheduled)
        assert total <= scheduler.max_num_batched_tokens
        assert len(scheduler.running) <= scheduler.max_num_seqs
        arrivals = [item.request.arrival for item in scheduled]
        assert arrivals == sorted(set(arrivals))
        self.account_for_preemption(before, arrivals)
        # No overtaking: whatever waits arrived after whatever runs.
        running = [request.arrival for request in scheduler.running]
        waiting = [request.arrival for request in scheduler.waiting]
        assert running == sorted(running)
        assert waiting == sorted(waiting)
        assert not running or not waiting or max(running) < min(waiting)
        # The earliest request always runs, and an earlier one is never set back for it.
        if self.requests:
            assert arrivals[0] == min(self.requests)
            assert before[arrivals[0]][1] == self.requests[arrivals[0]].num_preemptions
        budget = scheduler.max_num_batched_tokens
        for item in scheduled:
            self.check_scheduled(item)
            longest = min(budget, item.request.num_tokens - item.request.num_computed_tokens)
            if item.num_tokens < longest:
                event("cut short by a sliding window")
                assert item.num_tokens % self.block_size == -item.request.num_computed_tokens % self.block_size
                set_back = any(r.num_preemptions > before[r.arrival][1] for r in self.requests.values())
                assert set_back or any(pool.num_free_blocks == 0 for pool in self.cache.pools)
            budget -= item.num_tokens
        self.write(scheduled)
        sampling = [item.request for item in scheduled if item.samples]
        scheduler.update(scheduled)
        for item in scheduled:
            self.computed[item.request.arrival] += item.num_tokens
            self.check_published(item.request, item.num_tokens)
        for request in sampling:
            request.append(next_token(request.token_ids))
            if request.num_output_tokens == request.max_output_tokens:
                scheduler.finish(request)
                del self.requests[request.arrival]

    @property
    def caching(self) -> bool:
        return self.cache.enable_prefix_caching

    def account_for_preemption(self, before, arrivals):
        """Set back are later arrivals than all that run; admitted are requests with a hit or without."""
        for request in self.requests.values():
            status, num_preemptions = before[request.arrival]
            if request.num_preemptions > num_preemptions:
                event("preempted")
                assert request.status is RequestStatus.PREEMPTED
                assert request.arrival > max(arrivals)
                assert not any(request.block_ids)
                self.computed[request.arrival] = 0
            if request.status is RequestStatus.RUNNING is not status:
                self.check_hit(request, status)

    def check_hit(self, request, status_before):
        """A request that has just been admitted has whole blocks from the cache, and never all its tokens."""
        hit = request.num_computed_tokens
        assert hit % self.block_size == 0
        assert hit < request.num_tokens
        assert self.caching or hit == 0
        if status_before is RequestStatus.WAITING:
            assert request.num_cached_tokens == hit < request.num_prompt_tokens
            event("hit" if hit else "miss")
        else:
            event("hit after preemption" if hit else "miss after preemption")
            if hit > request.num_prompt_tokens:
                event("hit of output tokens")
        if hit and None in self.cache.windows and len(set(self.cache.windows)) > 1:
            event("hit in a hybrid model")
        self.computed[request.arrival] = hit

    def check_scheduled(self, item):
        request = item.request
        assert request.num_computed_tokens == self.computed[request.arrival]
        start = request.num_computed_tokens
        end = start + item.num_tokens
        assert item.num_tokens > 0
        assert end <= request.num_tokens
        assert item.samples == (end == request.num_tokens)
        assert len(request.block_ids) == self.cache.num_groups
        for _, window, _, table in self.groups(request):
            needed = self.columns(window, start, end)
            assert all(table[column] for column in needed)
            assert not any(table[: min(needed)])

    def write(self, scheduled):
        """Write as the layers would, then read what each new token sees. Shared and published blocks stay unwritten."""
        for item in scheduled:
            request = item.request
            for pool, _, stored, table in self.groups(request):
                for position in range(request.num_computed_tokens, request.num_computed_tokens + item.num_tokens):
                    block = table[position // self.block_size]
                    assert pool.reference_count(block) == 1
                    assert pool.content(block) is None
                    stored[self.slot(table, position)] = tuple(request.token_ids[: position + 1])
        for item in scheduled:
            self.check_reads(item.request, item.request.num_computed_tokens + item.num_tokens)

    def check_reads(self, request, end):
        """Every position that the request's next uncomputed token and those up to ``end`` see holds its prefix."""
        for _, window, stored, table in self.groups(request):
            for position in self.visible(window, request.num_computed_tokens, end):
                assert stored[self.slot(table, position)] == tuple(request.token_ids[: position + 1])

    def check_published(self, request, num_new):
        """Each block that has just become full can be found."""
        for pool, *_ in self.groups():
            start = (request.num_computed_tokens - num_new) // self.block_size
            for column in range(start, request.num_computed_tokens // self.block_size):
                full = request.token_ids[: (column + 1) * self.block_size]
                assert (full in self.contents(pool)) == self.caching

    @invariant()
    def blocks_are_where_they_should_be(self):
        """Counts agree with tables; windows have been left behind; every read of a running request is right."""
        if not hasattr(self, "scheduler"):
            return
        self.cache.check_integrity(self.requests.values())
        assert {id(r) for r in self.requests.values()} == {
            id(r) for r in self.scheduler.running + self.scheduler.waiting
        }
        for request in self.scheduler.running:
            self.check_reads(request, request.num_computed_tokens)
            for _, window, _, table in self.groups(request):
                behind = self.visible(window, request.num_computed_tokens, 0).start // self.block_size
                assert [block == 0 for block in table] == [column < behind for column in range(len(table))]

    @invariant()
    def published_blocks_hold_what_they_say(self):
        """Only full computed blocks are published, and nothing is written over them."""
        if not hasattr(self, "scheduler"):
            return
        for pool, _, stored, _ in self.groups():
            for block in range(1, pool.num_blocks):
                content = pool.content(block)
                if content is not None:
                    tokens = content.all_token_ids()
                    start = len(tokens) - self.block_size
                    for offset in range(self.block_size):
                        found = stored[block * self.block_size + offset]
                        assert found == tuple(tokens[: start + offset + 1])

    def nothing_is_held(self):
        self.cache.check_integrity([])
        assert all(pool.num_free_blocks == pool.num_usable_blocks for pool in self.cache.pools)

    def teardown(self):
        """Whatever state we are in, stepping on finishes every request."""
        if hasattr(self, "scheduler"):
            # Each step computes a token; a request can be set back at most once per token of an earlier one.
            for _ in range(5000):
                if not self.requests:
                    break
                self.step()
            assert not self.requests
            self.nothing_is_held()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=4 * settings.default.max_examples)


def test_prompts_are_chunked_under_one_budget():
    scheduler = make_scheduler(num_blocks=20, budget=5)
    requests = [make_request(0, 3, 4), make_request(1, 7, 4)]
    for request in requests:
        scheduler.add(request)
    steps = []
    for _ in range(4):
        scheduled = scheduler.schedule()
        steps.append([(item.request.arrival, item.num_tokens, item.samples) for item in scheduled])
        sampling = [item.request for item in scheduled if item.samples]
        scheduler.update(scheduled)
        for request in sampling:
            request.append(1)
    # The running request goes on while the long prompt is computed with what is left of the budget.
    assert steps == [
        [(0, 3, True), (1, 2, False)],
        [(0, 1, True), (1, 4, False)],
        [(0, 1, True), (1, 1, True)],
        [(0, 1, True), (1, 1, True)],
    ]


def test_preempted_request_keeps_its_output_and_computes_it_again():
    scheduler = make_scheduler(num_blocks=5, block_size=2, budget=8)
    first, second = make_request(0, 3, 5), make_request(1, 3, 3)
    scheduler.add(first)
    scheduler.add(second)

    def step():
        scheduled = scheduler.schedule()
        sampling = [item.request for item in scheduled if item.samples]
        scheduler.update(scheduled)
        for request in sampling:
            request.append(40 + request.arrival)
        return {item.request.arrival: item.num_tokens for item in scheduled}

    assert step() == {0: 3, 1: 3}
    assert step() == {0: 1, 1: 1}
    # Both need a third block, and none is free.
    assert step() == {0: 1}
    assert second.status is RequestStatus.PREEMPTED
    assert second.output_token_ids == [41, 41]
    assert second.num_computed_tokens == 0
    scheduler.finish(first)
    assert step() == {1: 5}
    assert second.output_token_ids == [41, 41, 41]


def test_request_that_exactly_fills_the_pool_is_admitted():
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    scheduler.add(make_request(0, 4, 3))
    with pytest.raises(RequestError, match="raise kv_cache_memory"):
        scheduler.add(make_request(1, 4, 4))
    assert len(scheduler.waiting) == 1


def test_derived_seeds_differ_and_are_64_bit():
    seeds = [
        derive_seed(seed, number, index) for seed in (-1, 0, 1, 2**40) for number in range(50) for index in range(5)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert any(seed < 0 for seed in seeds)
    # Every bit moves: none is constant over the seeds.
    assert all(0 < sum(seed >> bit & 1 for seed in seeds) < len(seeds) for bit in range(64))
