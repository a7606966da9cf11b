"""Sampling against a slow float64 oracle, its distribution, and its independence of batch mates."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.errors import LogitsError
from compiled_engine.ops.sampling import SamplingBatch, philox4x32, sample, uniform

MARGIN = 1e-5


def make_batch(
    num_rows: int,
    *,
    temperature: float | list[float] = 1.0,
    top_k: int | list[int] = 0,
    top_p: float | list[float] = 1.0,
    min_p: float | list[float] = 0.0,
    seeds: list[int] | None = None,
    positions: list[int] | None = None,
    forbidden: list[tuple[int, ...]] | None = None,
    logprobs: int | list[int] = -1,
) -> SamplingBatch:
    def column(value, dtype):
        return torch.tensor(value if isinstance(value, list) else [value] * num_rows, dtype=dtype)

    return SamplingBatch(
        temperature=column(temperature, torch.float32),
        top_k=column(top_k, torch.int64),
        top_p=column(top_p, torch.float32),
        min_p=column(min_p, torch.float32),
        seeds=column(seeds or list(range(num_rows)), torch.int64),
        positions=column(positions or [0] * num_rows, torch.int64),
        forbidden_token_ids=tuple(forbidden or [()] * num_rows),
        num_logprobs=tuple(logprobs if isinstance(logprobs, list) else [logprobs] * num_rows),
    )


def distribution(logits: np.ndarray, temperature, top_k, top_p, min_p) -> tuple[np.ndarray, float]:
    """The probabilities of one row in plain float64 Python, and how near a filter was to deciding otherwise."""
    scaled = logits / temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    near = 1.0
    kept = np.ones(len(logits), bool)
    if min_p > 0:
        ratio = probabilities / probabilities.max()
        kept &= ratio >= min_p
        near = min(near, np.abs(ratio - min_p)[ratio < 1].min(initial=1.0))
    if 0 < top_k < len(logits):
        kept &= logits >= np.sort(logits)[::-1][top_k - 1]
    if top_p < 1:
        left = np.where(kept, probabilities, 0)
        left /= left.sum()
        mass = 0.0
        chosen = np.zeros(len(logits), bool)
        for token in sorted(range(len(left)), key=lambda t: (-left[t], t)):
            chosen[token] = True
            mass += left[token]
            near = min(near, abs(mass - top_p))
            if mass >= top_p:
                break
        kept &= chosen
    left = np.where(kept, probabilities, 0)
    return left / left.sum(), near


def oracle(logits: np.ndarray, temperature, top_k, top_p, min_p, forbidden, number) -> tuple[int, float]:
    """The token of one row, and how near the nearest decision was to going the other way."""
    logits = logits.astype(np.float64)
    logits[list(forbidden)] = -np.inf
    if temperature == 0:
        return int(np.argmax(logits)), 1.0
    left, near = distribution(logits, temperature, top_k, top_p, min_p)
    cumulative = np.cumsum(left)
    near = min(near, np.abs(cumulative[left > 0][:-1] - number).min(initial=1.0))
    return int(np.searchsorted(cumulative, number, side="right")), near


@st.composite
def rows(draw):
    """A few rows of logits (many ties: small integers; or reals; some -inf), each with parameters of its own."""
    vocab_size = draw(st.sampled_from([1, 2, 5, 130, 300, 700]))
    num_rows = draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        logits = rng.integers(-3, 4, (num_rows, vocab_size)).astype(np.float32)
    else:
        logits = (rng.standard_normal((num_rows, vocab_size)) * draw(st.sampled_from([0.01, 1, 6]))).astype(np.float32)
    if draw(st.booleans()):
        logits[:, 1:][rng.random((num_rows, vocab_size - 1)) < 0.3] = -np.inf

    def per_row(strategy):
        return draw(st.lists(strategy, min_size=num_rows, max_size=num_rows))

    parameters = {
        "temperature": per_row(st.sampled_from([0.0, 0.3, 1.0, 2.5])),
        "top_k": per_row(st.sampled_from([0, 1, 3, 50, 10**6])),
        "top_p": per_row(st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1])),
        "min_p": per_row(st.sampled_from([0.0, 0.02, 0.5, 1.0])),
        "seeds": per_row(st.integers(-(2**63), 2**63 - 1)),
        "positions": per_row(st.integers(0, 10**6)),
        "forbidden": per_row(st.sets(st.integers(1, vocab_size - 1), max_size=3) if vocab_size > 1 else st.just(set())),
    }
    parameters["forbidden"] = [tuple(sorted(ids)) for ids in parameters["forbidden"]]
    return torch.from_numpy(logits), parameters


@given(rows())
def test_equals_the_oracle(case):
    logits, parameters = case
    batch = make_batch(len(logits), **parameters)
    numbers = uniform(batch.seeds, batch.positions)
    tokens = sample(logits, batch).token_ids
    for row, token in enumerate(tokens):
        arguments = [parameters[name][row] for name in ("temperature", "top_k", "top_p", "min_p", "forbidden")]
        expected, near = oracle(logits[row].numpy(), *arguments, float(numbers[row]))
        assert token not in parameters["forbidden"][row]
        assert near < MARGIN or token == expected


@given(rows(), st.randoms(use_true_random=False))
def test_a_row_does_not_depend_on_the_others(case, random):
    logits, parameters = case
    together = sample(logits, make_batch(len(logits), **parameters)).token_ids
    order = list(range(len(logits)))
    random.shuffle(order)
    shuffled = sample(
        logits[order], make_batch(len(order), **{name: [v[i] for i in order] for name, v in parameters.items()})
    ).token_ids
    assert shuffled == tuple(together[i] for i in order)
    for row in order:
        alone = make_batch(1, **{name: [values[row]] for name, values in parameters.items()})
        assert sample(logits[row : row + 1], alone).token_ids == (together[row],)


@given(rows())
def test_changes_nothing_it_was_given(case):
    logits, parameters = case
    batch = make_batch(len(logits), **parameters)
    before, temperature = logits.clone(), batch.temperature.clone()
    sample(logits, batch)
    assert torch.equal(before, logits)
    assert torch.equal(temperature, batch.temperature)


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 4},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_distribution(parameters):
    """Chi-square of 20,000 draws of fixed seeds against the exact probabilities of a 10-token row."""
    num_draws = 20_000
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -2.0, 1.5, -0.5, 0.25, -3.0])
    counts = np.zeros(10)
    # The same request at different positions, and different requests at one position.
    for seeds, positions in (
        ([7] * (num_draws // 2), list(range(num_draws // 2))),
        (list(range(num_draws // 2)), [3] * (num_draws // 2)),
    ):
        batch = make_batch(len(seeds), seeds=seeds, positions=positions, **parameters)
        counts += np.bincount(sample(logits.expand(len(seeds), -1), batch).token_ids, minlength=10)
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | parameters
    probabilities = distribution(logits.double().numpy(), **defaults)[0]
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible] * counts.sum()
    chi_square = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = int(possible.sum()) - 1
    # Wilson-Hilferty: the cube root of chi-square over its degrees of freedom is nearly normal. 4 sigma, fixed seeds.
    deviation = ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert deviation < 4


def test_greedy_takes_the_first_of_equals_and_never_divides():
    logits = torch.tensor([[1.0, 5.0, 5.0], [3.0, 3.0, 3.0]])
    assert sample(logits, make_batch(2, temperature=0.0)).token_ids == (1, 0)
    # The smallest temperatures there are behave like greedy, the largest like a uniform choice.
    for temperature in (1e-45, 1e-38, 1e-6):
        assert sample(logits[:1] * torch.tensor([1.0, 2.0, 1.0]), make_batch(1, temperature=temperature)).token_ids == (
            1,
        )
    hot = make_batch(600, temperature=3.4e38, seeds=[5] * 600, positions=list(range(600)))
    counts = np.bincount(
        sample(torch.tensor([[1.0, -torch.inf, 50.0, -50.0]]).expand(600, -1), hot).token_ids, minlength=4
    )
    assert counts[1] == 0
    assert counts[[0, 2, 3]].min() > 150


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_other_types_are_computed_in_float32(dtype, temperature):
    logits = (torch.randn(6, 500) * 3).to(dtype)
    batch = make_batch(6, temperature=temperature, top_p=0.9, logprobs=2)
    assert sample(logits, batch) == sample(logits.float(), batch)


def test_top_p_needs_the_whole_vocabulary_only_sometimes():
    """A flat row of 5,000 tokens goes beyond every sorted head; a peaked one beside it does not."""
    flat, peaked = torch.zeros(5000), torch.full((5000,), -20.0)
    peaked[4321] = 0.0
    numbers = 400
    batch = make_batch(2 * numbers, top_p=0.9, seeds=list(range(2 * numbers)))
    logits = torch.cat([flat.expand(numbers, -1), peaked.expand(numbers, -1)])
    tokens = sample(logits, batch).token_ids
    # Equal tokens are kept in order of their ids: the first 4,500.
    assert max(tokens[:numbers]) < 4500
    assert max(tokens[:numbers]) > 4300
    assert set(tokens[numbers:]) == {4321}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bad_logits_are_named(temperature, value):
    logits = torch.zeros(3, 200)
    logits[1, 150] = value
    with pytest.raises(LogitsError, match="row 1 "):
        sample(logits, make_batch(3, temperature=temperature))
    logits = torch.zeros(3, 4)
    with pytest.raises(LogitsError, match="row 2 .*forbidden"):
        sample(logits, make_batch(3, temperature=[0.0, 1.0, temperature], forbidden=[(), (), (0, 1, 2, 3)]))


def test_row_count_must_match():
    with pytest.raises(LogitsError, match="shape"):
        sample(torch.zeros(2, 4), make_batch(3))
    assert sample(torch.zeros(0, 4), make_batch(0)).token_ids == ()


def test_logprobs_are_those_of_the_raw_logits():
    logits = torch.randn(4, 50) * 2
    batch = make_batch(
        4, temperature=[0.0, 5.0, 5.0, 5.0], top_k=[0, 0, 2, 0], forbidden=[(1,), (), (), (2,)], logprobs=[-1, 0, 3, 50]
    )
    result = sample(logits, batch)
    exact = torch.log_softmax(logits.double(), -1)
    assert result.logprobs[0] is None
    assert [len(entry) for entry in result.logprobs[1:]] == [
        1,
        len({result.token_ids[2], *exact[2].topk(3).indices.tolist()}),
        50,
    ]
    for row in (1, 2, 3):
        entry = result.logprobs[row]
        assert next(iter(entry)) == result.token_ids[row]
        others = list(entry.values())[1:]
        assert others == sorted(others, reverse=True)
        for token, value in entry.items():
            assert value == pytest.approx(float(exact[row, token]), abs=1e-5)


def test_philox_known_answers():
    """The test vectors that its authors publish with Random123 (philox4x32, 10 rounds)."""
    vectors = [
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ]
    counters, keys, words = (np.array([vector[i] for vector in vectors], np.uint32) for i in range(3))
    assert philox4x32(counters, keys).tolist() == words.tolist()


def test_uniform_is_uniform_and_uncorrelated():
    def deviation(values):
        counts = np.histogram(values, bins=100, range=(0, 1))[0]
        return (((counts - len(values) / 100) ** 2) / (len(values) / 100)).sum()

    n = 50_000
    one = torch.ones(n, dtype=torch.int64)
    for seeds, positions in ((one, torch.arange(n)), (torch.arange(n), one), (-torch.arange(n), one * 2**40)):
        values = uniform(seeds, positions).numpy()
        assert values.min() >= 0
        assert values.max() < 1
        assert len(np.unique(values)) > n - 2
        assert 50 < deviation(values) < 170  # chi-square with 99 degrees of freedom, far in both tails
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02


def test_uniform_depends_on_every_bit():
    base = float(uniform(torch.tensor([0]), torch.tensor([0])))
    for bit in range(63):
        assert float(uniform(torch.tensor([1 << bit]), torch.tensor([0]))) != base
        assert float(uniform(torch.tensor([0]), torch.tensor([1 << bit]))) != base
    assert float(uniform(torch.tensor([-(2**63)]), torch.tensor([0]))) != base
