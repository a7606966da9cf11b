"""The Triton sampler, in the interpreter, against ``ops.sampling.sample`` and a slow float64 reference.

The interpreter is slow per operation, not per token: tiles are small, and rows few.
"""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_engine.errors import LogitsError
from compiled_engine.ops.sampling import SamplingBatch, sample, uniform
from compiled_engine.ops.triton.sampling import SamplingBuffers, TritonSampler, sampling_variants
from compiled_engine.ops.triton.sampling_kernel import Scale, Tokens, _pick
from sampling_rows import make_batch

# Rounding of exp and of sums in float32; decisions nearer to an edge than this may go either way.
MARGIN = 2e-6
CPU = torch.device("cpu")

# What the interpreter computes is meant: min_p=0 has no limit, and the least temperature leaves one token.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero", "ignore:overflow")


def make_buffers(rows: list[dict]) -> SamplingBuffers:
    """See ``make_batch``; what the kernel does not do is left out."""
    batch = make_batch(rows)
    return SamplingBuffers(**{item.name: getattr(batch, item.name) for item in fields(SamplingBuffers)})


def launch(
    logits: torch.Tensor, buffers: SamplingBuffers, tile: int = 4096, capacity: int = 4096
) -> tuple[list[int], torch.Tensor]:
    """Token ids and maxima; what the sampler may not touch is checked."""
    num_rows = len(logits)
    token_ids = torch.full((num_rows + 1,), -7)
    maxima = torch.full((num_rows + 1,), -7.0)
    before = logits.clone()
    sampler = TritonSampler(logits.shape[1], num_rows, CPU, tile=tile, capacity=capacity)
    for workspace in sampler.workspaces().values():
        workspace.fill_(torch.iinfo(workspace.dtype).max)
    sampler.launch(logits, buffers, token_ids, maxima)
    assert torch.equal(logits, before) or logits.isnan().any()
    assert (token_ids[-1], maxima[-1]) == (-7, -7)
    return token_ids[:-1].tolist(), maxima[:-1]


def oracle(logits: torch.Tensor, buffers: SamplingBuffers) -> list[int]:
    num_rows = len(logits)
    batch = SamplingBatch(**vars(buffers), forbidden_token_ids=((),) * num_rows, num_logprobs=(-1,) * num_rows)
    return list(sample(logits, batch).token_ids)


def nearest_edge(logits: np.ndarray, buffers: SamplingBuffers, row: int) -> float:
    """How near the nearest decision of a random row is to going the other way, as a share of the mass; float64."""
    temperature, min_p, top_p = (float(column[row]) for column in (buffers.temperature, buffers.min_p, buffers.top_p))
    logits = logits.astype(np.float64)
    scaled = (logits - logits.max()) / temperature
    weights = np.exp(scaled)
    near = 1.0
    if min_p > 0:
        near = np.abs(scaled[scaled < 0] - math.log(min_p)).min(initial=1.0)
        weights[scaled < math.log(min_p)] = 0
    if 0 < buffers.top_k[row] < len(logits):
        weights[logits < np.sort(logits)[-int(buffers.top_k[row])]] = 0
    if top_p < 1:
        order = np.lexsort((np.arange(len(logits)), -logits))
        mass = np.cumsum(weights[order]) / weights.sum()
        near = min(near, np.abs(mass[weights[order] > 0][:-1] - top_p).min(initial=1.0))
        weights[order[int((mass < top_p).sum()) + 1 :]] = 0
    cumulative = np.cumsum(weights) / weights.sum()
    number = float(uniform(buffers.seeds, buffers.positions)[row])
    return min(near, np.abs(cumulative[weights > 0][:-1] - number).min(initial=1.0))


def assert_same(logits: torch.Tensor, buffers: SamplingBuffers, tokens: list[int]) -> None:
    """The oracle's tokens, but where a decision of a random row is within rounding."""
    for row, (token, expected) in enumerate(zip(tokens, oracle(logits, buffers), strict=True)):
        if token != expected:
            assert buffers.temperature[row] > 0
            assert nearest_edge(logits[row].float().numpy(), buffers, row) < MARGIN


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, list[dict]]:
    """Two rows of logits, some with many ties or -inf, each with parameters of its own."""
    vocab_size = draw(st.sampled_from([1, 2, 3, 63, 64, 65, 200]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["ties", "equal", "narrow", "normal", "wide", "peaked"]))
    logits = rng.standard_normal((2, vocab_size)) * {"narrow": 1e-3, "wide": 6}.get(kind, 1)
    if kind == "ties":
        logits = rng.integers(-1, 2, (2, vocab_size)) * rng.choice([0.0, -0.0, 1.0], (2, vocab_size))
    elif kind == "equal":
        logits[:] = draw(st.sampled_from([0.0, -0.0, 3e4, -3e4]))
    elif kind == "peaked":
        logits[:, rng.integers(0, vocab_size, 3)] += 12
    if draw(st.booleans()):
        logits = np.where(rng.random((2, vocab_size)) < draw(st.sampled_from([0.2, 0.99])), -np.inf, logits)
        logits[:, rng.integers(vocab_size)] = 0
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    logits = torch.from_numpy(logits).to(torch.float32).to(dtype)
    row = st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 1e-45, 0.3, 1.0, 2.5, 3.4e38]),
            "top_k": st.sampled_from([0, 0, 1, 3, 50, vocab_size - 1, vocab_size, 10**6]),
            "top_p": st.sampled_from([1.0, 1.0, 1 - 1e-7, 0.999, 0.9, 0.5, 0.1, 1e-9]),
            "min_p": st.sampled_from([0.0, 0.0, 1e-6, 0.02, 0.5, 1.0]),
            "seed": st.integers(-(2**63), 2**63 - 1),
            "position": st.integers(0, 2**40),
        }
    )
    return logits, [draw(row), draw(row)]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(case=cases(), layout=st.sampled_from([(256, 256), (128, 128), (32, 64)]))
def test_equals_sample(case: tuple[torch.Tensor, list[dict]], layout: tuple[int, int]) -> None:
    """With one tile and with many, with room for all candidates and without."""
    logits, rows = case
    buffers = make_buffers(rows)
    tokens, maxima = launch(logits, buffers, *layout)
    assert torch.equal(maxima, logits.float().amax(-1))
    assert_same(logits, buffers, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_real_vocabulary_with_the_settings_of_a_launch(dtype: torch.dtype) -> None:
    vocab_size = 49_152
    rows = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"top_k": 50},
        {"top_k": 5_000, "top_p": 0.95},
        {"temperature": 1.3, "top_p": 0.99, "min_p": 0.001},
        {"top_p": 0.9},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ]
    logits = (torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(3)) * 2.5).to(dtype)
    buffers = make_buffers(rows)
    sampler = TritonSampler(vocab_size, 16, CPU)
    token_ids, maxima = torch.zeros(16, dtype=torch.int64), torch.zeros(16)
    sampler.launch(logits, buffers, token_ids, maxima)
    assert torch.equal(maxima[: len(rows)], logits.float().amax(-1))
    assert_same(logits, buffers, token_ids[: len(rows)].tolist())


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(case=cases())
def test_a_row_does_not_depend_on_the_others(case: tuple[torch.Tensor, list[dict]]) -> None:
    logits, rows = case
    together, _ = launch(logits, make_buffers(rows), 64, 64)
    again, _ = launch(logits, make_buffers(rows), 64, 64)
    alone = [launch(logits[place : place + 1], make_buffers([row]), 64, 64)[0][0] for place, row in enumerate(rows)]
    assert together == again == alone


def assert_keeps(logits: torch.Tensor, row: dict, kept: list[int], tile: int, capacity: int = 32) -> None:
    """Random numbers in the middle of the shares of the tokens ``kept``, which alone have one, draw these tokens."""
    kept = sorted(kept)
    weights = ((logits[kept].double() - logits.max()) / row["temperature"]).exp()
    middles = (weights.cumsum(0) - weights / 2) / weights.sum()
    numbers = uniform(torch.full((4096,), 11), torch.arange(4096))
    positions = (numbers[None] - middles[:, None]).abs().argmin(1).tolist()
    buffers = make_buffers([row | {"seed": 11, "position": position} for position in positions])
    assert launch(logits.expand(len(kept), -1).contiguous(), buffers, tile, capacity)[0] == kept


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        {"top_k": 4, "temperature": 3.4e38},
        {"top_k": 40, "top_p": 0.3, "temperature": 1.0},
        {"top_p": 0.025, "temperature": 3.4e38},
        {"min_p": 0.7, "temperature": 1.0},
        {"top_k": 8, "top_p": 0.45, "temperature": 1e30},
        {"min_p": 0.5, "top_k": 6, "top_p": 0.6, "temperature": 1.0},
    ],
)
def test_filters_keep_the_right_tokens(row: dict) -> None:
    """Each works on what the one before left, four here; some have more candidates than the workspace takes."""
    order = torch.from_numpy(np.random.default_rng(1).permutation(128))
    logits = torch.empty(128)
    logits[order] = -0.1 * torch.arange(128.0)
    assert_keeps(logits, row, order[:4].tolist(), 32)


@pytest.mark.slow
def test_ties() -> None:
    """top_k keeps all that equal the last it wants, top_p the first of these; -0 equals 0."""
    logits = torch.tensor([-1.0, 0.0, 2.0, -0.0, 0.0, -5.0, -0.0, -3.0])
    hot = {"temperature": 3.4e38}
    assert_keeps(logits, hot | {"top_k": 2}, [1, 2, 3, 4, 6], 8)
    assert_keeps(logits, hot | {"top_p": 0.375}, [1, 2, 3], 4)
    assert_keeps(logits, hot | {"top_p": 0.376}, [1, 2, 3, 4], 4)
    assert_keeps(logits, hot | {"top_k": 2, "top_p": 0.55}, [1, 2, 3], 2)


def test_neighbours_are_told_apart() -> None:
    """Logits that differ in the last bit, on both sides of an edge."""
    logits = torch.tensor([0.5, 1.0, 1.0, 5.0, -2.0, 1.5])
    logits[2] = torch.nextafter(logits[1], torch.tensor(0.0))
    assert_keeps(logits, {"temperature": 3.4e38, "top_k": 3}, [1, 3, 5], 8)
    assert_keeps(logits, {"temperature": 3.4e38, "top_p": 0.5}, [1, 3, 5], 8)


@triton.jit
def pick_kernel(logits, targets, token_ids, size: tl.constexpr):
    index = tl.program_id(0)
    tokens = Tokens(logits, token_ids, size, False)
    low, none = tl.full([], -(2**31), tl.int64), tl.zeros([], tl.int64)
    token = _pick(tokens, Scale(0.0, 1.0, -1e9), low, low, none, tl.load(targets + index), 0, 2)
    tl.store(token_ids + index, token)


def test_a_token_has_its_share_up_to_the_next() -> None:
    """Random numbers on the very edges of shares; tokens without weight have none, at the start neither."""
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, -torch.inf, 0.0, -1e6])
    one = 1 << 42
    targets = torch.tensor([0, one - 1, one, 2 * one - 1])
    token_ids = torch.zeros(4, dtype=torch.int64)
    pick_kernel[(4,)](logits, targets, token_ids, size=6)
    assert token_ids.tolist() == [1, 1, 4, 4]


@pytest.mark.parametrize("vocab_size", [5, 64, 130])
def test_greedy_takes_the_first_of_equals(vocab_size: int) -> None:
    firsts = range(0, vocab_size, 1 + vocab_size // 8)
    logits = torch.full((len(firsts), vocab_size), -1.0)
    for row, first in enumerate(firsts):
        logits[row, first:] = 3.0
        logits[row, first::3] = 4.0
    assert launch(logits, make_buffers([{"temperature": 0.0}] * len(logits)), 32)[0] == list(firsts)
    zeros = torch.tensor([[-1.0, -0.0, 0.0]])
    assert launch(zeros, make_buffers([{"temperature": 0.0}]), 2)[0] == [1]


def test_the_random_number_has_53_bits() -> None:
    """Of so many equal logits that for some numbers the last 27 bits decide; seeds and positions of 64 bits."""
    vocab_size = 50_000
    numbers = uniform(torch.arange(1 << 18), torch.zeros(1 << 18, dtype=torch.int64))
    tokens, rough = (numbers * vocab_size).long(), (torch.floor(numbers * 2**26) * 2.0**-26 * vocab_size).long()
    seeds = torch.nonzero(tokens != rough).flatten()[:4]
    assert len(seeds) == 4
    rows = [{"seed": seed, "position": 0} for seed in seeds.tolist()]
    rows += [{"seed": -1, "position": 2**40}, {"seed": 2**63 - 1, "position": 5}, {"seed": -(2**63), "position": 2**33}]
    buffers = make_buffers(rows)
    expected = (uniform(buffers.seeds, buffers.positions) * vocab_size).long().tolist()
    assert launch(torch.zeros(len(rows), vocab_size), buffers, 8192)[0] == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_maxima_tell_rows_without_choice(temperature: float) -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[1.0, nan, 2.0, 0.0], [nan, inf, 0.0, 1.0], [1.0, inf, 0.0, -inf], [-inf] * 4, [3.0] * 4])
    logits = torch.cat([logits, logits.flip(1)], 1)
    tokens, maxima = launch(logits, make_buffers([{"temperature": temperature, "top_k": 2}] * 5), 4)
    assert maxima.isnan().tolist() == [True, True, False, False, False]
    assert maxima[2:].tolist() == [inf, -inf, 3.0]
    assert tokens[:4] == [0, 0, 0, 0]


def test_one_token_is_taken() -> None:
    rows = [{"temperature": 0.0}, {}, {"top_k": 1, "top_p": 1e-9, "min_p": 1.0}]
    assert launch(torch.tensor([[-3.0], [0.0], [1e30]]), make_buffers(rows))[0] == [0, 0, 0]


def test_logits_it_does_not_take_are_refused() -> None:
    buffers = make_buffers([{}] * 3)
    token_ids, maxima = torch.zeros(3, dtype=torch.int64), torch.zeros(3)
    sampler = TritonSampler(4, 2, CPU)
    for logits in (torch.zeros(3, 4), torch.zeros(2, 5), torch.zeros(2), torch.zeros(4, 2).T, torch.zeros(2, 8)[:, :4]):
        with pytest.raises(LogitsError, match="shape"):
            sampler.launch(logits, buffers, token_ids, maxima)
    for vocab_size in (0, 2**20 + 1):
        with pytest.raises(LogitsError, match="vocab_size"):
            TritonSampler(vocab_size, 2, CPU)


def test_rows_may_have_gaps() -> None:
    logits = torch.randn(2, 12, generator=torch.Generator().manual_seed(0))[:, :9]
    sampler = TritonSampler(9, 2, CPU, row_stride=12)
    token_ids, maxima = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    sampler.launch(logits, make_buffers([{"temperature": 0.0}] * 2), token_ids, maxima)
    assert token_ids.tolist() == logits.argmax(1).tolist()


def test_a_row_has_its_own_part_of_the_workspace() -> None:
    """Programs run at the same time on a GPU, one after the other here."""
    sampler = TritonSampler(8, 3, CPU)
    (workspace,) = sampler.workspaces().values()
    workspace.fill_(-1)
    buffers = make_buffers([{"temperature": 0.0}, {"top_k": 2}, {"temperature": 0.0}])
    sampler.launch(torch.eye(8)[:3], buffers, torch.zeros(3, dtype=torch.int64), torch.zeros(3))
    assert (workspace != -1).any(1).tolist() == [False, True, False]


def test_variants_describe_the_launch() -> None:
    """Every parameter of the kernel is named once, and what depends on the type differs."""
    variants = sampling_variants(300, [torch.float32, torch.bfloat16], row_stride=320)
    for variant in variants:
        assert {*variant.arguments, *variant.constants} == set(variant.kernel.arg_names)
        assert list(variant.arguments) == variant.kernel.arg_names[: len(variant.arguments)]
        assert variant.constants["ROW_STRIDE"] == 320
    assert len({variant.name for variant in variants}) == 2
    assert variants[0].constants != variants[1].constants
