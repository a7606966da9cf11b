"""The oracle itself, against torch's attention over a dense mask and against a second one written as formulas."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.ops.reference import paged_attention


def paged(
    keys: list[torch.Tensor], values: list[torch.Tensor], block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lay K and V [length, heads, head_dim] of sequences out in shuffled blocks: key and value cache, block table."""
    counts = [-(-len(sequence) // block_size) for sequence in keys]
    order = (1 + torch.randperm(sum(counts))).tolist()
    shape = (sum(counts) + 1, block_size, *keys[0].shape[1:])
    key_cache, value_cache = (torch.full(shape, float("nan"), dtype=keys[0].dtype) for _ in range(2))
    table = torch.zeros(len(keys), max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        for column in range(count):
            block = order.pop()
            table[row, column] = block
            part = slice(column * block_size, (column + 1) * block_size)
            key_cache[block, : len(keys[row][part])] = keys[row][part]
            value_cache[block, : len(keys[row][part])] = values[row][part]
    return key_cache, value_cache, table


@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=3),
    block_size=st.sampled_from([1, 3, 4]),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3)]),
    window=st.sampled_from([None, 1, 4, 100]),
    scale=st.sampled_from([1.0, 0.3]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_equals_torch_attention_over_a_dense_mask(
    lengths: list[tuple[int, int]],
    block_size: int,
    heads: tuple[int, int],
    window: int | None,
    scale: float,
    dtype: torch.dtype,
) -> None:
    num_heads, num_kv_heads = heads
    seq_lens = [new + cached for new, cached in lengths]
    queries = [torch.randn(new, num_heads, 8, dtype=dtype) for new, _ in lengths]
    keys, values = ([torch.randn(n, num_kv_heads, 8, dtype=dtype) for n in seq_lens] for _ in range(2))
    starts = torch.tensor([0] + [new for new, _ in lengths]).cumsum(0)
    out = paged_attention(
        torch.cat(queries), *paged(keys, values, block_size), torch.tensor(seq_lens), starts, scale, window
    )
    expected = []
    for (new, cached), query, key, value in zip(lengths, queries, keys, values, strict=True):
        distance = (torch.arange(new) + cached)[:, None] - torch.arange(new + cached)
        mask = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        q, k, v = (t.double().transpose(0, 1)[None] for t in (query, key, value))
        expected.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)[0])
    torch.testing.assert_close(out, torch.cat([e.transpose(0, 1) for e in expected]), rtol=1e-9, atol=1e-12)


def one_by_formula(
    query: list[float],
    keys: list[list[float]],
    values: list[list[float]],
    scale: float,
    soft_cap: float | None,
    sink: float | None,
    slope: float | None,
) -> list[float]:
    """The newest query of one head in plain Python: no tensors, no shared code."""
    weights = []
    for position, key in enumerate(keys):
        score = scale * sum(a * b for a, b in zip(query, key, strict=True))
        if soft_cap is not None:
            score = soft_cap * math.tanh(score / soft_cap)
        if slope is not None:
            score -= slope * (len(keys) - 1 - position)
        weights.append(math.exp(score))
    total = sum(weights) + (math.exp(sink) if sink is not None else 0.0)
    return [sum(w * v[i] for w, v in zip(weights, values, strict=True)) / total for i in range(len(values[0]))]


@pytest.mark.parametrize("soft_cap", [None, 0.7])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("with_alibi", [False, True])
def test_soft_cap_sinks_and_alibi_equal_their_formulas(
    soft_cap: float | None, with_sinks: bool, with_alibi: bool
) -> None:
    length, num_heads = 7, 4
    query = torch.randn(1, num_heads, 5, dtype=torch.float64)
    key, value = torch.randn(2, length, 2, 5, dtype=torch.float64)
    sinks = torch.randn(num_heads) if with_sinks else None
    alibi = torch.rand(num_heads) if with_alibi else None
    out = paged_attention(
        query,
        *paged([key], [value], 3),
        torch.tensor([length]),
        torch.tensor([0, 1]),
        0.8,
        soft_cap=soft_cap,
        sinks=sinks,
        alibi=alibi,
    )
    for head in range(num_heads):
        expected = one_by_formula(
            query[0, head].tolist(),
            key[:, head // 2].tolist(),
            value[:, head // 2].tolist(),
            0.8,
            soft_cap,
            float(sinks[head]) if sinks is not None else None,
            float(alibi[head]) if alibi is not None else None,
        )
        assert out[0, head].tolist() == pytest.approx(expected, rel=1e-12)


def test_a_sink_of_minus_infinity_is_none() -> None:
    query, cache = torch.randn(2, 2, 4), torch.randn(2, 2, 4, 1, 4)
    arguments = (query, *cache, torch.tensor([[1]]), torch.tensor([3]), torch.tensor([0, 2]), 1.0)
    sinks = torch.full((2,), float("-inf"))
    assert torch.equal(paged_attention(*arguments), paged_attention(*arguments, sinks=sinks))
