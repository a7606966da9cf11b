"""Weights of every storage for the tests of packing and of the matrix product."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from compiled_engine.ops.cpu.build import load_kernels
from compiled_engine.ops.cpu.instructions import runnable_paths
from compiled_engine.ops.cpu.packing import ALIGNMENT, WeightPart, pack_into, packed_num_bytes
from compiled_engine.ops.quantized_rows import QuantizedRows
from kernel_folder import KERNELS

PATHS = [path.name for path in runnable_paths()]
DENSE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STORAGES = [*DENSE, "int8", "int4", "int8 with offsets", "int4 with offsets"]


def library(path: str) -> ctypes.CDLL:
    """The kernels of one instruction path."""
    return load_kernels(KERNELS, path)


def random_part(
    rows: int, in_features: int, storage: str, group_size: int | None = None, scale_dtype: torch.dtype = torch.float16
) -> WeightPart:
    """Random numbers of about 1. group_size None: one group per row."""
    if storage in DENSE:
        return torch.randn(rows, in_features).to(DENSE[storage])
    bits = 8 if storage.startswith("int8") else 4
    low, high, dtype = (-128, 128, torch.int8) if bits == 8 else (0, 16, torch.uint8)
    codes = torch.randint(low, high, (rows, in_features), dtype=dtype)
    num_groups = in_features // (group_size or in_features)
    scales = (torch.randn(rows, num_groups) / (high - low) * 4).to(scale_dtype)
    offsets = torch.randn(rows, num_groups).to(scale_dtype) if storage.endswith("offsets") else None
    return QuantizedRows(bits, codes, scales, offsets)


def numbers(parts: Sequence[WeightPart]) -> torch.Tensor:
    """The weight that parts make, float32 [out_features, in_features]."""
    return torch.cat([part.dequantize() if isinstance(part, QuantizedRows) else part.float() for part in parts])


def magnitudes(parts: Sequence[WeightPart]) -> torch.Tensor:
    """The most that the terms of the weight's numbers add up to where scales and offsets are applied one by one."""
    return torch.cat([_magnitudes(part) if isinstance(part, QuantizedRows) else part.float().abs() for part in parts])


def _magnitudes(part: QuantizedRows) -> torch.Tensor:
    center = 8.0 if part.bits == 4 else 0.0
    repeats = part.shape[1] // part.scales.shape[1]
    scales = part.scales.float().repeat_interleave(repeats, dim=1)
    scaled = (part.codes.float() - center).abs() * scales.abs()
    if part.offsets is None:
        return scaled
    return scaled + (part.offsets.float().repeat_interleave(repeats, dim=1) + center * scales).abs()


def aligned_bytes(count: int) -> torch.Tensor:
    """Bytes of 0xa5, aligned for a packed weight."""
    buffer = torch.full((count + ALIGNMENT,), 0xA5, dtype=torch.uint8)
    start = -buffer.data_ptr() % ALIGNMENT
    return buffer[start : start + count]


def pack(parts: Sequence[WeightPart], kernels: ctypes.CDLL) -> torch.Tensor:
    """The packed weight."""
    packed = aligned_bytes(packed_num_bytes(parts))
    pack_into(parts, packed, kernels)
    return packed
