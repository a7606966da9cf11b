"""Sampling of a step's rows by the C++ kernel: ``ops/sampling.py`` says what is computed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from compiled_engine.ops.cpu.elements import ELEMENT_SUFFIXES
from compiled_engine.ops.sampling import SampledTokens, SamplingBatch, check_shape, no_choice_error

_INT64S, _FLOATS = ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_float)


class _SamplingRows(ctypes.Structure):
    """``SamplingRows`` of sampling.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_rows", "vocab_size", "row_stride", "max_logprobs")),
        *((name, ctypes.c_void_p) for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")),
        *((name, _INT64S) for name in ("forbidden_ids", "forbidden_starts", "num_logprobs", "token_ids")),
        *((name, _FLOATS) for name in ("maxima", "token_logprobs")),
        ("top_ids", _INT64S),
        ("top_logprobs", _FLOATS),
    ]


class CpuSampler:
    """Samples with the kernels of ``library`` (see ``load_kernels``)."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions: dict[torch.dtype, Any] = {}
        for dtype, suffix in ELEMENT_SUFFIXES.items():
            function = getattr(library, f"sample_rows_{suffix}")
            function.argtypes = [ctypes.c_void_p, ctypes.POINTER(_SamplingRows)]
            function.restype = ctypes.c_int64
            self._functions[dtype] = function

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
        """What ``ops.sampling.sample`` computes, for ``logits`` [n, vocab_size] on the CPU.

        Greedy tokens and what ``min_p`` and ``top_k`` keep are the same. The two round differently in exp and in sums,
        to a few units of float32: a random token may differ where the row's uniform number is that near to the edge of
        a token's share, or where ``top_p`` is that near to the mass of the tokens it keeps.

        Raises ``LogitsError`` as ``sample`` does. ``batch.forbidden_token_ids`` outside the vocabulary are ignored.
        """
        num_rows = len(batch.num_logprobs)
        check_shape(logits, num_rows)
        vocab_size = logits.shape[1]
        if num_rows == 0:
            return SampledTokens((), ())
        if logits.dtype not in self._functions:
            logits = logits.float()
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        columns = [tensor.to(dtype).contiguous() for tensor, dtype in _columns(batch)]
        max_logprobs = min(max(0, *batch.num_logprobs), vocab_size)
        forbidden = [token_id for ids in batch.forbidden_token_ids for token_id in sorted(ids)]
        rows = _SamplingRows(
            num_rows,
            vocab_size,
            logits.stride(0),
            max_logprobs,
            *(column.data_ptr() for column in columns),
            _int64s(forbidden),
            _int64s([*accumulate(map(len, batch.forbidden_token_ids), initial=0)]),
            _int64s(batch.num_logprobs),
            (ctypes.c_int64 * num_rows)(),
            (ctypes.c_float * num_rows)(),
            (ctypes.c_float * num_rows)(),
            (ctypes.c_int64 * (num_rows * max_logprobs))(),
            (ctypes.c_float * (num_rows * max_logprobs))(),
        )
        bad_row = self._functions[logits.dtype](logits.data_ptr(), rows)
        if bad_row >= 0:
            raise no_choice_error(bad_row, rows.maxima[bad_row])
        return SampledTokens(tuple(rows.token_ids[:num_rows]), tuple(map(partial(_logprobs, rows), range(num_rows))))


def _columns(batch: SamplingBatch) -> tuple[tuple[torch.Tensor, torch.dtype], ...]:
    """The tensors of ``batch`` in the order of ``_SamplingRows``."""
    return (
        (batch.temperature, torch.float32),
        (batch.top_k, torch.int64),
        (batch.top_p, torch.float32),
        (batch.min_p, torch.float32),
        (batch.seeds, torch.int64),
        (batch.positions, torch.int64),
    )


def _int64s(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def _logprobs(rows: _SamplingRows, row: int) -> dict[int, float] | None:
    """Of one row, what the kernel wrote: the sampled token first, then the most likely ones."""
    count = min(rows.num_logprobs[row], rows.vocab_size)
    if count < 0:
        return None
    entry = {rows.token_ids[row]: rows.token_logprobs[row]}
    first = row * rows.max_logprobs
    for index in range(first, first + count):
        entry.setdefault(rows.top_ids[index], rows.top_logprobs[index])
    return entry
