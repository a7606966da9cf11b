"""Steps of one attention layer for tests, by hand or by hypothesis, to be run by the CPU backend or the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from hypothesis import strategies as st

from compiled_engine.context import key_cache, value_cache
from compiled_engine.ops.attention import AttentionSpec
from compiled_engine.ops.cpu import CpuAttention
from compiled_engine.ops.cpu.build import load_kernels
from compiled_engine.ops.reference import paged_attention
from kernel_folder import KERNELS

TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@cache
def cpu_attention(dtype: torch.dtype, path_name: str | None) -> CpuAttention:
    return CpuAttention(dtype, load_kernels(KERNELS, path_name))


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
    sinks: torch.Tensor | None = None

    @property
    def query_start_loc(self) -> np.ndarray:
        return np.cumsum([0] + [request.new for request in self.requests]).astype(np.int32)

    @property
    def seq_lens(self) -> np.ndarray:
        return np.array([request.seq_len for request in self.requests], dtype=np.int32)

    @property
    def num_real_rows(self) -> int:
        return sum(request.new for request in self.requests[: self.num_real])

    def slots_of(self, row: int, positions: Sequence[int]) -> list[int]:
        size = self.cache.shape[1]
        return [int(self.block_table[row, position // size]) * size + position % size for position in positions]

    def used_slots(self) -> torch.Tensor:
        """Slots of all tokens that some query of the real requests sees."""
        window = self.spec.sliding_window
        used: list[int] = []
        for row, request in enumerate(self.requests[: self.num_real]):
            first = 0 if window is None else max(0, request.cached - window + 1)
            used += self.slots_of(row, range(first, request.seq_len))
        return torch.tensor(used, dtype=torch.int64)

    def alone(self, row: int) -> Step:
        """The same step with request ``row`` alone in it, and a cache of its own."""
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

    def chunk(self, first: int, last: int) -> Step:
        """Of a step with one request: its new tokens ``first`` to ``last``, with the same cache."""
        (request,) = self.requests
        rows = slice(first, last)
        return replace(
            self,
            requests=(Request(request.cached + first, last - first),),
            query=self.query[rows],
            key=self.key[rows],
            value=self.value[rows],
            slots=self.slots[rows],
        )

    def run(self, path_name: str | None = None, writes: bool = True) -> torch.Tensor:
        """Write K/V into ``cache`` and attend through the backend. ``out`` starts as NaN: every row must be made."""
        backend = cpu_attention(self.query.dtype, path_name)
        metadata = backend.build_metadata(self.query_start_loc, self.seq_lens, self.block_table)
        key, value = (self.key, self.value) if writes else (None, None)
        out = torch.full(self.query.shape, float("nan"), dtype=self.query.dtype)
        layer = backend.for_layer(self.spec)
        layer.write_and_attend(self.query, key, value, out, self.cache, self.slots, metadata, self.sinks)
        return out

    def reference(self, alibi: torch.Tensor | None = None) -> torch.Tensor:
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
            self.sinks,
            alibi,
        )

    def check(self, path_name: str | None = None) -> None:
        """Run and compare with the reference."""
        tolerance = TOLERANCE[self.query.dtype]
        out = self.run(path_name)
        torch.testing.assert_close(out.double(), self.reference(), rtol=tolerance, atol=tolerance)


def make_step(
    spec: AttentionSpec,
    requests: Sequence[Request],
    num_padding: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int,
    with_sinks: bool = False,
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
        slots=torch.tensor(slots, dtype=torch.int64),
        sinks=torch.randn(spec.num_heads, generator=generator) if with_sinks else None,
    )


# Lengths around the kernel's tiles of 64 keys and splits of 512, and where an off-by-one would show.
lengths = st.one_of(st.integers(0, 40), st.sampled_from([62, 63, 64, 65, 127, 128, 129, 511, 512, 513, 600]))
decodes = st.builds(Request, cached=lengths, new=st.just(1))
chunks = st.builds(Request, cached=lengths, new=st.integers(2, 12))
prompts = st.builds(Request, cached=st.just(0), new=st.one_of(st.integers(1, 12), st.just(70)))


@st.composite
def steps(draw: st.DrawFn, dtype: torch.dtype = torch.float32, max_requests: int = 4) -> Step:
    requests = draw(
        st.one_of(
            st.lists(decodes, min_size=1, max_size=max_requests),
            st.lists(st.one_of(decodes, chunks, prompts), min_size=1, max_size=max_requests),
        )
    )
    block_size = draw(st.sampled_from([1, 2, 4, 5, 16, 64]))
    if draw(st.booleans()):
        row = draw(st.integers(0, len(requests) - 1))
        up_to = -(-requests[row].seq_len // block_size) * block_size
        requests[row] = replace(requests[row], cached=up_to - requests[row].new)
    num_kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2), (3, 4), (1, 7), (1, 16)]))
    head_dim = draw(st.sampled_from([1, 4, 8, 16, 24, 40, 64, 72, 80, 96, 128, 256]))
    spec = AttentionSpec(
        "layer",
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=draw(st.sampled_from([0.25, head_dim**-0.5])),
        sliding_window=draw(st.sampled_from([None, None, 1, 2, 5, 16, 64, 70])),
        soft_cap=draw(st.sampled_from([None, None, 3.0])),
    )
    padding, sinks, seed = draw(st.integers(0, 2)), draw(st.booleans()), draw(st.integers(0, 2**16))
    return make_step(spec, requests, padding, block_size, dtype, seed, sinks)
