"""The C++ attention kernel as a function of tensors: checks, pointers and strides."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from compiled_engine.ops.attention import AttentionSpec
from compiled_engine.ops.cpu.elements import ELEMENT_SUFFIXES

_POINTER, _SIZE, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class AttentionLayer(ctypes.Structure):
    """What a layer computes, as ``attention.cpp`` reads it. Nothing about its cache, which may be bound anew."""

    _fields_ = [
        ("num_kv_heads", _SIZE),
        ("queries_per_kv", _SIZE),
        ("head_dim", _SIZE),
        ("sliding_window", _SIZE),
        ("scale", _REAL),
        ("soft_cap", _REAL),
    ]

    @classmethod
    def of(cls, spec: AttentionSpec) -> AttentionLayer:
        return cls(
            spec.num_kv_heads,
            spec.num_heads // spec.num_kv_heads,
            spec.head_dim,
            spec.sliding_window or 0,
            spec.scale,
            spec.soft_cap or 0.0,
        )


class AttentionStep(ctypes.Structure):
    """The requests of a step, as ``attention.cpp`` reads them: addresses of int32 arrays that somebody else keeps."""

    _fields_ = [
        ("query_start_loc", _POINTER),
        ("seq_lens", _POINTER),
        ("block_table", _POINTER),
        ("num_requests", _SIZE),
        ("max_blocks", _SIZE),
    ]


_ROWS = [_POINTER, _SIZE, _SIZE]
_NO_ROWS: tuple[int | None, int, int] = (None, 0, 0)
_ARGUMENTS = [ctypes.POINTER(AttentionLayer), ctypes.POINTER(AttentionStep), *_ROWS, *_ROWS, *_ROWS]
_ARGUMENTS += [_POINTER, _POINTER, _SIZE, _SIZE, _POINTER, _SIZE, _POINTER]


class AttentionKernel:
    """The kernel for queries and caches of one dtype, out of ``library`` (see ``load_kernels``)."""

    def __init__(self, dtype: torch.dtype, library: ctypes.CDLL) -> None:
        self.dtype = dtype
        self._function: Any = getattr(library, f"write_and_attend_{ELEMENT_SUFFIXES[dtype]}")
        self._function.argtypes, self._function.restype = _ARGUMENTS, None

    def __call__(
        self,
        layer: AttentionLayer,
        step: AttentionStep,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        out: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Store this step's K and V, unless they are None, then attend to all cached tokens of every request.

        query, out: [num_tokens, num_heads, head_dim], ``out`` dense; key, value: [num_tokens, num_kv_heads, head_dim].
        kv_cache: [num_blocks, block_size, 2, num_kv_heads, head_dim], dense within a block. slots: int64 [num_tokens].
        sinks: float32 [num_heads], one score per head that joins the softmax without a value.

        The cache's address and sizes are read from the tensor at every call, so none are ever remembered.
        Memory moved: every visible key and value once per 96 query rows (tokens times query heads of a KV head).
        A token's result depends, bit for bit, on its own request alone. Raises ``ValueError`` for queries of another
        dtype and for an ``out`` that is not dense.
        """
        if query.dtype is not self.dtype or out.dtype is not self.dtype or not out.is_contiguous():
            raise ValueError(
                f"attention of {self.dtype} needs queries and a dense out of that dtype, not {query.dtype} and "
                f"{out.dtype} with strides {tuple(out.stride())}"
            )
        query = _dense_rows(query)
        query_rows, query_heads, _ = query.stride()
        keys = values = _NO_ROWS
        if key is not None and value is not None:
            key, value = _dense_rows(key), _dense_rows(value)
            keys, values = _pointer_and_strides(key), _pointer_and_strides(value)
        self._function(
            layer,
            step,
            query.data_ptr(),
            query_rows,
            query_heads,
            *keys,
            *values,
            out.data_ptr(),
            kv_cache.data_ptr(),
            kv_cache.shape[1],
            kv_cache.stride(0),
            slots.data_ptr(),
            query.shape[0],
            None if sinks is None else sinks.data_ptr(),
        )


def _pointer_and_strides(rows: torch.Tensor) -> tuple[int | None, int, int]:
    row_stride, head_stride, _ = rows.stride()
    return rows.data_ptr(), row_stride, head_stride


def _dense_rows(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(2) == 1 else rows.contiguous()
