"""Sampling of a step's rows by a Triton kernel, fit for a CUDA graph: ``ops/sampling.py`` says what is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton

from compiled_engine.errors import LogitsError
from compiled_engine.ops.sampling import check_shape
from compiled_engine.ops.triton.sampling_kernel import sample_kernel
from compiled_engine.ops.triton.variants import KernelVariant

# Lanes of a program: tokens that one round of a loop looks at.
_TILE = 4096
# Candidates of a row that the workspace has place for.
_CAPACITY = 16384
_NUM_WARPS = 16
_NUM_STAGES = 2
# The kernel's sums of weights, each up to 2^42, must fit int64.
_LARGEST_VOCAB = 1 << 20
# Low bits that are the same in all float32 that come from the type.
_CONSTANT_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


@dataclass(frozen=True)
class SamplingBuffers:
    """Sampling parameters of a step's rows on the device, where a captured launch reads them: see ``SamplingBatch``.

    temperature, top_p, min_p: float32 [max_rows].   top_k, seeds, positions: int64 [max_rows]. All contiguous.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor


class TritonSampler:
    """Samples up to ``max_rows`` rows of ``vocab_size`` logits on ``device``.

    ``row_stride``: elements from one row of logits to the next; None: rows without gaps. ``tile`` (a power of two) and
    ``capacity`` are settings of the kernel: tokens per round and candidates per row; the workspace takes at most
    ``4 * max_rows * max(tile, capacity)`` bytes. Raises ``LogitsError`` for a vocabulary of none or above 2^20.
    """

    def __init__(
        self,
        vocab_size: int,
        max_rows: int,
        device: torch.device,
        *,
        row_stride: int | None = None,
        tile: int = _TILE,
        capacity: int = _CAPACITY,
    ) -> None:
        if not 0 < vocab_size <= _LARGEST_VOCAB:
            raise LogitsError(f"vocab_size={vocab_size}, but the sampling kernel takes 1 to {_LARGEST_VOCAB}")
        self._constants = _constants(vocab_size, row_stride, tile, capacity)
        shape = (max_rows, self._constants["CAPACITY"])
        self._candidates = torch.empty(shape, dtype=torch.int32, device=device)

    def launch(
        self, logits: torch.Tensor, parameters: SamplingBuffers, token_ids: torch.Tensor, maxima: torch.Tensor
    ) -> None:
        """Writes a token id per row of ``logits``; launches one kernel, allocates nothing and waits for nothing.

        logits: float32, bfloat16 or float16 [n, vocab_size], n at most ``max_rows``, 16-byte aligned.
        token_ids: int64 [>= n], written.   maxima: float32 [>= n], written: each row's largest logit. Where that is not
            finite (NaN wins over all) no token could be chosen, the row's id is 0, and the caller raises
            ``ops.sampling.no_choice_error``.

        Tokens are those of ``ops.sampling.sample``. Greedy ones and what ``min_p`` and ``top_k`` keep are the same; the
        two round differently in exp and in sums, to a few units of float32, so that a random token may differ where the
        row's uniform number or ``top_p`` is that near to an edge. Raises ``LogitsError`` for other shapes or strides.
        """
        num_rows = len(logits)
        check_shape(logits, min(num_rows, len(self._candidates)))
        layout, expected = (logits.shape[1], logits.stride(1)), (self._constants["VOCAB_SIZE"], 1)
        has_stride = num_rows == 1 or logits.stride(0) == self._constants["ROW_STRIDE"]
        if layout != expected or not has_stride:
            raise LogitsError(
                f"logits have shape {list(logits.shape)} and strides {logits.stride()}, expected {expected[0]} tokens "
                f"and strides ({self._constants['ROW_STRIDE']}, 1)"
            )
        sample_kernel[(num_rows,)](
            logits,
            parameters.temperature,
            parameters.top_k,
            parameters.top_p,
            parameters.min_p,
            parameters.seeds,
            parameters.positions,
            self._candidates,
            token_ids,
            maxima,
            **self._constants,
            CONSTANT_BITS=_CONSTANT_BITS[logits.dtype],
            num_warps=_NUM_WARPS,
            num_stages=_NUM_STAGES,
        )

    def workspaces(self) -> dict[str, torch.Tensor]:
        """The device tensors that a captured launch refers to, besides its arguments."""
        return {"sampling_candidates": self._candidates}


def sampling_variants(
    vocab_size: int, dtypes: Sequence[torch.dtype], row_stride: int | None = None
) -> tuple[KernelVariant, ...]:
    """The kernels that ``TritonSampler(vocab_size, ...)`` launches for logits of ``dtypes``.

    ``row_stride``: elements from one row of logits to the next; None: rows without gaps.
    """
    constants = _constants(vocab_size, row_stride, _TILE, _CAPACITY)
    return tuple(
        KernelVariant(
            name=f"sample_{str(dtype).removeprefix('torch.')}_vocab{vocab_size}",
            kernel=sample_kernel,
            arguments={
                "logits": dtype,
                "temperature": torch.float32,
                "top_k": torch.int64,
                "top_p": torch.float32,
                "min_p": torch.float32,
                "seeds": torch.int64,
                "positions": torch.int64,
                "candidates": torch.int32,
                "token_ids": torch.int64,
                "maxima": torch.float32,
            },
            constants={**constants, "CONSTANT_BITS": _CONSTANT_BITS[dtype]},
            num_warps=_NUM_WARPS,
            num_stages=_NUM_STAGES,
        )
        for dtype in dtypes
    )


def _constants(vocab_size: int, row_stride: int | None, tile: int, capacity: int) -> dict[str, int]:
    """The constants of the kernel but for the one that the logits' type gives."""
    tile = min(tile, triton.next_power_of_2(vocab_size))
    return {
        "VOCAB_SIZE": vocab_size,
        "ROW_STRIDE": vocab_size if row_stride is None else row_stride,
        "TILE": tile,
        # The largest of each lane are written there before the candidates.
        "CAPACITY": max(tile, min(capacity, vocab_size)),
    }
