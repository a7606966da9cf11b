"""Prefix caching through the whole engine, on the fake runner: no text changes, and what is there is not computed."""

from __future__ import annotations

import dataclasses
from itertools import takewhile

import pytest
from engine_runs import GREEDY, check_nothing_is_held, finish, pools
from hypothesis import event, given
from hypothesis import strategies as st

from compiled_engine.engine.core import Engine
from compiled_engine.engine.sampling_params import SamplingParams
from compiled_engine.runners.base import CacheGroupLimits
from fake_runner import FakeRunner, expected_tokens

shared_prompts = st.builds(
    lambda shared, own: [1, 2, 1, 1, 2, 1, 2, 2, 1, 1][:shared] + own,
    st.integers(0, 10),
    st.lists(st.integers(1, 2), min_size=1, max_size=3),
)
calls = st.lists(
    st.lists(st.tuples(shared_prompts, st.integers(1, 8), st.integers(1, 3), st.integers(0, 3)), max_size=6),
    min_size=2,
    max_size=3,
)


@given(calls, pools)
def test_prefix_caching_changes_no_text(work, pool):
    """Several calls with prompts that begin alike give the same with prefix caching, without, and by the slow account;
    whatever was computed once and is still there is not computed again."""
    texts, computed, cached = [], [], []
    for caching in (True, False):
        engine = Engine(FakeRunner(**pool), enable_prefix_caching=caching)
        texts.append([])
        cached.append(0)
        for jobs_of_call in work:
            sent = []
            for prompt, max_tokens, n, seed in jobs_of_call:
                params = SamplingParams(temperature=0.8, max_tokens=max_tokens, n=n, seed=seed, ignore_eos=True)
                sent.append((engine.add_request(prompt, params), prompt, params))
            outputs = finish(engine)
            check_nothing_is_held(engine)
            for request_id, prompt, params in sent:
                output = outputs[request_id]
                texts[-1].append([completion.token_ids for completion in output.outputs])
                cached[-1] += output.num_cached_tokens
                assert 0 <= output.num_cached_tokens <= params.n * (len(prompt) - 1)
                if output.num_preemptions:
                    event("preempted")
                if output.error is None:
                    expected = expected_tokens(
                        prompt,
                        min(params.max_tokens, pool["max_model_len"] - len(prompt)),
                        seed=params.seed,
                        temperature=0.8,
                    )
                    assert output.outputs[0].token_ids == expected
        computed.append(engine.num_computed_tokens)
    assert texts[0] == texts[1]
    assert cached[1] == 0
    if cached[0]:
        event("hit")
    if pool["max_num_seqs"] == 1:  # nothing is set back, so each token from the cache is one less to compute
        assert computed[0] == computed[1] - cached[0]


@given(
    st.lists(st.tuples(shared_prompts, st.integers(1, 8)), max_size=8), st.integers(1, 4), st.none() | st.integers(2, 8)
)
def test_nothing_is_computed_twice_while_there_is_room(work, block_size, window):
    """With room for everything a request takes each whole block that an earlier one computed, save the last token's."""
    groups = [CacheGroupLimits(200), CacheGroupLimits(200, window)]
    engine = Engine(FakeRunner(block_size=block_size, cache_groups=groups, max_num_seqs=1))
    known: list[list[int]] = []
    for prompt, max_tokens in work:
        request_id = engine.add_request(prompt, dataclasses.replace(GREEDY, max_tokens=max_tokens))
        output = finish(engine)[request_id]
        common = max((common_length(prompt[:-1], tokens) for tokens in known), default=0)
        assert output.num_cached_tokens == common // block_size * block_size
        known.append([*prompt, *output.outputs[0].token_ids[:-1]])


def common_length(first: list[int], second: list[int]) -> int:
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@pytest.mark.parametrize("window", [None, 3, 6])
def test_a_prompt_seen_before_is_taken_from_the_cache(window):
    """Within a call, by a later call, with another end, and by completions of one prompt; not after a reset."""
    groups = [CacheGroupLimits(40)] if window is None else [CacheGroupLimits(40), CacheGroupLimits(40, window)]
    runner = FakeRunner(block_size=4, cache_groups=groups, max_num_seqs=1)
    engine = Engine(runner)

    def ask(prompt, n=1):
        request_id = engine.add_request(prompt, dataclasses.replace(GREEDY, n=n))
        output = finish(engine)[request_id]
        assert output.outputs[0].token_ids == expected_tokens(prompt, 5)
        return output.num_cached_tokens

    prompt = list(range(12))
    assert ask(prompt) == 0
    computed = engine.num_computed_tokens
    assert ask(prompt) == 8  # the last token is computed, and with it its block
    assert engine.num_computed_tokens - computed == 4 + 4
    assert ask([*prompt, 50]) == 12
    assert ask([*prompt[:11], 50]) == 8
    assert ask([*prompt[:3], 50, *prompt[4:]]) == 0
    # Outputs are cached like prompts: 12 prompt and 4 of 5 output tokens were computed.
    assert ask([*prompt, *expected_tokens(prompt, 5)]) == 16
    assert ask(list(range(20, 33)), n=3) == 2 * 12
    engine.reset_prefix_cache()
    assert ask(prompt) == 0


def test_a_request_that_is_set_back_takes_its_prompt_and_outputs_from_the_cache():
    """Only what was evicted is computed again; ``num_cached_tokens`` tells of the first admission alone."""
    computed = []
    for caching in (True, False):
        engine = Engine(FakeRunner(num_blocks=14, block_size=2, max_num_seqs=3), enable_prefix_caching=caching)
        prompts_here = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13]]
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        ids = [engine.add_request(prompt, params) for prompt in prompts_here]
        outputs = finish(engine)
        assert sum(outputs[request_id].num_preemptions for request_id in ids) > 0
        assert sum(outputs[request_id].num_cached_tokens for request_id in ids) == 0
        for request_id, prompt in zip(ids, prompts_here, strict=True):
            assert outputs[request_id].outputs[0].token_ids == expected_tokens(prompt, 8)
        computed.append(engine.num_computed_tokens)
    assert computed[0] < computed[1]


def test_a_failed_step_publishes_nothing():
    """Blocks whose K/V a failing step did not write, or wrote in part, are not found by the next request."""
    for late in (False, True):
        runner = FakeRunner(block_size=2)
        engine = Engine(runner)
        runner.fail_at, runner.fail_late = 0, late
        engine.add_request([1, 2, 3, 4, 5], GREEDY)
        with pytest.raises(RuntimeError, match="on fire"):
            engine.step()
        engine.abort_all()
        request_id = engine.add_request([1, 2, 3, 4, 5], GREEDY)
        output = finish(engine)[request_id]
        assert output.num_cached_tokens == 0
        assert output.outputs[0].token_ids == expected_tokens([1, 2, 3, 4, 5], 5)
