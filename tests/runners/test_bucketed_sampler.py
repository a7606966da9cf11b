"""Sampling in buckets gives what ``ops.sampling.sample`` gives, whatever the padding holds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.errors import LogitsError
from compiled_engine.ops.sampling import SampledTokens, sample
from compiled_engine.runners.bucketed_sampler import COMPILED_LOGPROBS, BucketedSampler
from sampling_cases import sampling_cases
from sampling_rows import make_batch

BUCKET = 6
# Compiled when it is first called.
COMPILED = BucketedSampler(lambda f: torch.compile(f, backend="inductor", fullgraph=True, dynamic=False), 200)


class CountingCompile:
    """Compiles nothing; counts the different shapes and types that each function is called with."""

    def __init__(self) -> None:
        self.signatures = set()

    def __call__(self, function):
        def counted(*arguments):
            tensors = [(tuple(a.shape), a.dtype) if isinstance(a, torch.Tensor) else a for a in arguments]
            self.signatures.add((function.__name__, *tensors))
            return function(*arguments)

        return counted


def sample_in_bucket(sampler, logits, batch, num_rows=BUCKET) -> SampledTokens:
    padding = torch.full((num_rows - len(logits), logits.shape[1]), math.nan, dtype=logits.dtype)
    return sampler.sample(torch.cat([logits, padding]), batch, sampler.host_inputs(batch, num_rows))


def assert_right(result: SampledTokens, logits, batch) -> None:
    """Tokens are those of ``sample``. Log-probabilities are right whichever of equally likely tokens were taken."""
    assert result.token_ids == sample(logits, batch).token_ids
    exact = logits.double().log_softmax(-1)
    for row, (token_id, count, entry) in enumerate(
        zip(result.token_ids, batch.num_logprobs, result.logprobs, strict=True)
    ):
        if count < 0:
            assert entry is None
            continue
        count = min(count, logits.shape[1])
        assert next(iter(entry)) == token_id
        assert max(1, count) <= len(entry) <= count + 1
        values = list(entry.values())
        assert values == pytest.approx(exact[row, list(entry)].tolist(), abs=1e-5, rel=1e-6)
        assert values[1:] == sorted(values[1:], reverse=True)
        largest = sorted(values, reverse=True)[:count]
        assert largest == pytest.approx(exact[row].topk(count).values.tolist(), abs=1e-5, rel=1e-6)


@given(sampling_cases(max_rows=BUCKET), st.data())
def test_equals_sample(case, data):
    logits, rows = case
    counts = st.sampled_from([-1, -1, 0, 1, 5, COMPILED_LOGPROBS, COMPILED_LOGPROBS + 1, 10**6])
    rows = [{**row, "logprobs": data.draw(counts)} for row in rows]
    batch = make_batch(rows)
    before = logits.clone()
    sampler = BucketedSampler(lambda function: function, logits.shape[1])
    assert_right(sample_in_bucket(sampler, logits, batch), logits, batch)
    assert torch.equal(logits, before)


@pytest.mark.slow
@given(sampling_cases(max_rows=3, vocab_size=200), st.booleans())
def test_equals_sample_when_compiled(case, wants_logprobs):
    logits, rows = case
    batch = make_batch([{**row, "logprobs": 3 if wants_logprobs else -1} for row in rows])
    assert_right(sample_in_bucket(COMPILED, logits, batch, num_rows=3), logits, batch)


def test_logprobs_are_exactly_those_of_the_host_without_ties():
    logits = torch.randn(5, 100) * 3
    rows = [{"logprobs": count, "forbidden": (1,)} for count in (-1, 0, 7, COMPILED_LOGPROBS, 50)]
    batch = make_batch(rows)
    result = sample_in_bucket(BucketedSampler(lambda function: function, 100), logits, batch)
    for entry, expected in zip(result.logprobs, sample(logits, batch).logprobs, strict=True):
        assert entry is expected is None or list(entry.items()) == list(expected.items())
    assert len(result.logprobs[4]) >= 50


@given(st.lists(sampling_cases(max_rows=BUCKET, vocab_size=130), max_size=4), st.data())
def test_warm_up_covers_every_step(cases, data):
    compile = CountingCompile()
    sampler = BucketedSampler(compile, 130)
    for batch in sampler.warm_up_batches(BUCKET):
        sample_in_bucket(sampler, torch.randn(BUCKET, 130), batch)
    warm = set(compile.signatures)
    assert {name for name, *_ in warm} == {"forbid", "most_likely", "draw", "top_logprobs"}
    for logits, rows in cases:
        rows = [{**row, "logprobs": data.draw(st.sampled_from([-1, 0, 3, 100]))} for row in rows]
        sample_in_bucket(sampler, logits, make_batch(rows))
    assert compile.signatures == warm


@pytest.mark.parametrize("vocab_size", [1, 2, 40])
def test_warm_up_always_has_a_choice(vocab_size):
    compile = CountingCompile()
    sampler = BucketedSampler(compile, vocab_size)
    for batch in sampler.warm_up_batches(3):
        assert len(sample_in_bucket(sampler, torch.zeros(3, vocab_size), batch).token_ids) == 3
    functions = {"most_likely", "draw", "top_logprobs"} | ({"forbid"} if vocab_size > 1 else set())
    assert {name for name, *_ in compile.signatures} == functions


def test_no_top_logprobs_are_still_that_of_the_token():
    sampler = BucketedSampler(lambda function: function, 10)
    result = sample_in_bucket(sampler, torch.zeros(1, 10), make_batch([{"temperature": 0.0, "logprobs": 0}]))
    assert result.logprobs[0] == {0: pytest.approx(-math.log(10))}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bad_logits_are_named(temperature, value):
    sampler = BucketedSampler(lambda function: function, 200)
    logits = torch.zeros(3, 200)
    logits[1, 150] = value
    with pytest.raises(LogitsError, match=f"row 1 .*maximum is {value}"):
        sample_in_bucket(sampler, logits, make_batch([{"temperature": temperature}] * 3))
    all_tokens = tuple(range(200))
    rows = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": temperature, "forbidden": all_tokens}]
    with pytest.raises(LogitsError, match="row 2 .*maximum is -inf.*forbidden"):
        sample_in_bucket(sampler, torch.zeros(3, 200), make_batch(rows))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("count", [0, 3, 100])
def test_a_forbidden_bad_logit_counts_where_logprobs_are_wanted(count, value):
    sampler = BucketedSampler(lambda function: function, 200)
    logits = torch.zeros(3, 200)
    logits[1, 150] = value
    rows = [{"logprobs": 1}, {"forbidden": (150,)}, {"logprobs": 100}]
    assert sample_in_bucket(sampler, logits, make_batch(rows)).logprobs[1] is None
    rows[1]["logprobs"] = count
    with pytest.raises(LogitsError, match=f"row 1 .*maximum is {value}"):
        sample_in_bucket(sampler, logits, make_batch(rows))


def test_host_inputs_are_only_what_the_step_needs():
    sampler = BucketedSampler(lambda function: function, 10)

    def shapes(*rows):
        return [(tuple(t.shape), t.dtype) for t in sampler.host_inputs(make_batch(list(rows)), 4)]

    greedy, random = {"temperature": 0.0}, {"temperature": 0.5}
    mask = [((4, 10), torch.bool)]
    numbers = [((4,), t) for t in (torch.float32, torch.int64, torch.float32, torch.float32, torch.float64)]
    assert shapes(greedy, greedy) == shapes() == []
    assert shapes(greedy, random) == numbers
    assert shapes(greedy, {**greedy, "forbidden": (3,)}) == mask
    assert shapes(random, {**greedy, "forbidden": (3,)}) == mask + numbers


def test_no_temperature_is_subnormal():
    sampler = BucketedSampler(lambda function: function, 10)
    batch = make_batch([{"temperature": temperature} for temperature in (0.0, 1e-40, 1e-45, 0.5)])
    temperature = sampler.host_inputs(batch, 5)[0]
    tiny = torch.finfo(torch.float32).tiny
    assert temperature.tolist() == [0.0, tiny, tiny, 0.5, 0.0]
    assert temperature.dtype == torch.float32


def test_forbidden_tokens_outside_of_the_vocabulary_are_ignored():
    sampler = BucketedSampler(lambda function: function, 10)
    (mask,) = sampler.host_inputs(make_batch([{"temperature": 0.0, "forbidden": (2, 10, 999)}]), 2)
    assert mask.nonzero().tolist() == [[0, 2]]


def test_shapes_are_checked():
    sampler = BucketedSampler(lambda function: function, 10)
    batch = make_batch([{}] * 3)
    with pytest.raises(LogitsError, match="3 rows .* bucket of 2"):
        sampler.host_inputs(batch, 2)
    for shape in ((2, 10), (4, 9), (40,)):
        with pytest.raises(LogitsError, match="logits have shape"):
            sampler.sample(torch.zeros(shape), batch, sampler.host_inputs(batch, 4))
    nothing = make_batch([])
    assert sampler.sample(torch.zeros(4, 10), nothing, sampler.host_inputs(nothing, 4)) == SampledTokens((), ())
