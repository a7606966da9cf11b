"""Arithmetic type and longest sequence: what the user asked for against what model and machine offer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from compiled_engine.errors import ConfigError
from compiled_engine.models.checkpoint import Checkpoint
from compiled_engine.models.locate import ModelFiles
from compiled_engine.ops.cpu.instructions import cpu_flags

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}


def resolve_dtype(requested: str, files: ModelFiles, device_type: str = "cpu") -> torch.dtype:
    """The arithmetic type that ``requested`` means on ``device_type``: cpu, cuda or tpu.

    ``auto`` is bfloat16 on a GPU and a TPU. Elsewhere it is float32, except for a checkpoint of 16-bit floats and a CPU
    with bf16 instructions, where it is bfloat16.
    Raises ``ConfigError`` for an unknown name.
    """
    if requested in _DTYPES:
        return _DTYPES[requested]
    if requested != "auto":
        raise ConfigError(f"dtype is {requested!r}: choose one of auto, {', '.join(_DTYPES)}")
    if device_type in ("cuda", "tpu"):
        return torch.bfloat16
    with Checkpoint(files) as checkpoint:
        stored = checkpoint.dtype
    sixteen_bits = stored in (torch.bfloat16, torch.float16)
    return torch.bfloat16 if sixteen_bits and cpu_has_bf16() else torch.float32


def cpu_has_bf16(cpuinfo: Path | None = None) -> bool:
    """Whether the CPU multiplies bfloat16 in hardware (AVX512-BF16, AMX, Arm BF16), by what the kernel says."""
    # No flags outside Linux: float32 is always right.
    return not _BF16_FLAGS.isdisjoint(cpu_flags(cpuinfo))


def max_positions(config: PretrainedConfig) -> int | None:
    """The positions that the model was made for; None when its config names no limit."""
    limit = getattr(config, "max_position_embeddings", None)
    return int(limit) if limit else None


def resolve_max_model_len(limit: int | None, requested: int | None) -> int:
    """Most tokens of one sequence: ``requested``, or the model's own ``limit`` (a definition's ``max_position``).

    Raises ``ConfigError`` when ``requested`` exceeds that limit, or when there is neither.
    """
    if requested is None and limit is None:
        raise ConfigError("the model's config names no longest sequence: set max_model_len")
    if requested is not None and limit is not None and requested > limit:
        raise ConfigError(f"max_model_len is {requested}, but the model has {limit} positions: ask for at most {limit}")
    return requested if requested is not None else int(limit or 0)
