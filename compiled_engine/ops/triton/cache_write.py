"""Storing the keys and values of a step's tokens in a layer's paged cache."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl

from compiled_engine.context import KVCacheSpec
from compiled_engine.ops.triton.variants import KernelVariant

_LARGEST_CHUNK = 1024
_NUM_WARPS = 4
_NUM_STAGES = 1


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _write_kernel(
    key,
    value,
    kv_cache,
    slots,
    key_stride,
    value_stride,
    key_scale,
    value_scale,
    ROW_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    LARGEST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (token, chunk): some elements of one token's K and V, which lie side by side in its slot."""
    token = tl.program_id(0).to(tl.int64)
    elements = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    is_element = elements < ROW_SIZE
    slot = tl.load(slots + token)
    place = kv_cache + (slot // BLOCK_SIZE) * BLOCK_STRIDE + (slot % BLOCK_SIZE) * (2 * ROW_SIZE) + elements
    keys = tl.load(key + token * key_stride + elements, mask=is_element).to(tl.float32) / key_scale
    values = tl.load(value + token * value_stride + elements, mask=is_element).to(tl.float32) / value_scale
    if LARGEST > 0.0:
        keys = tl.clamp(keys, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        values = tl.clamp(values, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(place, keys.to(kv_cache.dtype.element_ty), mask=is_element)
    tl.store(place + ROW_SIZE, values.to(kv_cache.dtype.element_ty), mask=is_element)


@dataclass(frozen=True)
class CacheWriteConstants:
    """The kernel's ``tl.constexpr`` parameters. ``ROW_SIZE``: elements of one token's keys, all heads of them.

    ``LARGEST``: what larger numbers are cut to, where the cache's type cannot hold infinity; 0: nothing is cut.
    """

    ROW_SIZE: int
    BLOCK_SIZE: int
    BLOCK_STRIDE: int
    LARGEST: float
    CHUNK: int

    @classmethod
    def of(cls, row_size: int, block_size: int, block_stride: int, dtype: torch.dtype) -> CacheWriteConstants:
        largest = torch.finfo(dtype).max if dtype.itemsize == 1 else 0.0
        chunk = min(_LARGEST_CHUNK, triton.next_power_of_2(row_size))
        return cls(row_size, block_size, block_stride, largest, chunk)


def write_to_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Store row i of ``key`` and ``value``, divided by their scales, at slot ``slots[i]`` of ``kv_cache``.

    key, value: [num_tokens, num_kv_heads, head_dim], each row dense; kv_cache: [num_blocks, block_size, 2,
    num_kv_heads, head_dim] of any floating type, dense within a block; slots: int64 [num_tokens]. Numbers too large
    for an 8-bit cache become the largest it holds. Rows with the same slot, as padding has, leave any one of them.
    """
    _, block_size, _, num_kv_heads, head_dim = kv_cache.shape
    constants = CacheWriteConstants.of(num_kv_heads * head_dim, block_size, kv_cache.stride(0), kv_cache.dtype)
    grid = (key.shape[0], triton.cdiv(constants.ROW_SIZE, constants.CHUNK))
    _write_kernel[grid](
        key,
        value,
        kv_cache,
        slots,
        key.stride(0),
        value.stride(0),
        key_scale,
        value_scale,
        **asdict(constants),
        num_warps=_NUM_WARPS,
        num_stages=_NUM_STAGES,
    )


def cache_write_variant(cache_spec: KVCacheSpec, dtype: torch.dtype) -> KernelVariant:
    """What ``write_to_cache`` launches for keys and values of ``dtype``, whose rows are a multiple of 16 apart."""
    row_size = cache_spec.num_kv_heads * cache_spec.head_dim
    constants = CacheWriteConstants.of(row_size, cache_spec.block_size, cache_spec.stride()[0], cache_spec.dtype)
    arguments: dict[str, object] = {
        "key": dtype,
        "value": dtype,
        "kv_cache": cache_spec.dtype,
        "slots": torch.int64,
        "key_stride": row_size,
        "value_stride": row_size,
        "key_scale": 1.0,
        "value_scale": 1.0,
    }
    return KernelVariant("write_to_cache", _write_kernel, arguments, asdict(constants), _NUM_WARPS, _NUM_STAGES)
