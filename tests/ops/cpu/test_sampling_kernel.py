"""The sampling kernel against ``ops.sampling.sample`` and a slow float64 reference, on two instruction paths."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.errors import LogitsError
from compiled_engine.ops.cpu.build import load_kernels
from compiled_engine.ops.cpu.instructions import runnable_paths
from compiled_engine.ops.cpu.sampling import CpuSampler
from compiled_engine.ops.sampling import SampledTokens, SamplingBatch, sample, uniform
from kernel_folder import KERNELS
from sampling_rows import DEFAULTS, make_batch

# Rounding of exp and of sums in float32; decisions nearer to an edge than this may go either way.
MARGIN = 2e-6
# From so many logits on, the kernel wakes threads.
MANY_LOGITS = 1 << 16
PATHS = sorted({"portable", runnable_paths()[0].name})


@pytest.fixture(scope="module", params=PATHS)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return load_kernels(KERNELS, request.param)


@pytest.fixture(scope="module")
def sampler(library: ctypes.CDLL) -> CpuSampler:
    return CpuSampler(library)


@pytest.fixture
def two_threads(library: ctypes.CDLL) -> Iterator[None]:
    library.set_num_threads.argtypes, library.set_num_threads.restype = [ctypes.c_int64], None
    library.set_num_threads(2)
    yield
    library.set_num_threads(0)


def reference(logits: np.ndarray, row: dict, number: float) -> tuple[int, float]:
    """The token of one row in float64, by sorting; and how near the nearest decision was to going the other way."""
    logits = logits.astype(np.float64)
    logits[list(row["forbidden"])] = -np.inf
    if row["temperature"] == 0:
        return int(np.argmax(logits)), 1.0
    scaled = (logits - logits.max()) / float(np.float32(row["temperature"]))
    weights = np.exp(scaled)
    near = 1.0
    if row["min_p"] > 0:
        limit = math.log(float(np.float32(row["min_p"])))
        near = np.abs(scaled[scaled < 0] - limit).min(initial=1.0)
        weights[scaled < limit] = 0
    if 0 < row["top_k"] < len(logits):
        weights[logits < np.sort(logits)[-row["top_k"]]] = 0
    if row["top_p"] < 1:
        order = np.lexsort((np.arange(len(logits)), -logits))
        mass = np.cumsum(weights[order]) / weights.sum()
        limit = float(np.float32(row["top_p"]))
        # All that have weight where the whole falls short by rounding.
        kept = min(int((mass < limit).sum()) + 1, int((weights > 0).sum()))
        near = min(near, np.abs(mass[weights[order] > 0][:-1] - limit).min(initial=1.0))
        weights[order[kept:]] = 0
    cumulative = np.cumsum(weights) / weights.sum()
    near = min(near, np.abs(cumulative[weights > 0][:-1] - number).min(initial=1.0))
    return int(np.searchsorted(cumulative, number, side="right")), near


VOCAB_SIZES = [1, 2, 3, 127, 128, 129, 700, 4095, 4096, 4097]


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, list[dict]]:
    """A few rows of logits, some with many ties or -inf, each with parameters of its own."""
    vocab_size = draw(st.sampled_from(VOCAB_SIZES))
    num_rows = draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["ties", "equal", "narrow", "wide", "peaked"]))
    logits = rng.standard_normal((num_rows, vocab_size)) * {"narrow": 1e-3, "wide": 6}.get(kind, 1)
    if kind == "ties":
        logits = rng.integers(-3, 4, (num_rows, vocab_size))
    elif kind == "equal":
        logits[:] = draw(st.sampled_from([0.0, -0.0, 1e30, -1e30]))
    elif kind == "peaked":
        logits[:, rng.integers(0, vocab_size, 3)] += 12
    if draw(st.booleans()):
        logits = np.where(rng.random((num_rows, vocab_size)) < draw(st.sampled_from([0.2, 0.99])), -np.inf, logits)
        logits[:, rng.integers(vocab_size)] = 0
    allowed = [np.flatnonzero(np.isfinite(row)) for row in logits]
    rows = []
    for row in range(num_rows):
        # At least one finite logit stays.
        forbidden = rng.choice(vocab_size, draw(st.integers(0, 4)))
        forbidden = forbidden[forbidden != rng.choice(allowed[row])] if len(allowed[row]) > 1 else forbidden[:0]
        if not np.isfinite(np.delete(logits[row], forbidden)).any():
            forbidden = forbidden[:0]
        rows.append(
            {
                "temperature": draw(st.sampled_from([0.0, 1e-45, 0.3, 1.0, 2.5, 3.4e38])),
                "top_k": draw(st.sampled_from([0, 1, 3, 50, 10**6, vocab_size])),
                "top_p": draw(st.sampled_from([1.0, 1 - 1e-7, 0.999, 0.9, 0.5, 0.1, 1e-9])),
                "min_p": draw(st.sampled_from([0.0, 1e-6, 0.02, 0.5, 1.0])),
                "seed": draw(st.integers(-(2**63), 2**63 - 1)),
                "position": draw(st.integers(0, 2**40)),
                "forbidden": [int(token) for token in forbidden],
                "logprobs": draw(st.sampled_from([-1, -1, 0, 1, 5, 60])),
            }
        )
    return torch.from_numpy(logits.astype(np.float32)), rows


def assert_logprobs(entry: dict[int, float] | None, logits: torch.Tensor, token: int, count: int) -> None:
    """The sampled token, then the first ``count`` by logit and, where equal, by id."""
    if count < 0:
        assert entry is None
        return
    assert entry is not None
    exact = torch.log_softmax(logits.double(), -1)
    best = np.lexsort((np.arange(len(logits)), -logits.numpy()))[:count].tolist()
    assert list(entry) == [token, *(other for other in best if other != token)]
    assert all(value == pytest.approx(float(exact[token]), abs=1e-5) for token, value in entry.items())


@given(case=cases())
def test_equals_sample_and_the_reference(sampler: CpuSampler, case: tuple[torch.Tensor, list[dict]]) -> None:
    logits, rows = case
    batch = make_batch(rows)
    before = logits.clone()
    result, expected = sampler.sample(logits, batch), sample(logits, batch)
    assert torch.equal(logits, before)
    numbers = uniform(batch.seeds, batch.positions).tolist()
    for index, (token, other, number) in enumerate(zip(result.token_ids, expected.token_ids, numbers, strict=True)):
        exact, near = reference(logits[index].numpy(), rows[index], number)
        assert token not in rows[index]["forbidden"]
        assert near < MARGIN or token == other == exact
        assert_logprobs(result.logprobs[index], logits[index], token, rows[index]["logprobs"])


@given(case=cases())
def test_a_row_does_not_depend_on_the_others(sampler: CpuSampler, case: tuple[torch.Tensor, list[dict]]) -> None:
    logits, rows = case
    together = sampler.sample(logits, make_batch(rows))
    for index, row in enumerate(rows):
        alone = sampler.sample(logits[index : index + 1], make_batch([{"seed": index, "position": 7 * index} | row]))
        assert alone.token_ids == together.token_ids[index : index + 1]
        assert alone.logprobs == together.logprobs[index : index + 1]


MIXED = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"top_k": 50},
    {"top_k": 40_000, "top_p": 0.95},
    {"top_p": 0.9},
    {"temperature": 1.3, "top_p": 0.99, "min_p": 0.001},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.0, "logprobs": 3, "forbidden": (0, 1, 2)},
    {"logprobs": 0},
]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_threads_change_nothing(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Rows shared out among threads, one row shared by them, and one thread: the same bits."""
    sampler, rows = CpuSampler(library), [row | {"seed": seed} for seed, row in enumerate(MIXED)]
    logits = (torch.randn(len(rows), MANY_LOGITS + 5) * 2).to(dtype)
    together = sampler.sample(logits, make_batch([{"position": 0} | row for row in rows]))
    for num_threads in (2, 1):
        library.set_num_threads(num_threads)
        for index, row in enumerate(rows):
            alone = sampler.sample(logits[index : index + 1], make_batch([row]))
            assert alone == SampledTokens((together.token_ids[index],), (together.logprobs[index],))


def exact_rows(logits: torch.Tensor, row: dict, num_draws: int) -> tuple[torch.Tensor, SamplingBatch]:
    """The same logits and parameters at ``num_draws`` positions."""
    batch = make_batch([row | {"seed": 5, "position": position} for position in range(num_draws)])
    return logits.expand(num_draws, -1), batch


@pytest.mark.parametrize("vocab_size", [300, 4097])
@pytest.mark.parametrize(
    "row",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 4},
        {"top_k": 200},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 1.3, "top_k": 60, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_frequencies_are_the_probabilities(sampler: CpuSampler, row: dict, vocab_size: int) -> None:
    """Chi-square of 20,000 draws of fixed seeds, with tokens expected fewer than ten times taken together."""
    num_draws = 20_000
    logits = torch.from_numpy(np.random.default_rng(vocab_size).standard_normal(vocab_size).astype(np.float32)) * 2
    tokens = sampler.sample(*exact_rows(logits, row, num_draws)).token_ids
    counts = np.bincount(tokens, minlength=vocab_size).astype(float)
    filters = DEFAULTS | row
    scaled = logits.double().numpy() / filters["temperature"]
    weights = np.exp(scaled - scaled.max())
    kept = np.array(sorted(_kept(logits.numpy(), filters)))
    assert set(tokens) <= set(kept.tolist())
    expected = np.zeros(vocab_size)
    expected[kept] = weights[kept] / weights[kept].sum() * num_draws
    rare = expected < 10
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    chi_square, freedom = ((observed - wanted) ** 2 / wanted).sum(), len(wanted) - 1
    # Wilson-Hilferty: the cube root of chi-square over its degrees of freedom is nearly normal. 4 sigma, fixed seeds.
    deviation = ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert deviation < 4


def _kept(logits: np.ndarray, row: dict) -> set[int]:
    """The tokens that the filters keep, in float64; logits without ties."""
    scaled = (logits.astype(np.float64) - logits.max()) / row["temperature"]
    kept = set(np.flatnonzero(scaled >= (math.log(row["min_p"]) if row["min_p"] else -np.inf)).tolist())
    order = sorted(kept, key=lambda token: (-logits[token], token))
    if row["top_k"]:
        order = order[: row["top_k"]]
    mass = np.cumsum(np.exp(scaled[order]))
    return set(order[: int((mass < row["top_p"] * mass[-1]).sum()) + 1]) if row["top_p"] < 1 else set(order)


def test_the_random_number_is_that_of_uniform(sampler: CpuSampler) -> None:
    """Of 4096 equal logits, a number's first 12 bits are the token."""
    rng = np.random.default_rng(0)
    seeds = [0, -1, 2**63 - 1, -(2**63), *rng.integers(-(2**63), 2**63 - 1, 60).tolist()]
    positions = [0, 2**40, *rng.integers(0, 2**40, 62).tolist()]
    batch = make_batch([{"seed": seed, "position": at} for seed, at in zip(seeds, positions, strict=True)])
    tokens = sampler.sample(torch.zeros(64, 4096), batch).token_ids
    assert tokens == tuple((uniform(batch.seeds, batch.positions) * 4096).long().tolist())


def test_the_random_number_has_53_bits(sampler: CpuSampler) -> None:
    """Of so many equal logits that for some numbers the last 27 bits decide."""
    vocab_size = 50_000
    numbers = uniform(torch.arange(1 << 18), torch.zeros(1 << 18, dtype=torch.int64))
    tokens, rough = (numbers * vocab_size).long(), (torch.floor(numbers * 2**26) * 2.0**-26 * vocab_size).long()
    seeds = torch.nonzero(tokens != rough).flatten()
    assert len(seeds) > 20
    batch = make_batch([{"seed": seed, "position": 0} for seed in seeds.tolist()])
    assert sampler.sample(torch.zeros(1, vocab_size).expand(len(seeds), -1), batch).token_ids == tuple(
        tokens[seeds].tolist()
    )


@pytest.mark.parametrize("vocab_size", [5, 127, 128, 129, 5000])
def test_greedy_takes_the_first_of_equals(sampler: CpuSampler, vocab_size: int) -> None:
    for first in range(0, vocab_size, 1 + vocab_size // 40):
        logits = torch.full((1, vocab_size), -1.0)
        logits[0, first:] = torch.where(torch.arange(first, vocab_size) % 3 == first % 3, 4.0, 3.0)
        assert sampler.sample(logits, make_batch([{"temperature": 0.0}])).token_ids == (first,)


def test_top_p_goes_by_logits_where_weights_are_equal(sampler: CpuSampler) -> None:
    """At the highest temperature all weights are 1. Also a row that histograms cannot take apart, and one of equals."""
    logits = torch.arange(1000.0)
    for function in (sampler.sample, sample):
        for temperature in (3.4e38, 1e35):
            tokens = function(*exact_rows(logits, {"temperature": temperature, "top_p": 0.01}, 300)).token_ids
            assert set(tokens) == set(range(990, 1000))
        tokens = function(*exact_rows(torch.zeros(1000), {"top_p": 0.01}, 300)).token_ids
        assert set(tokens) == set(range(10))


def test_top_p_stops_where_it_is_reached_exactly(sampler: CpuSampler) -> None:
    """Weights of 1, whose sums are exact: half of the mass is half of the tokens."""
    for function in (sampler.sample, sample):
        for logits in (torch.zeros(1000), torch.arange(1000.0).flip(0)):
            tokens = function(*exact_rows(logits, {"temperature": 1e20, "top_p": 0.5}, 4000)).token_ids
            assert max(tokens) == 499


def test_each_filter_works_on_what_the_one_before_left(sampler: CpuSampler) -> None:
    """Logits 0, -0.1, -0.2 and so on, in any order: min_p=0.5 keeps 7, half of whose mass is that of the first 3."""
    order = torch.from_numpy(np.random.default_rng(1).permutation(2000))
    logits = torch.empty(2000)
    logits[order] = -0.1 * torch.arange(2000.0)
    for row, num_kept in (
        ({"min_p": 0.5, "top_k": 10}, 7),
        ({"min_p": 0.5, "top_k": 100}, 7),
        ({"min_p": 0.5, "top_k": 5}, 5),
        ({"min_p": 0.01, "top_k": 30}, 30),
        ({"min_p": 0.5, "top_p": 0.5}, 3),
        ({"top_k": 7, "top_p": 0.5}, 3),
        ({"min_p": 0.5, "top_k": 100, "top_p": 0.5}, 3),
    ):
        for function in (sampler.sample, sample):
            assert set(function(*exact_rows(logits, row, 600)).token_ids) == set(order[:num_kept].tolist())


def test_top_k_keeps_all_that_equal_the_last(sampler: CpuSampler) -> None:
    logits = torch.zeros(400)
    logits[[7, 300]] = 2.0
    logits[[50, 51, 399]] = 1.0
    for function in (sampler.sample, sample):
        assert set(function(*exact_rows(logits, {"top_k": 2}, 300)).token_ids) == {7, 300}
        assert set(function(*exact_rows(logits, {"top_k": 3}, 300)).token_ids) == {7, 50, 51, 300, 399}
        assert set(function(*exact_rows(torch.arange(6.0) / 6, {"top_k": 5}, 300)).token_ids) == {1, 2, 3, 4, 5}
        # More than there are blocks of the row, and those maxima are above the fifth largest logit.
        assert set(function(*exact_rows(logits, {"top_k": 5}, 300)).token_ids) == {7, 50, 51, 300, 399}


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
@pytest.mark.parametrize("min_p", [0.5, 0.3, 0.9])
def test_min_p_decides_the_same_to_the_last_bit(sampler: CpuSampler, min_p: float, temperature: float) -> None:
    """Around the edge, the second token is kept when its scaled logit, rounded to float32, reaches log(min_p)."""
    limit = np.float32(math.log(np.float32(min_p)))
    top = np.float32(3.1)
    edge = top + limit * np.float32(temperature)
    for step in range(-4, 5):
        logit = edge
        for _ in range(abs(step)):
            logit = np.nextafter(logit, np.float32(math.copysign(math.inf, step)))
        keeps = (logit - top) / np.float32(temperature) >= limit
        logits = torch.tensor([top, logit])
        for function in (sampler.sample, sample):
            tokens = function(*exact_rows(logits, {"min_p": min_p, "temperature": temperature}, 64)).token_ids
            assert set(tokens) == ({0, 1} if keeps else {0})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("vocab_size", [5, 128, 517])
def test_other_types_are_computed_in_float32(sampler: CpuSampler, dtype: torch.dtype, vocab_size: int) -> None:
    logits = (torch.randn(len(MIXED), vocab_size) * 3).to(dtype)
    logits[:, 1] = -torch.inf
    batch = make_batch(MIXED)
    assert sampler.sample(logits, batch) == sampler.sample(logits.float(), batch)


def test_any_strides(sampler: CpuSampler) -> None:
    batch = make_batch(MIXED)
    logits = torch.randn(600, len(MIXED))
    expected = sampler.sample(logits.T.contiguous(), batch)
    assert sampler.sample(logits.T, batch) == expected
    assert sampler.sample(torch.cat([logits, logits]).T[:, :600].contiguous()[:, :600], batch) == expected
    wide = torch.cat([logits.T, torch.full((len(MIXED), 9), 99.0)], dim=1)
    assert sampler.sample(wide[:, :600], batch) == expected
    odd = dataclasses.replace(batch, temperature=torch.stack([batch.temperature] * 2, 1)[:, 0])
    assert sampler.sample(wide[:, :600], odd) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("token", [0, 127, 150, 199])
def test_bad_logits_are_named(sampler: CpuSampler, temperature: float, value: float, token: int) -> None:
    logits = torch.zeros(3, 200)
    logits[1, token] = value
    rows = [{"temperature": temperature}] * 3
    with pytest.raises(LogitsError, match=f"row 1 .* is {abs(value)}"):
        sampler.sample(logits, make_batch(rows))
    # A forbidden token's logit does not matter, but for log-probabilities.
    rows[1] = rows[1] | {"forbidden": (token,)}
    assert sampler.sample(logits, make_batch(rows)).token_ids[1] != token
    for function in (sampler.sample, sample):
        with pytest.raises(LogitsError, match="row 1 "):
            function(logits, make_batch([rows[0], rows[1] | {"logprobs": 0}, rows[2]]))


def test_what_cannot_be_sampled_is_refused(sampler: CpuSampler) -> None:
    with pytest.raises(LogitsError, match="row 1 .*forbidden"):
        sampler.sample(torch.zeros(2, 3), make_batch([{}, {"forbidden": (2, 0, 1)}]))
    with pytest.raises(LogitsError, match="row 0 .*-inf"):
        sampler.sample(torch.full((1, 300), -torch.inf), make_batch([{}]))
    for logits in (torch.zeros(2, 4), torch.zeros(3), torch.zeros(3, 0)):
        with pytest.raises(LogitsError, match="shape"):
            sampler.sample(logits, make_batch([{}] * 3))
    assert sampler.sample(torch.zeros(0, 4), make_batch([])) == SampledTokens((), ())


@pytest.mark.parametrize("vocab_size", [50, 700])
def test_logprobs_are_those_of_the_raw_logits(sampler: CpuSampler, vocab_size: int) -> None:
    logits = torch.randn(4, vocab_size) * 2
    rows = [{"logprobs": -1}, {"logprobs": 0, "temperature": 5.0}, {"logprobs": 3, "top_k": 2}, {"logprobs": 10**6}]
    rows[3]["forbidden"] = (int(logits[3].argmax()),)
    for function in (sampler.sample, sample):
        result = function(logits, make_batch(rows))
        for row in range(4):
            assert_logprobs(result.logprobs[row], logits[row], result.token_ids[row], rows[row]["logprobs"])
