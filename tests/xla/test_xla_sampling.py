"""Sampling compiled by XLA: the tokens of ``ops.sampling``, and after warm-up nothing is compiled or run besides."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from compiled_engine.errors import LogitsError
from compiled_engine.ops.sampling import SampledTokens, sample
from compiled_engine.ops.static_sampling import most_likely
from compiled_engine.runners.bucketed_sampler import COMPILED_LOGPROBS, BucketedSampler
from sampling_rows import make_batch

VOCAB_SIZE = 1000
BUCKETS = (4, 8)
ALL_TOKENS = tuple(range(VOCAB_SIZE))


def compile_with_xla(function):
    return torch.compile(function, backend="openxla", fullgraph=True, dynamic=False)


@pytest.fixture(scope="module")
def sampler() -> BucketedSampler:
    return BucketedSampler(compile_with_xla, VOCAB_SIZE)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def sample_on_device(sampler, xla_device):
    def sample_on_device(logits, batch, num_rows) -> SampledTokens:
        padding = torch.full((num_rows - len(logits), VOCAB_SIZE), math.nan)
        inputs = [tensor.to(xla_device) for tensor in sampler.host_inputs(batch, num_rows)]
        return sampler.sample(torch.cat([logits, padding]).to(xla_device), batch, inputs)

    return sample_on_device


@pytest.fixture
def executions(graph_count):
    """Counts graphs that are kept, and executions of operations outside of compiled functions."""
    from torch_xla.debug import metrics

    def executions() -> tuple[int, int, int]:
        stray = (metrics.counter_value(name) or 0 for name in ("UncachedCompile", "CachedCompile"))
        return (graph_count(), *stray)

    return executions


def random_row(rng: np.random.Generator) -> dict:
    return {
        "temperature": float(rng.choice([0.0, 0.0, 1e-40, 1e-6, 0.5, 1.0, 2.0])),
        "top_k": int(rng.choice([0, 0, 1, 5, VOCAB_SIZE - 1, VOCAB_SIZE, 10**6])),
        "top_p": float(rng.choice([1.0, 0.95, 0.5, 1e-9])),
        "min_p": float(rng.choice([0.0, 0.0, 0.05, 1.0])),
        "seed": int(rng.integers(-(2**63), 2**63)),
        "position": int(rng.integers(0, 10**6)),
        "forbidden": tuple(rng.integers(0, VOCAB_SIZE, int(rng.choice([0, 0, 0, 2]))).tolist()),
        "logprobs": int(rng.choice([-1, -1, 0, 5, COMPILED_LOGPROBS, 100])),
    }


def random_logits(rng: np.random.Generator, num_rows: int) -> torch.Tensor:
    """Every other time many ties, of both signs of 0; some -inf."""
    logits = rng.standard_normal((num_rows, VOCAB_SIZE)) * rng.choice([0.5, 2.0, 8.0])
    if rng.random() < 0.5:
        logits = np.round(logits)
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    return torch.from_numpy(logits.astype(np.float32))


def test_steps_after_warm_up_compile_nothing_and_give_the_tokens_of_sample(sampler, sample_on_device, executions):
    num_cold = executions()[0]
    for num_rows in BUCKETS:
        for batch in sampler.warm_up_batches(num_rows):
            sample_on_device(torch.randn(num_rows, VOCAB_SIZE), batch, num_rows)
    warm = executions()
    assert warm[0] == num_cold + 4 * len(BUCKETS)
    rng = np.random.default_rng(0)
    for _ in range(50):
        num_rows = int(rng.choice(BUCKETS))
        rows = [random_row(rng) for _ in range(int(rng.integers(1, num_rows + 1)))]
        logits, batch = random_logits(rng, len(rows)), make_batch(rows)
        result = sample_on_device(logits, batch, num_rows)
        assert executions() == warm
        assert result.token_ids == sample(logits, batch).token_ids
        for row, (count, entry) in enumerate(zip(batch.num_logprobs, result.logprobs, strict=True)):
            assert (entry is None) == (count < 0)
            if entry is not None:
                exact = logits[row].double().log_softmax(-1)
                assert next(iter(entry)) == result.token_ids[row]
                assert list(entry.values()) == pytest.approx(exact[list(entry)].tolist(), abs=1e-5)
                largest = sorted(entry.values(), reverse=True)[:count]
                assert largest == pytest.approx(exact.topk(count).values.tolist(), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, VOCAB_SIZE - 1])
def test_bad_logits_are_named(sample_on_device, temperature, value, place):
    logits = torch.randn(3, VOCAB_SIZE)
    logits[1, place] = value
    batch = make_batch([{"temperature": temperature, "top_p": 0.9}] * 3)
    with pytest.raises(LogitsError, match=f"row 1 .*maximum is {value}"):
        sample_on_device(logits, batch, 4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_all_tokens_forbidden_is_named(sample_on_device, temperature):
    batch = make_batch([{}, {"temperature": temperature, "forbidden": ALL_TOKENS}])
    with pytest.raises(LogitsError, match="row 1 .*maximum is -inf"):
        sample_on_device(torch.randn(2, VOCAB_SIZE), batch, 4)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_forbidden_bad_logit_counts_where_logprobs_are_wanted(sample_on_device, value):
    logits = torch.randn(2, VOCAB_SIZE)
    logits[1, 500] = value
    with pytest.raises(LogitsError, match=f"row 1 .*maximum is {value}"):
        sample_on_device(logits, make_batch([{}, {"forbidden": (500,), "logprobs": 3}]), 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_of_equals_the_first_is_most_likely(xla_device, dtype):
    logits = torch.randint(-3, 4, (8, VOCAB_SIZE)).to(dtype)
    logits[0] = -0.0
    logits[0, 7] = 0.0
    logits[1] = torch.finfo(dtype).min
    token_ids, maxima = compile_with_xla(most_likely)(logits.to(xla_device))
    assert token_ids.cpu().tolist() == logits.float().numpy().argmax(-1).tolist()
    assert maxima.cpu().tolist() == logits.float().amax(-1).tolist()
