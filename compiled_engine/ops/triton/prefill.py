"""The attention kernel for any mix of prompts, prompt chunks and decodes, one program per tile of query rows.

A tile packs neighbouring query tokens of one request with all query heads of one KV head, so that keys and values are
loaded once for all of them. Each program finds its request on the device: the grid follows from shapes alone.
"""

from __future__ import annotations

from dataclasses import asdict

import torch
import triton
import triton.language as tl

from compiled_engine.context import AttentionMetadata, KVCacheSpec
from compiled_engine.ops.attention import AttentionSpec
from compiled_engine.ops.triton.tiles import LOG2_E, LoopConstants, attend_to_tiles, load_rows, prefill_tiles
from compiled_engine.ops.triton.variants import KernelVariant


@triton.jit
def _request_of_tile(query_start_loc, num_requests, tile, TOKENS: tl.constexpr):
    """The request that owns query tile ``tile``: the last one whose first tile is not after it.

    Request r's first tile is number query_start_loc[r] // TOKENS + r: from one request to the next that grows by no
    less than the tiles the request fills, and by at least one, and it needs no sums over earlier requests.
    """
    low = 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        is_before = tl.load(query_start_loc + middle) // TOKENS + middle <= tile
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    return low


@triton.jit(
    do_not_specialize=["num_requests", "table_stride"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_table"],
)
def _prefill_kernel(
    query,
    kv_cache,
    out,
    query_start_loc,
    seq_lens,
    block_table,
    sinks,
    slopes,
    num_requests,
    table_stride,
    query_stride,
    out_stride,
    scale,
    value_scale,
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
    """Program (query tile, KV head). Row i of a tile is token i // GROUP of it and query head i % GROUP."""
    TOKENS: tl.constexpr = ROWS // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    request = _request_of_tile(query_start_loc, num_requests, tile, TOKENS)
    first_row = tl.load(query_start_loc + request)
    num_tokens = tl.load(query_start_loc + request + 1) - first_row
    first_token = (tile - (first_row // TOKENS + request)) * TOKENS
    if first_token >= num_tokens:
        return

    rows = tl.arange(0, ROWS)
    tokens = first_token + rows // GROUP
    is_row = (rows < TOKENS * GROUP) & (tokens < num_tokens)
    heads = kv_head * GROUP + rows % GROUP
    token_rows = (first_row + tokens).to(tl.int64)
    queries = load_rows(query, token_rows * query_stride + heads * HEAD_DIM, is_row, HEAD_DIM, PADDED_DIM)

    num_cached = tl.load(seq_lens + request) - num_tokens
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(num_cached + first_token - WINDOW + 1, 0)
    end_key = num_cached + tl.minimum(first_token + TOKENS, num_tokens)

    accumulator = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    if sinks is None:
        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
    else:
        # A sink is a score like any other, whose value is zero.
        maximum = tl.load(sinks + heads, mask=is_row, other=0.0) * LOG2_E
        total = tl.full([ROWS], 1.0, tl.float32)
    head_slopes = tl.zeros([ROWS], tl.float32)
    if slopes is not None:
        head_slopes = tl.load(slopes + heads, mask=is_row, other=0.0)
    accumulator, maximum, total = attend_to_tiles(
        accumulator,
        maximum,
        total,
        queries,
        num_cached + tokens,
        head_slopes,
        kv_cache + kv_head * HEAD_DIM,
        block_table + request.to(tl.int64) * table_stride,
        first_key,
        end_key,
        first_key // KEYS,
        tl.cdiv(end_key, KEYS),
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
    result = accumulator * (value_scale / total)[:, None]
    columns = tl.arange(0, PADDED_DIM)
    places = out + (token_rows * out_stride + heads * HEAD_DIM)[:, None] + columns[None, :]
    tl.store(places, result.to(out.dtype.element_ty), mask=is_row[:, None] & (columns[None, :] < HEAD_DIM))


def attend_prefill(
    spec: AttentionSpec,
    query: torch.Tensor,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    value_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> None:
    """Causal attention of every request's newest tokens over its cached ones, into ``out``.

    query, out: [num_tokens, num_heads, head_dim] with dense rows; kv_cache: [num_blocks, block_size, 2, num_kv_heads,
    head_dim], dense within a block. ``scale`` multiplies the scores and ``value_scale`` the result. sinks, slopes:
    float32 [num_heads]; slope times (key position - query position) is added to the score (ALiBi). Rows of ``query``
    beyond the last request's are not touched. Scores and sums are float32; with float32 queries so are the products.
    """
    group = spec.num_heads // spec.num_kv_heads
    config = prefill_tiles(spec.head_dim, group, query.dtype)
    constants = LoopConstants.of(spec, kv_cache.shape[1], kv_cache.stride(0), config)
    num_requests = metadata.seq_lens.shape[0]
    # Each request fills at most one tile that is not full, see _request_of_tile.
    num_tiles = query.shape[0] // (config.rows // group) + num_requests
    _prefill_kernel[(num_tiles, spec.num_kv_heads)](
        query,
        kv_cache,
        out,
        metadata.query_start_loc,
        metadata.seq_lens,
        metadata.block_table,
        sinks,
        slopes,
        num_requests,
        metadata.block_table.stride(0),
        query.stride(0),
        out.stride(0),
        scale,
        value_scale,
        **asdict(constants),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def prefill_variant(
    spec: AttentionSpec, cache_spec: KVCacheSpec, dtype: torch.dtype, has_sinks: bool = False, has_slopes: bool = False
) -> KernelVariant:
    """What ``attend_prefill`` launches for queries of ``dtype``, whose rows are a multiple of 16 elements apart."""
    config = prefill_tiles(spec.head_dim, spec.num_heads // spec.num_kv_heads, dtype)
    constants = LoopConstants.of(spec, cache_spec.block_size, cache_spec.stride()[0], config)
    row_size = spec.num_heads * spec.head_dim
    arguments: dict[str, object] = {
        "query": dtype,
        "kv_cache": cache_spec.dtype,
        "out": dtype,
        "query_start_loc": torch.int32,
        "seq_lens": torch.int32,
        "block_table": torch.int32,
        "sinks": torch.float32 if has_sinks else None,
        "slopes": torch.float32 if has_slopes else None,
        "num_requests": 1,
        "table_stride": 1,
        "query_stride": row_size,
        "out_stride": row_size,
        "scale": 1.0,
        "value_scale": 1.0,
    }
    return KernelVariant(
        "attend_prefill", _prefill_kernel, arguments, asdict(constants), config.num_warps, config.num_stages
    )
