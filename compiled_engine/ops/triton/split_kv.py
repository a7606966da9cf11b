"""The attention kernels for one query token per request: a request's keys are split among programs, then reduced.

With few requests this keeps the whole device busy ("flash-decoding", Dao, Haziza, Massa and Sizov, 2023). The first
kernel leaves the unscaled result, the largest score and the sum of weights of each split in a workspace.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl

from compiled_engine.context import AttentionMetadata, KVCacheSpec
from compiled_engine.ops.attention import AttentionSpec
from compiled_engine.ops.triton.tiles import (
    LOG2_E,
    LoopConstants,
    attend_to_tiles,
    decode_tiles,
    load_rows,
    padded_head_dim,
)
from compiled_engine.ops.triton.variants import KernelVariant

MAX_KV_SPLITS = 32
_MIN_KEYS_PER_SPLIT = 256
_PROGRAMS_PER_MULTIPROCESSOR = 2
_REDUCE_WARPS = 4
_REDUCE_STAGES = 1


def choose_num_kv_splits(num_requests: int, max_seq_len: int, num_kv_heads: int, num_multiprocessors: int) -> int:
    """Among how many programs the keys of each request and KV head are split; 1: they are not split.

    As many as two programs per multiprocessor leave room for, of no less than 256 keys each in the longest request.
    """
    room = _PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors // (num_requests * num_kv_heads)
    return max(1, min(room, max_seq_len // _MIN_KEYS_PER_SPLIT, MAX_KV_SPLITS))


def max_split_rows(num_kv_heads: int, num_multiprocessors: int) -> int:
    """The largest num_requests * num_kv_splits that ``choose_num_kv_splits`` leads to where it splits at all."""
    return _PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors // num_kv_heads


@dataclass(frozen=True)
class SplitWorkspace:
    """Where splits leave what the reduction reads. Flat float32 tensors, shared by all layers and never moved.

    Of request r, split s and head h of H, in a step of S splits: ``maxima`` and ``totals`` hold the largest score
    times log2(e) and the sum of weights at (r * S + s) * H + h, and ``results`` has head_dim elements at head_dim
    times that.
    """

    results: torch.Tensor
    maxima: torch.Tensor
    totals: torch.Tensor

    @classmethod
    def allocate(cls, num_rows: int, max_heads: int, max_row_size: int, device: torch.device) -> SplitWorkspace:
        """For ``num_rows`` pairs of a request and a split. ``max_row_size``: heads times head_dim of any layer."""
        return cls(
            torch.empty(num_rows * max_row_size, dtype=torch.float32, device=device),
            torch.empty(num_rows * max_heads, dtype=torch.float32, device=device),
            torch.empty(num_rows * max_heads, dtype=torch.float32, device=device),
        )


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_table"],
)
def _split_kernel(
    query,
    kv_cache,
    results,
    maxima,
    totals,
    query_start_loc,
    seq_lens,
    block_table,
    slopes,
    table_stride,
    query_stride,
    scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Program (request, KV head, split): all query heads of the KV head over a run of the request's key tiles."""
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    token_row = tl.load(query_start_loc + request).to(tl.int64)
    if tl.load(query_start_loc + request + 1) == token_row:
        return

    end_key = tl.load(seq_lens + request)
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(end_key - WINDOW, 0)
    first_tile = first_key // KEYS
    end_tile = tl.cdiv(end_key, KEYS)
    tiles_per_split = tl.cdiv(end_tile - first_tile, num_splits)
    split_first = first_tile + split * tiles_per_split
    split_end = tl.minimum(split_first + tiles_per_split, end_tile)

    rows = tl.arange(0, ROWS)
    is_row = rows < GROUP
    heads = kv_head * GROUP + rows
    places = (request.to(tl.int64) * num_splits + split) * (NUM_KV_HEADS * GROUP) + heads
    if split_first >= split_end:
        # The reduction passes over such a split: its sum and its result may stay whatever they were.
        tl.store(maxima + places, float("-inf"), mask=is_row)
        return

    queries = load_rows(query, token_row * query_stride + heads * HEAD_DIM, is_row, HEAD_DIM, PADDED_DIM)
    head_slopes = tl.zeros([ROWS], tl.float32)
    if slopes is not None:
        head_slopes = tl.load(slopes + heads, mask=is_row, other=0.0)
    accumulator, maximum, total = attend_to_tiles(
        tl.zeros([ROWS, PADDED_DIM], tl.float32),
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        queries,
        tl.zeros([ROWS], tl.int32) + (end_key - 1),
        head_slopes,
        kv_cache + kv_head * HEAD_DIM,
        block_table + request.to(tl.int64) * table_stride,
        first_key,
        end_key,
        split_first,
        split_end,
        scale,
        slopes is not None,
        NUM_KV_HEADS,
        HEAD_DIM,
        PADDED_DIM,
        SOFT_CAP,
        WINDOW,
        BLOCK_SIZE,
        BLOCK_STRIDE,
        KEYS,
    )
    tl.store(maxima + places, maximum, mask=is_row)
    tl.store(totals + places, total, mask=is_row)
    columns = tl.arange(0, PADDED_DIM)
    is_element = is_row[:, None] & (columns[None, :] < HEAD_DIM)
    tl.store(results + (places * HEAD_DIM)[:, None] + columns[None, :], accumulator, mask=is_element)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["query_start_loc"])
def _reduce_kernel(
    results,
    maxima,
    totals,
    out,
    query_start_loc,
    sinks,
    num_splits,
    out_stride,
    value_scale,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Program (request, head): merge the request's splits, and the head's sink, in a fixed order."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    token_row = tl.load(query_start_loc + request).to(tl.int64)
    if tl.load(query_start_loc + request + 1) == token_row:
        return

    splits = tl.arange(0, MAX_SPLITS)
    places = (request.to(tl.int64) * num_splits + splits) * NUM_HEADS + head
    split_maxima = tl.load(maxima + places, mask=splits < num_splits, other=float("-inf"))
    has_keys = split_maxima != float("-inf")
    split_totals = tl.load(totals + places, mask=has_keys, other=0.0)
    partial_results = load_rows(results, places * HEAD_DIM, has_keys, HEAD_DIM, PADDED_DIM)

    maximum = tl.max(split_maxima, 0)
    if sinks is not None:
        sink = tl.load(sinks + head) * LOG2_E
        maximum = tl.maximum(maximum, sink)
    weights = tl.exp2(split_maxima - maximum)
    total = tl.sum(weights * split_totals, 0)
    if sinks is not None:
        total += tl.exp2(sink - maximum)
    result = tl.sum(weights[:, None] * partial_results, 0) * (value_scale / total)
    columns = tl.arange(0, PADDED_DIM)
    places = out + token_row * out_stride + head * HEAD_DIM + columns
    tl.store(places, result.to(out.dtype.element_ty), mask=columns < HEAD_DIM)


@dataclass(frozen=True)
class ReduceConstants:
    """The reduction's ``tl.constexpr`` parameters."""

    NUM_HEADS: int
    HEAD_DIM: int
    PADDED_DIM: int
    MAX_SPLITS: int = MAX_KV_SPLITS

    @classmethod
    def of(cls, spec: AttentionSpec) -> ReduceConstants:
        return cls(spec.num_heads, spec.head_dim, padded_head_dim(spec.head_dim))


def attend_decode(
    spec: AttentionSpec,
    query: torch.Tensor,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    num_kv_splits: int,
    workspace: SplitWorkspace,
    scale: float,
    value_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> None:
    """``attend_prefill`` for requests of one new token, or none, by ``num_kv_splits`` programs per request and KV head.

    The arguments are those of ``attend_prefill``. Sums are made in another order than there, and in an order that
    depends on ``num_kv_splits``, so the results are equal to rounding and not bit for bit.
    """
    config = decode_tiles(spec.head_dim, spec.num_heads // spec.num_kv_heads, query.dtype)
    constants = LoopConstants.of(spec, kv_cache.shape[1], kv_cache.stride(0), config)
    num_requests = metadata.seq_lens.shape[0]
    _split_kernel[(num_requests, spec.num_kv_heads, num_kv_splits)](
        query,
        kv_cache,
        workspace.results,
        workspace.maxima,
        workspace.totals,
        metadata.query_start_loc,
        metadata.seq_lens,
        metadata.block_table,
        slopes,
        metadata.block_table.stride(0),
        query.stride(0),
        scale,
        **asdict(constants),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    _reduce_kernel[(num_requests, spec.num_heads)](
        workspace.results,
        workspace.maxima,
        workspace.totals,
        out,
        metadata.query_start_loc,
        sinks,
        num_kv_splits,
        out.stride(0),
        value_scale,
        **asdict(ReduceConstants.of(spec)),
        num_warps=_REDUCE_WARPS,
        num_stages=_REDUCE_STAGES,
    )


def split_variant(
    spec: AttentionSpec, cache_spec: KVCacheSpec, dtype: torch.dtype, has_slopes: bool = False
) -> KernelVariant:
    """The first kernel of ``attend_decode`` for queries of ``dtype``, whose rows are a multiple of 16 apart."""
    config = decode_tiles(spec.head_dim, spec.num_heads // spec.num_kv_heads, dtype)
    constants = LoopConstants.of(spec, cache_spec.block_size, cache_spec.stride()[0], config)
    arguments: dict[str, object] = {
        "query": dtype,
        "kv_cache": cache_spec.dtype,
        "results": torch.float32,
        "maxima": torch.float32,
        "totals": torch.float32,
        "query_start_loc": torch.int32,
        "seq_lens": torch.int32,
        "block_table": torch.int32,
        "slopes": torch.float32 if has_slopes else None,
        "table_stride": 1,
        "query_stride": spec.num_heads * spec.head_dim,
        "scale": 1.0,
    }
    return KernelVariant(
        "attend_decode_split", _split_kernel, arguments, asdict(constants), config.num_warps, config.num_stages
    )


def reduce_variant(spec: AttentionSpec, dtype: torch.dtype, has_sinks: bool = False) -> KernelVariant:
    """The second kernel of ``attend_decode``, for an ``out`` of ``dtype``."""
    arguments: dict[str, object] = {
        "results": torch.float32,
        "maxima": torch.float32,
        "totals": torch.float32,
        "out": dtype,
        "query_start_loc": torch.int32,
        "sinks": torch.float32 if has_sinks else None,
        "num_splits": 2,
        "out_stride": spec.num_heads * spec.head_dim,
        "value_scale": 1.0,
    }
    constants = asdict(ReduceConstants.of(spec))
    return KernelVariant("attend_decode_reduce", _reduce_kernel, arguments, constants, _REDUCE_WARPS, _REDUCE_STAGES)
