"""Recorded steps as batches, against a runner that checks every batch and what its cache holds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.compile.records import ScheduledShare
from compiled_engine.engine.core import Engine
from compiled_engine.engine.recording import make_step_record
from compiled_engine.engine.sampling_params import SamplingParams
from compiled_engine.errors import ConfigError
from compiled_engine.runners.base import CacheGroupLimits, RunnerLimits
from compiled_engine.runners.batch import ScheduledBatch, ScheduledRequest
from compiled_engine_debug.replay.schedule import ReplayStep, replay_steps
from compiled_engine_debug.steps import Steps, StepsBuilder
from fake_runner import FakeRunner

BLOCK = 4
GROUPS = {
    "full": (CacheGroupLimits(24),),
    "sliding": (CacheGroupLimits(24), CacheGroupLimits(24, sliding_window=6)),
}


def steps_of(batches: Sequence[ScheduledBatch]) -> Steps:
    builder = StepsBuilder()
    for index, batch in enumerate(batches):
        builder.add(vars(make_step_record(index, 0.0, 0.0, batch, None)))
    return builder.build()


def steps_with(*steps: Sequence[tuple[str, int, int, bool]]) -> Steps:
    """Steps of the shares (request, computed, scheduled, samples)."""
    batches = []
    for shares in steps:
        requests = tuple(
            ScheduledRequest(name, (1,) * length, start, ((1,),), samples) for name, start, length, samples in shares
        )
        builder = FakeSampling(sum(request.samples for request in requests))
        batches.append(ScheduledBatch(requests, builder))  # type: ignore[arg-type]
    return steps_of(batches)


class FakeSampling:
    """As much of the parameters of sampling as a record tells of."""

    def __init__(self, num_rows: int) -> None:
        self.num_logprobs = (-1,) * num_rows


def shares_of(batch: ScheduledBatch) -> tuple[ScheduledShare, ...]:
    return tuple(
        ScheduledShare(row.request_id, row.num_computed_tokens, len(row.token_ids), row.samples)
        for row in batch.requests
    )


def run(steps: Steps, runner: FakeRunner, **options: int) -> list[ReplayStep]:
    """The replay of ``steps``, every batch of which ``runner`` has checked."""
    replayed = []
    for step in replay_steps(steps, runner.limits, **options):
        runner.execute(step.batch)
        replayed.append(step)
    return replayed


def requests_of(replayed: Sequence[ReplayStep]) -> dict[int, tuple[ScheduledShare, ...]]:
    return {step.position: shares_of(step.batch) for step in replayed if step.position is not None}


LIMITS = FakeRunner().limits


@given(
    prompts=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=9),
    groups=st.sampled_from(sorted(GROUPS)),
    num_blocks=st.integers(16, 40),
    waves=st.integers(1, 3),
    first=st.integers(0, 5),
)
def test_a_replay_has_the_recorded_steps(
    prompts: list[tuple[int, int, int]], groups: str, num_blocks: int, waves: int, first: int
) -> None:
    limits = [CacheGroupLimits(num_blocks, group.sliding_window) for group in GROUPS[groups]]
    recorded = FakeRunner(cache_groups=limits)
    serve(recorded, prompts, waves)
    batches = recorded.batches[min(first, len(recorded.batches) - 1) :]

    # A recording does not tell whose blocks a request shares, least of one that began before the first step: more
    # blocks may be held at a time than there were.
    roomy = [CacheGroupLimits((10 if first else 2) * item.num_blocks, item.sliding_window) for item in limits]
    replayed = run(steps_of(batches), FakeRunner(cache_groups=roomy))

    assert requests_of(replayed) == {position: shares_of(batch) for position, batch in enumerate(batches)}
    made_up = [step for step in replayed if step.position is None]
    if first == 0 and groups == "full":
        # Whatever was cached has been computed in some step, so that only the step after the last one is made up.
        # What a window has left behind is forgotten here, and may have been in the engine's prefix cache.
        assert len(made_up) <= 1
    assert not any(row.samples for step in made_up[:-1] for row in step.batch.requests)


def serve(runner: FakeRunner, prompts: Sequence[tuple[int, int, int]], waves: int) -> None:
    """Prompts of a shared beginning and an own end, in waves, on a cache that is often too small for all of them."""
    engine = Engine(runner, enable_prefix_caching=True)
    for wave in range(waves):
        for number, (shared, own, max_tokens) in enumerate(prompts):
            tokens = [7] * shared + [1 + (number + wave + place) % 60 for place in range(own)]
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            engine.add_request(tokens[:40], params)
        while engine.has_unfinished():
            engine.step()


def test_the_workload_of_these_tests_sets_requests_back_and_shares_blocks() -> None:
    runner = FakeRunner(cache_groups=[CacheGroupLimits(24)])
    serve(runner, [(20, 15, 12)] * 6, 2)
    starts = [row.num_computed_tokens for batch in runner.batches for row in batch.requests]
    ids = [row.request_id for batch in runner.batches for row in batch.requests if row.num_computed_tokens == 0]

    assert starts[0] == 0
    assert len(ids) < 12  # some began with what was cached
    replayed = run(steps_of(runner.batches), FakeRunner(cache_groups=[CacheGroupLimits(24)]))
    assert len(replayed) == len(runner.batches) + 1


def test_a_request_that_begins_in_the_middle_is_computed_first() -> None:
    replayed = run(steps_with([("a", 40, 1, True)], [("a", 41, 1, True)]), FakeRunner(max_num_batched_tokens=16))

    assert [(step.position, shares_of(step.batch)) for step in replayed] == [
        (None, (("a", 0, 16, False),)),
        (None, (("a", 16, 16, False),)),
        (None, (("a", 32, 8, False),)),
        (0, (("a", 40, 1, True),)),
        (1, (("a", 41, 1, True),)),
        (None, (("a", 42, 1, True),)),
    ]


def test_a_request_that_was_set_back_has_the_same_tokens_again() -> None:
    steps = steps_with([("a", 0, 6, True)], [("b", 0, 3, True)], [("a", 0, 7, True)])
    replayed = run(steps, FakeRunner())

    first, again = replayed[0].batch.requests[0], replayed[2].batch.requests[0]
    assert again.token_ids[:6] == first.token_ids
    assert again.block_tables != first.block_tables


def test_a_request_that_was_set_back_shares_its_own_blocks_alone() -> None:
    replayed = run(steps_with([("a", 0, 8, True)], [("b", 0, 8, True)], [("a", 4, 5, True)]), FakeRunner())

    first, again = replayed[0].batch.requests[0], replayed[2].batch.requests[0]
    assert again.block_tables[0][0] == first.block_tables[0][0]
    assert again.token_ids[:4] == first.token_ids[4:]


def test_cached_tokens_are_those_of_a_request_that_has_computed_as_many() -> None:
    steps = steps_with([("a", 0, 9, True)], [("b", 8, 3, True)], [("c", 4, 2, False), ("b", 11, 1, True)])
    replayed = run(steps, FakeRunner())

    tables = {row.request_id: row.block_tables[0] for step in replayed for row in step.batch.requests}
    assert tables["b"][:2] == tables["a"][:2]
    assert tables["c"][0] in (tables["a"][0], tables["b"][0])
    assert [step.position for step in replayed] == [0, 1, 2, None]


def test_blocks_of_finished_requests_are_used_again() -> None:
    steps = steps_with(*([(f"r{number}", 0, 12, True)] for number in range(20)))
    replayed = run(steps, FakeRunner(num_blocks=8))

    assert len(replayed) == 21


def test_tokens_are_never_padding_and_follow_from_the_seed() -> None:
    steps = steps_with([("a", 0, 20, True)], [("b", 0, 20, True)])
    once, again, other = (run(steps, FakeRunner(vocab_size=3), seed=seed) for seed in (1, 1, 2))
    tokens = [[row.token_ids for step in found for row in step.batch.requests] for found in (once, again, other)]

    assert tokens[0] == tokens[1] != tokens[2]
    assert {token for row in tokens[0] for token in row} == {1, 2}


def test_only_the_first_steps_when_asked_for() -> None:
    steps = steps_with(*([("a", position, 1, True)] for position in range(6)))
    assert [step.position for step in run(steps, FakeRunner(), most=2)] == [0, 1, None]


def test_no_step_is_made_up_beyond_the_longest_request() -> None:
    steps = steps_with([("a", 0, 8, True), ("b", 0, 3, True)])
    replayed = run(steps, FakeRunner(max_model_len=8))

    assert [shares_of(step.batch) for step in replayed][1:] == [(("b", 3, 1, True),)]


def test_no_step_is_made_up_for_which_there_are_no_blocks() -> None:
    steps = steps_with([("a", 0, 8, True), ("b", 0, 8, True)])

    assert [shares_of(step.batch) for step in run(steps, FakeRunner(num_blocks=6))][1:] == [(("a", 8, 1, True),)]
    assert len(run(steps, FakeRunner(num_blocks=5))) == 1


@pytest.mark.parametrize(
    ("shares", "says"),
    [
        ([], "no request"),
        ([("a", 0, 1, True), ("a", 1, 1, True)], "twice"),
        ([("a", 0, 0, True)], "without tokens"),
        ([("a", -1, 1, True)], "without tokens"),
        ([("a", 0, 33, True)], "33 tokens of 1 requests"),
        ([(f"r{number}", 0, 1, True) for number in range(9)], "9 tokens of 9 requests"),
        ([("a", 64, 1, True)], "65 tokens, and max_model_len is 64"),
    ],
)
def test_steps_that_do_not_fit_are_refused(shares: list[tuple[str, int, int, bool]], says: str) -> None:
    with pytest.raises(ConfigError, match=f"step 1 of the recording has .*{says}"):
        list(replay_steps(steps_with([("z", 0, 1, True)], shares), LIMITS))


def test_a_cache_that_is_too_small_is_told_of() -> None:
    small = RunnerLimits(64, 8, 32, BLOCK, (CacheGroupLimits(4),), 64)
    with pytest.raises(ConfigError, match="request 'a' needs 4 more cache blocks, and 3 of 3 are free: .*--kv-cache"):
        list(replay_steps(steps_with([("a", 0, 16, True)]), small))
