"""The CPU backend against the dense reference, over cached lengths, chunks, windows, block sizes and dtypes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.context import AttentionMetadata, key_cache, token_slots, value_cache
from compiled_engine.ops.attention import AttentionSpec
from compiled_engine.ops.cpu import CpuAttention
from compiled_engine.ops.cpu.attention import CpuAttentionMetadata
from compiled_engine.ops.reference import paged_attention
from kernel_folder import KERNELS

TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class Request:
    cached: int
    new: int

    @property
    def seq_len(self) -> int:
        return self.cached + self.new


@dataclass(frozen=True)
class Step:
    """One step of a layer: ``cache`` before it, K/V of its new tokens, where they go, and what attends to what.

    Requests from ``num_real`` on are padding: one token, block table of zeros, slot inside block 0.
    """

    spec: AttentionSpec
    requests: tuple[Request, ...]
    num_real: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cache: torch.Tensor
    block_table: np.ndarray
    slots: torch.Tensor

    @property
    def query_start_loc(self) -> np.ndarray:
        return np.cumsum([0] + [request.new for request in self.requests]).astype(np.int32)

    @property
    def seq_lens(self) -> np.ndarray:
        return np.array([request.seq_len for request in self.requests], dtype=np.int32)

    @property
    def num_real_rows(self) -> int:
        return sum(request.new for request in self.requests[: self.num_real])

    def used_slots(self) -> torch.Tensor:
        """Slots of all tokens of the real requests, cached and new."""
        block_size = self.cache.shape[1]
        return torch.tensor(
            [
                int(self.block_table[row, position // block_size]) * block_size + position % block_size
                for row, request in enumerate(self.requests[: self.num_real])
                for position in range(request.seq_len)
            ],
            dtype=torch.int64,
        )

    def alone(self, row: int) -> Step:
        """The same step with request ``row`` alone in it."""
        first, last = self.query_start_loc[row : row + 2]
        return replace(
            self,
            requests=(self.requests[row],),
            num_real=1,
            query=self.query[first:last],
            key=self.key[first:last],
            value=self.value[first:last],
            cache=self.cache.clone(),
            block_table=self.block_table[row : row + 1],
            slots=self.slots[first:last],
        )

    def run(self) -> torch.Tensor:
        """Write K/V into ``cache`` and attend through the backend. ``out`` starts as NaN: every row must be made."""
        backend = CpuAttention(self.query.dtype, KERNELS)
        block_size = self.cache.shape[1]
        # Another window beside the layer's own, as in a model whose layers differ.
        windows = [self.spec.sliding_window, 3, None]
        metadata = backend.build_metadata(self.query_start_loc, self.seq_lens, self.block_table, block_size, windows)
        backend.write_kv(self.cache, self.key, self.value, self.slots)
        out = torch.full_like(self.query, float("nan"))
        backend.attend(self.spec, self.query, self.cache, metadata, out)
        return out

    def reference(self) -> torch.Tensor:
        """What the reference makes of ``cache`` as it is now."""
        return paged_attention(
            self.query,
            key_cache(self.cache),
            value_cache(self.cache),
            torch.from_numpy(self.block_table),
            torch.from_numpy(self.seq_lens),
            torch.from_numpy(self.query_start_loc),
            self.spec.scale,
            self.spec.sliding_window,
            self.spec.soft_cap,
        )


decodes = st.builds(Request, cached=st.integers(0, 40), new=st.just(1))
chunks = st.builds(Request, cached=st.integers(0, 20), new=st.integers(2, 12))
prompts = st.builds(Request, cached=st.just(0), new=st.integers(1, 12))


@st.composite
def steps(draw: st.DrawFn, dtype: torch.dtype = torch.float32, max_requests: int = 4) -> Step:
    requests = draw(
        st.one_of(
            st.lists(decodes, min_size=1, max_size=max_requests),
            st.lists(st.one_of(decodes, chunks, prompts), min_size=1, max_size=max_requests),
        )
    )
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    if draw(st.booleans()):
        # A sequence that fills its last block exactly is where an off-by-one shows.
        row = draw(st.integers(0, len(requests) - 1))
        up_to = -(-requests[row].seq_len // block_size) * block_size
        requests[row] = replace(requests[row], cached=up_to - requests[row].new)
    num_padding = draw(st.integers(0, 2))
    num_kv_heads, group, head_dim = draw(st.sampled_from([(1, 1, 8), (2, 1, 4), (1, 3, 8), (2, 2, 16), (3, 4, 2)]))
    spec = AttentionSpec(
        "layer",
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=draw(st.sampled_from([0.25, head_dim**-0.5])),
        sliding_window=draw(st.sampled_from([None, None, 1, 2, 5, 16])),
        soft_cap=draw(st.sampled_from([None, None, 3.0])),
    )
    return make_step(spec, requests, num_padding, block_size, dtype, seed=draw(st.integers(0, 2**16)))


def make_step(
    spec: AttentionSpec, requests: list[Request], num_padding: int, block_size: int, dtype: torch.dtype, seed: int
) -> Step:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    blocks_of = [-(-request.seq_len // block_size) for request in requests]
    # A few blocks more than are used, in random order: block ids say nothing about positions.
    free = (1 + torch.randperm(sum(blocks_of) + 3, generator=generator)).tolist()
    block_table = np.zeros((len(requests) + num_padding, max([*blocks_of, 1])), dtype=np.int32)
    slots: list[int] = []
    for row, (request, count) in enumerate(zip(requests, blocks_of, strict=True)):
        block_table[row, :count] = [free.pop() for _ in range(count)]
        positions = range(request.cached, request.seq_len)
        slots += [int(block_table[row, p // block_size]) * block_size + p % block_size for p in positions]
    slots += [pad % block_size for pad in range(num_padding)]
    num_tokens, num_blocks = len(slots), sum(blocks_of) + 4
    return Step(
        spec=spec,
        requests=(*requests, *[Request(0, 1)] * num_padding),
        num_real=len(requests),
        query=random(num_tokens, spec.num_heads, spec.head_dim),
        key=random(num_tokens, spec.num_kv_heads, spec.head_dim),
        value=random(num_tokens, spec.num_kv_heads, spec.head_dim),
        cache=random(num_blocks, block_size, 2, spec.num_kv_heads, spec.head_dim),
        block_table=block_table,
        slots=torch.tensor(slots),
    )


@given(step=steps())
def test_equals_the_reference(step: Step) -> None:
    out = step.run()
    torch.testing.assert_close(out.double(), step.reference(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@given(data=st.data())
def test_equals_the_reference_in_sixteen_bits(dtype: torch.dtype, data: st.DataObject) -> None:
    step = data.draw(steps(dtype=dtype))
    out = step.run()
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), step.reference(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 70])
def test_decodes_of_very_unlike_lengths(window: int | None, soft_cap: float | None) -> None:
    """Lengths on both sides of the limits at which decodes are put into one batch."""
    spec = AttentionSpec("layer", 4, 2, 8, 0.3, window, soft_cap)
    cached = [0, 1, 62, 63, 64, 65, 127, 128, 129, 300]
    step = make_step(spec, [Request(n, 1) for n in reversed(cached)], 1, 16, torch.float32, seed=5)
    torch.testing.assert_close(step.run().double(), step.reference(), rtol=2e-5, atol=2e-5)


@given(step=steps(), poison=st.sampled_from([float("nan"), float("inf"), 1e30]))
def test_what_no_request_owns_cannot_reach_its_rows(step: Step, poison: float) -> None:
    """NaN in unused slots, unused blocks, block 0 and all padding rows leaves real rows bit-identical."""
    clean = replace(step, cache=step.cache.clone()).run()[: step.num_real_rows]
    used = step.used_slots()
    kept = token_slots(step.cache)[used].clone()
    step.cache.fill_(poison)
    token_slots(step.cache)[used] = kept
    for tensor in (step.query, step.key, step.value):
        tensor[step.num_real_rows :] = poison
    poisoned = step.run()[: step.num_real_rows]
    assert torch.isfinite(poisoned).all()
    assert torch.equal(clean, poisoned)


@given(step=steps())
def test_a_request_does_not_feel_its_batch_mates(step: Step) -> None:
    alone = [step.alone(row).run() for row in range(step.num_real)]
    together = step.run()
    torch.testing.assert_close(together[: step.num_real_rows], torch.cat(alone), rtol=2e-5, atol=2e-5)


@given(step=steps(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_what_is_written_is_read_back_exactly(step: Step, dtype: torch.dtype) -> None:
    key, value, cache = (tensor.to(dtype) for tensor in (step.key, step.value, step.cache))
    before = token_slots(cache.clone())
    CpuAttention(dtype, KERNELS).write_kv(cache, key, value, step.slots)
    real = step.num_real_rows
    block_size = cache.shape[1]
    for row, slot in enumerate(step.slots[:real].tolist()):
        assert torch.equal(key_cache(cache)[slot // block_size, slot % block_size], key[row])
        assert torch.equal(value_cache(cache)[slot // block_size, slot % block_size], value[row])
    untouched = torch.ones(before.shape[0], dtype=torch.bool)
    untouched[step.slots] = False
    assert torch.equal(token_slots(cache)[untouched], before[untouched])


@given(step=steps(max_requests=2), split=st.integers(1, 11))
def test_a_prompt_in_two_chunks_is_the_prompt_in_one(step: Step, split: int) -> None:
    row = max(range(step.num_real), key=lambda index: step.requests[index].new)
    whole = step.alone(row)
    request = whole.requests[0]
    if request.new < 2:
        return
    split = min(split, request.new - 1)
    parts = []
    cache = whole.cache.clone()
    for cached, rows in ((request.cached, slice(0, split)), (request.cached + split, slice(split, None))):
        part = replace(
            whole,
            requests=(Request(cached, len(range(*rows.indices(request.new)))),),
            query=whole.query[rows],
            key=whole.key[rows],
            value=whole.value[rows],
            slots=whole.slots[rows],
            cache=cache,
        )
        parts.append(part.run())
    torch.testing.assert_close(torch.cat(parts), whole.run(), rtol=2e-5, atol=2e-5)


def test_requests_without_rows_are_passed_over() -> None:
    """A step may name a request for which nothing is scheduled: it has no rows to fill."""
    spec = AttentionSpec("layer", 2, 1, 4, 0.5)
    step = make_step(spec, [Request(3, 1), Request(4, 0), Request(0, 3)], 0, 2, torch.float32, seed=1)
    torch.testing.assert_close(step.run().double(), step.reference(), rtol=2e-5, atol=2e-5)


def test_metadata_shows_the_step_as_it_was_given() -> None:
    spec = AttentionSpec("layer", 2, 1, 4, 0.5, sliding_window=3)
    step = make_step(spec, [Request(3, 1), Request(0, 3)], 1, 2, torch.float32, seed=1)
    metadata = CpuAttention(torch.float32, KERNELS).build_metadata(
        step.query_start_loc, step.seq_lens, step.block_table, 2, [3, None, 3]
    )
    assert metadata.query_start_loc.tolist() == step.query_start_loc.tolist()
    assert metadata.seq_lens.tolist() == [4, 3, 1]
    assert metadata.block_table.tolist() == step.block_table.tolist()
    assert set(metadata.chunks) == {3, None}


def test_every_window_is_planned_once_however_many_layers_have_it() -> None:
    backend = CpuAttention(torch.float32, KERNELS)
    arguments = (np.array([0, 1], np.int32), np.array([4], np.int32), np.array([[1]], np.int32), 4)
    assert len(backend.build_metadata(*arguments, [None] * 30 + [2] * 30).chunks) == 2


def test_metadata_of_another_backend_is_refused() -> None:
    foreign = AttentionMetadata(torch.tensor([0, 1]), torch.tensor([1]), torch.tensor([[0]]))
    spec = AttentionSpec("layer", 1, 1, 4, 0.5)
    query = torch.zeros(1, 1, 4)
    with pytest.raises(TypeError, match="CpuAttentionMetadata"):
        CpuAttention(torch.float32, KERNELS).attend(spec, query, torch.zeros(1, 1, 2, 1, 4), foreign, query.clone())
    assert issubclass(CpuAttentionMetadata, AttentionMetadata)
