"""Attention on CPU: how long one layer takes, and how near it comes to the memory's and the core's limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from compiled_engine.ops.attention import AttentionSpec
from compiled_engine.ops.cpu import CpuAttention
from compiled_engine.ops.cpu.build import load_kernels

BLOCK_SIZE = 16


@dataclass(frozen=True)
class AttentionCase:
    """``batch_size`` requests with ``cached`` tokens before ``new`` ones."""

    name: str
    batch_size: int
    cached: int
    new: int


@dataclass(frozen=True)
class AttentionRow:
    """What one case took. ``gigabytes_per_second``: keys and values, each once. ``gigaflops_per_second``: of the two
    matrix products, for visible keys alone."""

    case: AttentionCase
    microseconds: float
    gigabytes_per_second: float
    gigaflops_per_second: float


DECODES = tuple(
    AttentionCase(f"decode, batch {batch_size}, context {context}", batch_size, context - 1, 1)
    for batch_size in (1, 8, 32)
    for context in (128, 1024, 8192)
)
PROMPTS = (
    AttentionCase("prompt of 512", 1, 0, 512),
    AttentionCase("prompt of 2048", 1, 0, 2048),
    AttentionCase("chunk of 512 after 7680", 1, 7680, 512),
)


def attention_rows(
    spec: AttentionSpec, dtype: torch.dtype, kernel_folder: Path | None, seconds: float = 0.3
) -> Iterator[AttentionRow]:
    """Measure a layer with ``spec`` in every case, each for about ``seconds``, the quickest of all runs.

    Uses the threads that the kernels have; ``kernel_folder`` as in ``load_kernels``.
    """
    backend = CpuAttention(dtype, load_kernels(kernel_folder))
    for case in (*DECODES, *PROMPTS):
        elapsed = _quickest(_layer_call(spec, dtype, backend, case), seconds)
        tokens = case.batch_size * (case.cached + case.new)
        num_bytes = tokens * 2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize
        visible = case.batch_size * (case.new * case.cached + case.new * (case.new + 1) // 2)
        flops = 4 * visible * spec.num_heads * spec.head_dim
        yield AttentionRow(case, elapsed * 1e6, num_bytes / elapsed / 1e9, flops / elapsed / 1e9)


def _layer_call(
    spec: AttentionSpec, dtype: torch.dtype, backend: CpuAttention, case: AttentionCase
) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    seq_len = case.cached + case.new
    num_blocks = -(-seq_len // BLOCK_SIZE)
    # Blocks as a busy engine hands them out: in no order.
    blocks = 1 + torch.randperm(case.batch_size * num_blocks, generator=generator).numpy().astype(np.int32)
    block_table = blocks.reshape(case.batch_size, num_blocks)
    positions = np.arange(case.cached, seq_len)
    slots = block_table[:, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    starts = np.arange(case.batch_size + 1, dtype=np.int32) * case.new
    metadata = backend.build_metadata(starts, np.full(case.batch_size, seq_len, np.int32), block_table)
    rows = case.batch_size * case.new
    cache = random(len(blocks) + 1, BLOCK_SIZE, 2, spec.num_kv_heads, spec.head_dim)
    query, key, value = (random(rows, heads, spec.head_dim) for heads in (spec.num_heads, *[spec.num_kv_heads] * 2))
    out, slot_mapping = torch.empty_like(query), torch.from_numpy(slots.reshape(-1))
    layer = backend.for_layer(spec)
    return lambda: layer.write_and_attend(query, key, value, out, cache, slot_mapping, metadata)


def _quickest(call: Callable[[], None], seconds: float) -> float:
    """Seconds of the quickest call, of at least three."""
    best, calls, begin = float("inf"), 0, time.perf_counter()
    while calls < 3 or time.perf_counter() - begin < seconds:
        before = time.perf_counter()
        call()
        best, calls = min(best, time.perf_counter() - before), calls + 1
    return best
