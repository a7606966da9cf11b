"""Ragged attention means what torch_xla means: its own reference reads our pages and arrays, and XLA compiles it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_xla.experimental import custom_kernel

from compiled_engine.context import StaticForwardContext, bind_kv_cache
from compiled_engine.ops.attention import AttentionSpec
from compiled_engine.ops.by_value import ByValueLayer, PagedStep
from compiled_engine.ops.ragged import RaggedAttention
from compiled_engine.runners.torch_xla_platform import TorchXlaPlatform
from ragged_kernel import bound_layers, paged_step, ragged_paged_attention

BLOCK_SIZE, KV_HEADS, HEAD_DIM, SCALE = 4, 2, 8, 0.3
MAX_SEQS, MAX_BLOCKS, NUM_BLOCKS = 6, 5, 24


def torch_xla_reference(query: torch.Tensor, *arguments: torch.Tensor, **options: object) -> torch.Tensor:
    """torch_xla's reference returns the rows of real tokens alone; the kernel has a row for each query."""
    real = custom_kernel.ragged_paged_attention(query, *arguments, use_kernel=False, **options)
    rubbish = torch.full((len(query) - len(real), *query.shape[1:]), float("nan"))
    return torch.cat([real, rubbish])


def spec_of(heads: int = 4, sliding_window: int | None = None, soft_cap: float | None = None) -> AttentionSpec:
    return AttentionSpec("layers.0.attn", heads, KV_HEADS, HEAD_DIM, SCALE, sliding_window, soft_cap)


def keep(_: torch.Tensor) -> None:
    """Donation is for compiled code."""


def new_rows(step: PagedStep, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = len(step.slot_mapping)
    key, value = torch.randn(2, tokens, KV_HEADS, HEAD_DIM)
    return torch.randn(tokens, heads, HEAD_DIM), key, value


@settings(max_examples=40)
@given(
    requests=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=4),
    num_padding=st.integers(0, 3),
    window=st.sampled_from([None, 1, 3, 6]),
    soft_cap=st.sampled_from([None, 2.0]),
    heads=st.sampled_from([2, 4, 6]),
)
def test_torch_xlas_reference_gives_the_same_numbers(
    requests: list[tuple[int, int]], num_padding: int, window: int | None, soft_cap: float | None, heads: int
) -> None:
    """Only with the right layout and arrays does it agree with the stand-in that the other tests trust."""
    spec = spec_of(heads, window, soft_cap)
    step = paged_step(requests, num_padding, BLOCK_SIZE)
    query, key, value = new_rows(step, heads)
    outs = []
    caches = []
    for kernel in (torch_xla_reference, ragged_paged_attention):
        torch.manual_seed(3)
        [layer] = bound_layers([spec], BLOCK_SIZE, NUM_BLOCKS)
        attention = RaggedAttention(kernel, keep, MAX_SEQS, MAX_BLOCKS)
        outs.append(attention.attend(layer, query, key, value, attention.host_inputs(step, window)))
        caches.append(layer.kv_cache)
    assert torch.equal(caches[0], caches[1])
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:XLA paged attention:UserWarning")
def test_the_operator_takes_our_call() -> None:
    """Names, order and types of the arguments are the operator's. On the CPU it returns rows without computing them."""
    step = paged_step([(3, 2), (1, 8)], 2, BLOCK_SIZE)
    [layer] = bound_layers([spec_of(soft_cap=2.0, sliding_window=3)], BLOCK_SIZE, NUM_BLOCKS)
    attention = RaggedAttention(torch.ops.xla.ragged_paged_attention, keep, MAX_SEQS, MAX_BLOCKS)
    query, key, value = new_rows(step, 4)
    out = attention.attend(layer, query, key, value, attention.host_inputs(step, 3))
    assert out.shape == query.shape
    assert torch.equal(out[4:], torch.zeros(2, 4, HEAD_DIM))


def test_xla_compiles_it_once_and_updates_the_cache_in_place() -> None:
    """Steps of one size after each other, with the stand-in as kernel: one graph, one buffer, the numbers of eager."""
    platform = TorchXlaPlatform()
    [eager_layer] = bound_layers([spec_of()], BLOCK_SIZE, NUM_BLOCKS)
    context = StaticForwardContext()
    layer = ByValueLayer(spec_of(), eager_layer.spec)
    context.register(layer.layer_name, layer)
    context.seal()
    bind_kv_cache({layer.layer_name: platform.to_device([eager_layer.kv_cache])[0]}, context)
    eager = RaggedAttention(ragged_paged_attention, keep, MAX_SEQS, MAX_BLOCKS)
    attention = RaggedAttention(ragged_paged_attention, platform.donate, MAX_SEQS, MAX_BLOCKS)
    compiled = platform.compile(attention.attend)
    seen = set()
    with torch.no_grad():
        for requests, num_padding in [([(4, 3)], 2), ([(1, 0), (5, 7)], 0), ([(2, 1), (1, 1), (1, 9)], 2)]:
            step = paged_step(requests, num_padding, BLOCK_SIZE)
            rows, inputs = new_rows(step, 4), attention.host_inputs(step, None)
            moved = platform.to_device([*rows, *inputs])
            out = compiled(layer, *moved[:3], tuple(moved[3:])).cpu()
            platform.wait()
            torch.testing.assert_close(out, eager.attend(eager_layer, *rows, inputs), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(layer.kv_cache.cpu(), eager_layer.kv_cache, rtol=0, atol=0)
            seen.add((platform.counts(), platform.buffer_address(layer.kv_cache)))
    assert len(seen) == 1
