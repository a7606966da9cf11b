"""Sampling with static shapes gives the tokens of ``ops.sampling.sample``, row by row."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.ops.sampling import least_scaled, logprobs_of, sample, uniform
from compiled_engine.ops.static_sampling import draw, forbid, most_likely, top_logprobs
from sampling_cases import sampling_cases
from sampling_rows import make_batch

BELOW_ONE = 1.0 - 2.0**-53
BELOW_HALF = 0.5 - 2.0**-53


def parameters_of(batch):
    uniforms = uniform(batch.seeds, batch.positions)
    return batch.temperature, batch.top_k, batch.top_p, least_scaled(batch.min_p), uniforms


def without_forbidden(rows):
    return [{**row, "forbidden": ()} for row in rows]


@cache
def compiled(function):
    return torch.compile(function, backend="inductor", fullgraph=True, dynamic=False)


@given(sampling_cases())
def test_draws_the_tokens_of_sample(case):
    logits, rows = case
    before = logits.clone()
    batch = make_batch(without_forbidden(rows))
    token_ids, maxima = draw(logits, *parameters_of(batch))
    assert tuple(token_ids.tolist()) == sample(logits, batch).token_ids
    assert (token_ids.dtype, maxima.dtype) == (torch.int64, torch.float32)
    assert torch.equal(maxima, logits.amax(-1))
    assert torch.equal(logits, before)


@given(st.integers(0, 2**32))
def test_draws_the_tokens_of_sample_from_a_real_vocabulary(seed):
    logits = torch.randn(6, 49152, generator=torch.Generator().manual_seed(seed)) * 2
    logits[3:] = (logits[3:] * 2).round() / 2
    filters = [{}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.95}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 1000}]
    batch = make_batch([{"seed": seed + row, **parameters} for row, parameters in enumerate(filters)])
    assert tuple(draw(logits, *parameters_of(batch))[0].tolist()) == sample(logits, batch).token_ids


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_types_are_computed_in_float32(dtype):
    logits = (torch.randn(16, 500) * 2).to(dtype)
    batch = make_batch([{"top_p": 0.9, "temperature": row % 4 / 3} for row in range(16)])
    token_ids, maxima = draw(logits, *parameters_of(batch))
    assert tuple(token_ids.tolist()) == sample(logits.float(), batch).token_ids
    assert maxima.dtype == torch.float32
    greedy_ids, maxima = most_likely(logits)
    assert maxima.dtype == torch.float32
    assert torch.equal(greedy_ids, logits.float().argmax(-1))
    assert torch.equal(maxima, logits.float().amax(-1))


def draw_with(number: float, logits: list[float], **parameters) -> int:
    """The token of one row whose uniform number is ``number``."""
    *others, _ = parameters_of(make_batch([parameters]))
    return int(draw(torch.tensor([logits]), *others, torch.tensor([number], dtype=torch.float64))[0])


def test_a_number_at_an_edge_belongs_to_the_token_above_it():
    assert [draw_with(number, [3.0] * 2) for number in (0.0, BELOW_HALF, 0.5, BELOW_ONE)] == [0, 0, 1, 1]
    assert [draw_with(number, [3.0] * 256) for number in (0.0, BELOW_HALF, 0.5, BELOW_ONE)] == [0, 127, 128, 255]
    assert [draw_with(number, [-math.inf, 1.0, -math.inf]) for number in (0.0, BELOW_ONE)] == [1, 1]


@pytest.mark.parametrize("vocab_size", [4, 256, 512])
def test_top_p_keeps_no_token_beyond_the_one_that_reaches_it(vocab_size):
    for share in (0.25, 0.5, 0.75):
        assert draw_with(BELOW_ONE, [3.0] * vocab_size, top_p=share) == vocab_size * share - 1
    assert draw_with(BELOW_ONE, [3.0] * vocab_size, top_p=0.5 + 2.0**-20) == vocab_size / 2


def test_all_is_kept_without_filters_and_little_is_lost_with_wide_ones():
    tail = [0.0, *[-30.0] * 199]
    assert draw_with(BELOW_ONE, tail) == 199
    assert draw_with(BELOW_ONE, tail, top_k=200, min_p=1e-20) == 199
    assert draw_with(BELOW_ONE, tail, top_p=0.9) == 0
    assert draw_with(BELOW_ONE, [3.0] * 10_240, top_p=1.0 - 2.0**-8) == 10_200 - 1


def test_top_p_just_below_one():
    """The limit, which is rounded, may lie above the sum."""
    logits = torch.randn(300, 5)
    batch = make_batch([{"top_p": 1.0 - 2.0**-24}] * 300)
    assert tuple(draw(logits, *parameters_of(batch))[0].tolist()) == sample(logits, batch).token_ids


@pytest.mark.slow
@given(sampling_cases(max_rows=3, vocab_size=300))
def test_compiled_it_draws_the_same(case):
    logits, rows = case
    padded = torch.cat([logits, torch.full((3 - len(logits), 300), math.nan)])
    rows = without_forbidden(rows)
    batch = make_batch(rows + [{"temperature": 1.0}] * (3 - len(rows)))
    token_ids, maxima = compiled(draw)(padded, *parameters_of(batch))
    assert tuple(token_ids[: len(logits)].tolist()) == sample(logits, make_batch(rows)).token_ids
    assert torch.equal(maxima[: len(logits)], logits.amax(-1))
    assert maxima[len(logits) :].isnan().all()


@given(sampling_cases())
def test_most_likely_is_the_first_of_the_largest(case):
    logits, _ = case
    token_ids, maxima = most_likely(logits)
    assert token_ids.tolist() == logits.numpy().argmax(-1).tolist()
    assert torch.equal(maxima, logits.amax(-1))


@pytest.mark.parametrize("place", [0, 5, 199])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_maxima_show_what_no_token_can_be_chosen_from(place, value):
    logits = torch.randn(4, 200)
    logits[1, place] = value
    logits[2] = -math.inf
    batch = make_batch([{"temperature": 1.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1}] * 4)
    for token_ids, maxima in (most_likely(logits), draw(logits, *parameters_of(batch))):
        assert maxima[[0, 3]].tolist() == logits[[0, 3]].amax(-1).tolist()
        assert maxima[1].isnan() if math.isnan(value) else maxima[1] == math.inf
        assert maxima[2] == -math.inf
        assert ((token_ids >= 0) & (token_ids < 200)).all()


@pytest.mark.parametrize("count", [1, 4, 300])
def test_top_logprobs_are_those_of_the_host(count):
    logits = torch.randn(5, 300) * 3
    token_ids = torch.tensor([0, 299, 7, 7, 128])
    sampled, values, ids = top_logprobs(logits, token_ids, count)
    assert (values.shape, ids.shape, values.dtype, ids.dtype) == ((5, count), (5, count), torch.float32, torch.int64)
    for row, expected in enumerate(logprobs_of(logits, token_ids, (count,) * 5)):
        entry = {int(token_ids[row]): float(sampled[row])}
        for token_id, value in zip(ids[row].tolist(), values[row].tolist(), strict=True):
            entry.setdefault(token_id, value)
        assert list(entry.items()) == list(expected.items())


def test_forbid_leaves_its_arguments_alone():
    logits = torch.randn(2, 5)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[1, [0, 4]] = True
    before = logits.clone()
    assert forbid(logits, mask).isinf().equal(mask)
    assert torch.equal(logits, before)
