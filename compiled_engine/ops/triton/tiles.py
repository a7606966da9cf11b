"""What the attention kernels share: the sizes of their tiles and the loop over a request's cached keys and values.

The loop is online softmax over tiles of keys (Dao et al., "FlashAttention", 2022) whose addresses come from a block
table (Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from compiled_engine.ops.attention import AttentionSpec

_SMALLEST_DOT = 16  # tl.dot takes no smaller side

# exp2 is the hardware's exponential, so all scores are kept times log2(e).
LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class TileConfig:
    """How one kernel is launched. ``rows``: query rows of a program; ``keys``: cached tokens in one turn of its loop.

    Rows are pairs of a query token and a query head, all of one KV head. Both sizes are powers of two.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def padded_head_dim(head_dim: int) -> int:
    """The width that the kernels compute with: the next power of two; the columns beyond ``head_dim`` are zeros."""
    return max(_SMALLEST_DOT, triton.next_power_of_2(head_dim))


def prefill_tiles(head_dim: int, group: int, dtype: torch.dtype) -> TileConfig:
    """Tiles of the kernel for any mix of prompts and decodes. ``group``: query heads per KV head.

    They depend on the model alone and never on a step, so a row's result does not depend on its batch. The sizes are
    the largest whose accumulators stay in registers; three stages also fetch the block table one turn ahead.
    """
    width = padded_head_dim(head_dim)
    if dtype is torch.float32:
        config = TileConfig(32, 32 if width <= 128 else 16, num_warps=4 if width <= 64 else 8, num_stages=3)
    else:
        config = TileConfig(64, 64 if width <= 128 else 32, num_warps=4 if width <= 128 else 8, num_stages=3)
    return _with_room_for(group, config)


def decode_tiles(head_dim: int, group: int, dtype: torch.dtype) -> TileConfig:
    """Tiles of the kernel for one query token per request: hardly more rows than ``group``."""
    keys = 64 if padded_head_dim(head_dim) <= 128 else 32
    if dtype is torch.float32:
        keys = 16
    return _with_room_for(group, TileConfig(_SMALLEST_DOT, keys, num_warps=4, num_stages=3))


def _with_room_for(group: int, config: TileConfig) -> TileConfig:
    return replace(config, rows=max(config.rows, triton.next_power_of_2(group)))


@dataclass(frozen=True)
class LoopConstants:
    """The ``tl.constexpr`` parameters that both attention kernels have, by their names in the kernels' signatures.

    ``GROUP``: query heads per KV head. ``SOFT_CAP``, ``WINDOW``: 0 where the layer has none. ``BLOCK_STRIDE``:
    elements from one block of the cache to the next.
    """

    NUM_KV_HEADS: int
    GROUP: int
    HEAD_DIM: int
    PADDED_DIM: int
    SOFT_CAP: float
    WINDOW: int
    BLOCK_SIZE: int
    BLOCK_STRIDE: int
    ROWS: int
    KEYS: int

    @classmethod
    def of(cls, spec: AttentionSpec, block_size: int, block_stride: int, config: TileConfig) -> LoopConstants:
        return cls(
            NUM_KV_HEADS=spec.num_kv_heads,
            GROUP=spec.num_heads // spec.num_kv_heads,
            HEAD_DIM=spec.head_dim,
            PADDED_DIM=padded_head_dim(spec.head_dim),
            SOFT_CAP=spec.soft_cap or 0.0,
            WINDOW=spec.sliding_window or 0,
            BLOCK_SIZE=block_size,
            BLOCK_STRIDE=block_stride,
            ROWS=config.rows,
            KEYS=config.keys,
        )


@triton.jit
def load_rows(rows, offsets, is_row, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Tile [len(offsets), PADDED_DIM] of heads that start ``offsets`` elements after ``rows``, zero where none is."""
    columns = tl.arange(0, PADDED_DIM)
    mask = is_row[:, None] & (columns[None, :] < HEAD_DIM)
    return tl.load(rows + offsets[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def soft_capped(scores, SOFT_CAP: tl.constexpr):
    """SOFT_CAP * tanh(scores / SOFT_CAP).

    tanh(x) = 1 - 2 / (exp(2x) + 1), which is right at both ends too: exp gives infinity there, or zero.
    """
    return SOFT_CAP - 2.0 * SOFT_CAP / (tl.exp2(scores * (2.0 * LOG2_E / SOFT_CAP)) + 1.0)


@triton.jit
def attend_to_tiles(
    accumulator,
    maximum,
    total,
    query,
    query_positions,
    slopes,
    kv_cache,
    block_table,
    first_key,
    end_key,
    first_tile,
    end_tile,
    scale,
    HAS_SLOPES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Bring the softmax of all rows on by the keys of tiles ``first_tile`` to ``end_tile``, KEYS positions each.

    accumulator: float32 [rows, PADDED_DIM]; maximum, total: float32 [rows], the largest score times log2(e) and the
    sum of weights; returned in this order. query: [rows, PADDED_DIM]; query_positions: int32 [rows]; slopes: float32
    [rows]. ``kv_cache`` points at the head's first key. Only positions from ``first_key`` to ``end_key`` are read:
    outside of them lie blocks of others, or NaN. Tiles start at multiples of KEYS whatever the rows are, so a token
    meets its keys in the same tiles in every chunk.
    """
    for tile in range(first_tile, end_tile):
        positions = tile * KEYS + tl.arange(0, KEYS)
        is_key = (positions >= first_key) & (positions < end_key)
        blocks = tl.load(block_table + positions // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        offsets = blocks * BLOCK_STRIDE + (positions % BLOCK_SIZE) * (2 * NUM_KV_HEADS * HEAD_DIM)
        keys = load_rows(kv_cache, offsets, is_key, HEAD_DIM, PADDED_DIM).to(query.dtype)
        values = load_rows(kv_cache + NUM_KV_HEADS * HEAD_DIM, offsets, is_key, HEAD_DIM, PADDED_DIM).to(query.dtype)

        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        if SOFT_CAP > 0.0:
            scores = soft_capped(scores, SOFT_CAP)
        distances = positions[None, :] - query_positions[:, None]
        if HAS_SLOPES:
            scores += slopes[:, None] * distances
        is_visible = is_key[None, :] & (distances <= 0)
        if WINDOW > 0:
            is_visible = is_visible & (distances > -WINDOW)
        scores = tl.where(is_visible, scores * LOG2_E, float("-inf"))

        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # A row that has seen no key yet: its weights must be exp2(-inf - 0), not exp2(-inf + inf).
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - base[:, None])
        rescale = tl.exp2(maximum - base)
        total = total * rescale + tl.sum(weights, 1)
        accumulator = tl.dot(weights.to(query.dtype), values, accumulator * rescale[:, None], input_precision="ieee")
        maximum = new_maximum
    return accumulator, maximum, total
