"""Scheduler as a state machine on tiny pools: budget, rows, order of arrival, blocks, progress, abort."""

from __future__ import annotations

import pytest
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from compiled_engine.engine.block_pool import BlockPool
from compiled_engine.engine.request import Request, RequestStatus, derive_seed
from compiled_engine.engine.scheduler import Scheduler
from compiled_engine.errors import RequestError


def make_scheduler(num_blocks=8, block_size=2, max_num_seqs=3, budget=5) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks), block_size=block_size, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget
    )


def make_request(arrival: int, prompt: int, output: int, groups: int = 1) -> Request:
    return Request(str(arrival), range(prompt), arrival=arrival, max_output_tokens=output, num_cache_groups=groups)


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, steps and aborts in any order. ``computed`` is our own account of what each request has in its blocks."""

    @initialize(
        num_blocks=st.integers(2, 9),
        block_size=st.integers(1, 4),
        rows=st.integers(1, 4),
        budget=st.integers(1, 9),
        groups=st.integers(1, 2),
    )
    def start(self, num_blocks, block_size, rows, budget, groups):
        self.scheduler = make_scheduler(num_blocks, block_size, rows, budget)
        self.groups = groups
        self.requests: dict[int, Request] = {}
        self.arrivals = 0
        self.computed: dict[int, int] = {}

    @rule(sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 8)), min_size=1, max_size=4))
    def add_small_ones(self, sizes):
        for prompt, output in sizes:
            self.add(prompt, output)

    @rule(prompt=st.integers(1, 12), output=st.integers(1, 8))
    def add(self, prompt, output):
        request = make_request(self.arrivals, prompt, output, self.groups)
        scheduler = self.scheduler
        blocks = -(-(prompt + output - 1) // scheduler.block_size) * self.groups
        if blocks > scheduler.pool.num_usable_blocks:
            with pytest.raises(
                RequestError, match=f"needs {blocks} cache blocks .* has {scheduler.pool.num_usable_blocks}"
            ):
                scheduler.add(request)
            return
        scheduler.add(request)
        self.requests[self.arrivals] = request
        self.computed[self.arrivals] = 0
        self.arrivals += 1

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort_one(self, data):
        arrival = data.draw(st.sampled_from(sorted(self.requests)))
        request = self.requests.pop(arrival)
        self.scheduler.finish(request)
        assert request.status is RequestStatus.FINISHED

    @rule()
    def abort_all(self):
        self.scheduler.abort_all()
        assert not self.scheduler.has_unfinished()
        assert self.scheduler.pool.num_free_blocks == self.scheduler.pool.num_usable_blocks
        self.requests.clear()

    @rule(times=st.integers(2, 8))
    def steps(self, times):
        for _ in range(times):
            self.step()

    @rule()
    def step(self):
        scheduler = self.scheduler
        before = {r.arrival: r.num_preemptions for r in self.requests.values()}
        scheduled = scheduler.schedule()
        # Progress, budget, rows, order.
        assert bool(scheduled) == bool(self.requests)
        total = sum(item.num_tokens for item in scheduled)
        assert total <= scheduler.max_num_batched_tokens
        assert len(scheduler.running) <= scheduler.max_num_seqs
        arrivals = [item.request.arrival for item in scheduled]
        assert arrivals == sorted(set(arrivals))
        # Preemption hits only later arrivals than everything that runs, and resets their account.
        for request in self.requests.values():
            if request.num_preemptions > before[request.arrival]:
                assert request.status is RequestStatus.PREEMPTED
                assert request.arrival > max(arrivals)
                assert not any(request.block_ids)
                event("preempted")
                if len(scheduler.waiting) > 1:
                    event("preempted while others wait")
                self.computed[request.arrival] = 0
        # No overtaking: whatever waits arrived after whatever runs.
        running = [request.arrival for request in scheduler.running]
        waiting = [request.arrival for request in scheduler.waiting]
        assert running == sorted(running)
        assert waiting == sorted(waiting)
        assert not running or not waiting or max(running) < min(waiting)
        # The earliest request always runs.
        if self.requests:
            assert arrivals[0] == min(self.requests)
        for item in scheduled:
            request = item.request
            assert request.num_computed_tokens == self.computed[request.arrival]
            end = request.num_computed_tokens + item.num_tokens
            assert item.num_tokens > 0
            assert end <= request.num_tokens
            assert item.samples == (end == request.num_tokens)
            assert len(request.block_ids) == self.groups
            assert all(len(table) * scheduler.block_size >= end for table in request.block_ids)
        sampling = [item.request for item in scheduled if item.samples]
        scheduler.update(scheduled)
        for item in scheduled:
            self.computed[item.request.arrival] += item.num_tokens
        for request in sampling:
            request.append(7)
            if request.num_output_tokens == request.max_output_tokens:
                scheduler.finish(request)
                del self.requests[request.arrival]

    @invariant()
    def every_block_has_one_owner(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.pool.check_integrity()
        held = [block for r in self.requests.values() for table in r.block_ids for block in table]
        assert len(held) == len(set(held))
        assert self.scheduler.pool.num_free_blocks + len(held) == self.scheduler.pool.num_usable_blocks
        assert {id(r) for r in self.requests.values()} == {
            id(r) for r in self.scheduler.running + self.scheduler.waiting
        }

    def teardown(self):
        """Whatever state we are in, stepping on finishes every request."""
        if hasattr(self, "scheduler"):
            # Each step computes a token; a request can be set back at most once per token of an earlier one.
            for _ in range(5000):
                if not self.requests:
                    break
                self.step()
            assert not self.requests
            assert self.scheduler.pool.num_free_blocks == self.scheduler.pool.num_usable_blocks


TestScheduler = SchedulerMachine.TestCase


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
