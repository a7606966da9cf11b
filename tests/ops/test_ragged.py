"""Ragged attention with a stand-in for the kernel: the reference's numbers, its arrays, and what padding leaves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.errors import ForwardContextError
from compiled_engine.ops.attention import AttentionSpec
from compiled_engine.ops.by_value import ByValueLayer, PagedStep
from compiled_engine.ops.ragged import RaggedAttention, ragged_kernel_refusal
from compiled_engine.ops.reference import paged_attention
from ragged_kernel import bound_layers, paged_step, ragged_paged_attention

BLOCK_SIZE, KV_HEADS, HEAD_DIM, SCALE = 4, 2, 8, 0.3
MAX_SEQS, MAX_BLOCKS, NUM_BLOCKS = 6, 5, 24


def spec_of(name: str = "layers.0.attn", heads: int = 4, **more: object) -> AttentionSpec:
    return AttentionSpec(name, heads, KV_HEADS, HEAD_DIM, SCALE, **more)  # type: ignore[arg-type]


class Donations:
    """Counts the calls of ``donate`` and remembers what the tensor held."""

    def __init__(self) -> None:
        self.contents: list[torch.Tensor] = []

    def __call__(self, tensor: torch.Tensor) -> None:
        self.contents.append(tensor.clone())


def ragged(donate: Donations | None = None) -> RaggedAttention:
    return RaggedAttention(ragged_paged_attention, donate or Donations(), MAX_SEQS, MAX_BLOCKS)


def new_rows(step: PagedStep, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = len(step.slot_mapping)
    key, value = torch.randn(2, tokens, KV_HEADS, HEAD_DIM)
    return torch.randn(tokens, heads, HEAD_DIM), key, value


def expected_rows(layer: ByValueLayer, query: torch.Tensor, step: PagedStep) -> torch.Tensor:
    """The reference over the layer's cache, whose heads are taken apart one by one."""
    heads = layer.kv_cache.reshape(NUM_BLOCKS, BLOCK_SIZE, 2 * KV_HEADS, HEAD_DIM).unbind(dim=2)
    spec = layer.attention_spec
    return paged_attention(
        query,
        torch.stack([heads[0], heads[2]], dim=2),
        torch.stack([heads[1], heads[3]], dim=2),
        torch.from_numpy(step.block_table),
        torch.from_numpy(step.seq_lens),
        torch.from_numpy(step.query_start_loc),
        SCALE,
        spec.sliding_window,
        spec.soft_cap,
    )


@given(
    requests=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=4),
    num_padding=st.integers(0, 3),
    window=st.sampled_from([None, 1, 3, 6]),
    soft_cap=st.sampled_from([None, 2.0]),
    heads=st.sampled_from([2, 4, 6]),
)
def test_equals_the_reference(
    requests: list[tuple[int, int]], num_padding: int, window: int | None, soft_cap: float | None, heads: int
) -> None:
    """Chunks and decodes, windows, soft caps, groups of heads; rows of padding are zero and not the kernel's NaN."""
    [layer] = bound_layers([spec_of(heads=heads, sliding_window=window, soft_cap=soft_cap)], BLOCK_SIZE, NUM_BLOCKS)
    step = paged_step(requests, num_padding, BLOCK_SIZE)
    query, key, value = new_rows(step, heads)
    attention = ragged()
    before = layer.kv_cache.clone()
    out = attention.attend(layer, query, key, value, attention.host_inputs(step, window))

    real = len(query) - num_padding
    torch.testing.assert_close(out[:real].double(), expected_rows(layer, query, step)[:real], rtol=1e-4, atol=1e-5)
    assert torch.equal(out[real:], torch.zeros(num_padding, heads, HEAD_DIM))

    slots = layer.kv_cache.reshape(-1, 2 * KV_HEADS, HEAD_DIM)
    stored = slots[step.slot_mapping[:real]]
    assert torch.equal(stored[:, 0::2], key[:real])
    assert torch.equal(stored[:, 1::2], value[:real])
    untouched = torch.ones(len(slots), dtype=torch.bool)
    untouched[step.slot_mapping] = False
    assert torch.equal(slots[untouched], before.reshape(slots.shape)[untouched])


def test_host_inputs_have_the_kernels_shapes_and_leave_padding_out() -> None:
    step = paged_step([(3, 2), (1, 8)], 2, BLOCK_SIZE)
    slots, kv_lens, page_indices, cu_q_lens, num_seqs = ragged().host_inputs(step, None)
    assert slots.tolist() == [4 * 5 + 2, 4 * 5 + 3, 4 * 4, 4 * 1, 0, 0]
    assert kv_lens.tolist() == [5, 9, 0, 0, 0, 0]
    assert page_indices.tolist() == [[5, 4, 0, 0, 0], [3, 2, 1, 0, 0]] + [[0] * MAX_BLOCKS] * 4
    assert cu_q_lens.tolist() == [0, 3, 4, 4, 4, 4, 4]
    assert num_seqs.tolist() == [2]
    assert slots.dtype == torch.int64
    assert {array.dtype for array in (kv_lens, page_indices, cu_q_lens, num_seqs)} == {torch.int32}


def test_a_step_of_padding_alone_has_one_sequence() -> None:
    """The kernel is never asked to run over nothing, as it would be when graphs are warmed up."""
    [layer] = bound_layers([spec_of()], BLOCK_SIZE, NUM_BLOCKS)
    step = paged_step([], 3, BLOCK_SIZE)
    attention = ragged()
    inputs = attention.host_inputs(step, None)
    assert inputs[-1].tolist() == [1]
    out = attention.attend(layer, *new_rows(step, 4), inputs)
    assert torch.isfinite(out).all()
    assert torch.equal(out[1:], torch.zeros(2, 4, HEAD_DIM))


def test_full_steps_fit_and_larger_ones_are_refused() -> None:
    attention = ragged()
    full = [(1, 0)] * (MAX_SEQS - 1) + [(1, MAX_BLOCKS * BLOCK_SIZE - 1)]
    _, kv_lens, _, cu_q_lens, num_seqs = attention.host_inputs(paged_step(full, 2, BLOCK_SIZE), None)
    assert (kv_lens.tolist()[-1], cu_q_lens.tolist(), num_seqs.tolist()) == (20, [0, 1, 2, 3, 4, 5, 6], [6])
    with pytest.raises(ForwardContextError, match="has 7 requests, its graph has room for 6"):
        attention.host_inputs(paged_step([(1, 0)] * 7, 0, BLOCK_SIZE), None)
    with pytest.raises(ForwardContextError, match="has 6 columns, the graph has room for 5"):
        attention.host_inputs(paged_step([(1, MAX_BLOCKS * BLOCK_SIZE)], 0, BLOCK_SIZE), None)


def test_a_cache_is_donated_before_it_is_written_and_only_by_its_own_layer() -> None:
    owner, reader = bound_layers(
        [spec_of("layers.0.attn"), spec_of("layers.1.attn", shares_with="layers.0.attn")], BLOCK_SIZE, NUM_BLOCKS
    )
    step = paged_step([(3, 2)], 1, BLOCK_SIZE)
    before = owner.kv_cache.clone()
    donations = Donations()
    attention = ragged(donations)
    inputs = attention.host_inputs(step, None)
    query, key, value = new_rows(step, 4)
    first = attention.attend(owner, query, key, value, inputs)
    [given_away] = donations.contents
    assert torch.equal(given_away, before)
    written = owner.kv_cache.clone()
    second = attention.attend(reader, query, key + 1, value + 1, inputs)
    assert torch.equal(second, first)
    assert torch.equal(reader.kv_cache, written)
    assert len(donations.contents) == 1


def test_one_graph_serves_steps_of_one_size_and_rebinding() -> None:
    """Traced whole: what differs between steps is in the inputs, and the cache is read from the layer."""
    [layer] = bound_layers([spec_of()], BLOCK_SIZE, NUM_BLOCKS)
    attention = ragged()
    traced = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> object:
        traced.append(graph)
        return graph.forward

    donated = RaggedAttention(ragged_paged_attention, lambda tensor: None, MAX_SEQS, MAX_BLOCKS)
    compiled = torch.compile(donated.attend, backend=backend, fullgraph=True, dynamic=False)
    with torch.no_grad():
        for requests, num_padding in [([(4, 3)], 2), ([(1, 0), (5, 7)], 0), ([(2, 1), (1, 1), (1, 9)], 2)]:
            step = paged_step(requests, num_padding, BLOCK_SIZE)
            query, key, value = new_rows(step, 4)
            inputs = attention.host_inputs(step, None)
            out = compiled(layer, query, key, value, inputs)
            torch.testing.assert_close(out, attention.attend(layer, query, key, value, inputs))
    assert len(traced) == 1


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "dtype", "reason"),
    [
        (8, 128, torch.bfloat16, None),
        (1, 256, torch.bfloat16, None),
        (4, 128, torch.float32, None),
        (8, 64, torch.bfloat16, "head_dim is 64, the kernel needs a multiple of 128"),
        (3, 128, torch.bfloat16, "num_kv_heads is 3, the kernel cannot tile 3 rows"),
        (3, 128, torch.float32, "num_kv_heads is 3, the kernel cannot tile 6 rows"),
        (8, 128, torch.float16, "the kernel has bfloat16 and float32"),
    ],
)
def test_what_the_hardware_kernel_refuses_is_known_beforehand(
    kv_heads: int, head_dim: int, dtype: torch.dtype, reason: str | None
) -> None:
    refusal = ragged_kernel_refusal(AttentionSpec("attn", 24, kv_heads, head_dim, SCALE), dtype)
    assert refusal is None if reason is None else reason in str(refusal)
