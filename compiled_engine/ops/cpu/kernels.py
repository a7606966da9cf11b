"""The C++ kernels as functions of tensors: checks, pointers and strides."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

from compiled_engine.ops.attention import AttentionSpec
from compiled_engine.ops.cpu.build import load_kernels

_POINTER, _SIZE, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_DECODE = [_POINTER, _SIZE, _SIZE, _POINTER, _POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _SIZE, _POINTER, _SIZE]
_DECODE += [_REAL, _REAL, _SIZE, _SIZE, _SIZE, _SIZE]
_WRITE = [_POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _SIZE, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE]


class CpuKernels:
    """The kernels for caches of one dtype, out of ``folder`` (see ``load_kernels``, also for what is raised)."""

    def __init__(self, dtype: torch.dtype, folder: Path | None) -> None:
        library = load_kernels(folder)
        self._decode_attention = _function(library, f"decode_attention_{_SUFFIXES[dtype]}", _DECODE)
        self._write_kv = _function(library, f"write_kv_{_SUFFIXES[dtype]}", _WRITE)

    def decode_attention(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        rows: torch.Tensor,
        requests: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attention of requests with one new token each, straight from the paged cache.

        query, out: [num_tokens, num_heads, head_dim], ``out`` contiguous; kv_cache: [num_blocks, block_size, 2,
        num_kv_heads, head_dim], contiguous. rows, requests: int32 [n], the token rows to compute and their rows in
        ``block_table`` int32 [num_requests, max_blocks] and ``seq_lens`` int32 [num_requests].
        Memory moved: every visible key and value once.
        """
        query = _dense_rows(query)
        _, block_size, _, num_kv_heads, head_dim = kv_cache.shape
        self._decode_attention(
            query.data_ptr(),
            query.stride(0),
            query.stride(1),
            out.data_ptr(),
            kv_cache.data_ptr(),
            rows.data_ptr(),
            requests.data_ptr(),
            rows.shape[0],
            block_table.data_ptr(),
            block_table.shape[1],
            seq_lens.data_ptr(),
            spec.sliding_window or 0,
            spec.scale,
            spec.soft_cap or 0.0,
            block_size,
            num_kv_heads,
            spec.num_heads // num_kv_heads,
            head_dim,
        )

    def write_kv(self, kv_cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Store key and value [num_tokens, num_kv_heads, head_dim] at ``slots`` int64 [num_tokens]."""
        key, value = _dense_rows(key), _dense_rows(value)
        self._write_kv(
            key.data_ptr(),
            value.data_ptr(),
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            kv_cache.data_ptr(),
            slots.data_ptr(),
            slots.shape[0],
            kv_cache.shape[3],
            kv_cache.shape[4],
        )


def _function(library: ctypes.CDLL, name: str, arguments: list[Any]) -> Any:
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, None
    return function


def _dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()
