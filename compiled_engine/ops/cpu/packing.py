"""Weights in the packed layout that the CPU's matrix product streams (``packed_weight.h``)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from compiled_engine.ops.cpu.elements import ELEMENT_TYPES
from compiled_engine.ops.quantized_rows import QuantizedRows

WeightPart = torch.Tensor | QuantizedRows
"""Rows of a weight [num_rows, in_features]: float32, bfloat16 or float16 numbers, or quantised ones."""

ALIGNMENT = 64
_MAGIC = 0x32575043
_BLOCK_ROWS, _CODES_PER_WORD = 32, 8
_PART_BYTES = 64
_INT8, _INT4 = 3, 4

PACKED_HEAD_BYTES = 64
"""The header of a packed weight, and what a graph sees of one: the numbers follow in the same storage."""


class _PartSource(ctypes.Structure):
    """``PartSource`` of ``packing.cpp``."""

    _fields_ = (
        ("storage", ctypes.c_int32),
        ("scale_type", ctypes.c_int32),
        ("numbers", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("group_size", ctypes.c_int64),
    )


class _Header(ctypes.Structure):
    """``PackedHeader`` of ``packed_weight.h``."""

    _fields_ = (
        ("magic", ctypes.c_uint32),
        ("num_parts", ctypes.c_int32),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("num_bytes", ctypes.c_int64),
        ("halves_match", ctypes.c_int64),
    )


def packed_num_bytes(parts: Sequence[WeightPart]) -> int:
    """Bytes of the packed weight whose rows are those of ``parts``, one part after the other.

    Raises ``ValueError`` for parts that cannot be packed together.
    """
    check_parts(parts)
    in_features = parts[0].shape[1]
    return PACKED_HEAD_BYTES + sum(_PART_BYTES + _round_up(_data_bytes(part, in_features), ALIGNMENT) for part in parts)


def pack_into(parts: Sequence[WeightPart], out: torch.Tensor, library: ctypes.CDLL) -> None:
    """Write the packed weight to ``out`` uint8 [packed_num_bytes(parts)], aligned to ``ALIGNMENT`` bytes.

    library: from ``load_kernels``. Every thread of torch takes part. Raises ``ValueError`` for what cannot be packed.
    """
    num_bytes = packed_num_bytes(parts)
    if out.dtype is not torch.uint8 or out.device.type != "cpu" or out.dim() != 1 or not out.is_contiguous():
        raise ValueError(f"out must be a contiguous uint8 vector on the CPU, not {_describe(out)}")
    if out.numel() != num_bytes:
        raise ValueError(f"out has {out.numel()} bytes, and the packed weight {num_bytes}: see packed_num_bytes()")
    if out.data_ptr() % ALIGNMENT:
        raise ValueError(f"out begins at {out.data_ptr():#x}, which is no multiple of {ALIGNMENT}")
    dense = [_dense(part) for part in parts]
    sources = (_PartSource * len(dense))(*map(_source, dense))
    function = library.pack_weight
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
    function.restype = ctypes.c_int64
    needed = function(ctypes.addressof(sources), len(dense), parts[0].shape[1], out.data_ptr(), num_bytes)
    if needed != num_bytes:
        raise RuntimeError(f"packing.py and packing.cpp differ: {num_bytes} and {needed} bytes for one weight")


def unpack(packed: torch.Tensor, library: ctypes.CDLL) -> torch.Tensor:
    """The weight's numbers, float32 [out_features, in_features]. Raises ``ValueError`` if ``packed`` is none."""
    out = torch.empty(packed_shape(packed), dtype=torch.float32)
    function = library.unpack_weight
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p], None
    function(packed.data_ptr(), out.data_ptr())
    return out


def packed_shape(packed: torch.Tensor) -> tuple[int, int]:
    """(out_features, in_features) of a packed weight. Raises ``ValueError`` if ``packed`` is none."""
    header = _header(packed)
    return header.out_features, header.in_features


def packed_bytes(packed: torch.Tensor) -> int:
    """Bytes of a packed weight, of which ``packed`` may be the head alone. Raises ``ValueError`` if it is none."""
    return _header(packed).num_bytes


def _header(packed: torch.Tensor) -> _Header:
    if packed.dtype is not torch.uint8 or packed.device.type != "cpu" or not packed.is_contiguous():
        raise ValueError(f"a packed weight is a contiguous uint8 tensor on the CPU, not {_describe(packed)}")
    if packed.data_ptr() % ALIGNMENT or packed.numel() < PACKED_HEAD_BYTES:
        raise ValueError(f"a packed weight has at least {PACKED_HEAD_BYTES} bytes and is aligned to {ALIGNMENT}")
    header = _Header.from_address(packed.data_ptr())
    # The tensor may be a view of the head alone: what counts is that the storage has the rest.
    available = packed.untyped_storage().nbytes() - packed.storage_offset()
    if header.magic != _MAGIC or header.num_bytes > available:
        raise ValueError(f"these {packed.numel()} bytes are no packed weight: pack_into() makes one")
    return header


def can_gate(packed: torch.Tensor) -> bool:
    """Whether the first half of a packed weight's rows can be the gate of the second half: both are packed alike.

    So it is when gate and up are parts of their own, or one part whose half is a multiple of 32 rows.
    """
    packed_shape(packed)
    return bool(_Header.from_address(packed.data_ptr()).halves_match)


def check_parts(parts: Sequence[WeightPart]) -> None:
    """Raise ``ValueError`` unless ``parts`` can be packed into one weight."""
    if not parts:
        raise ValueError("a packed weight needs at least one part")
    for part in parts:
        if isinstance(part, QuantizedRows):
            _check_quantized(part)
        else:
            _check_dense(part)
        if part.shape[1] != parts[0].shape[1]:
            raise ValueError(
                f"parts of one weight have one number of inputs, not {parts[0].shape[1]} and {part.shape[1]}"
            )


def _check_dense(part: torch.Tensor) -> None:
    if part.dtype not in ELEMENT_TYPES or part.dim() != 2 or part.device.type != "cpu":
        raise ValueError(f"a part is a float32, bfloat16 or float16 matrix on the CPU, not {_describe(part)}")
    _check_not_empty(part)


def _check_quantized(part: QuantizedRows) -> None:
    codes = {4: torch.uint8, 8: torch.int8}.get(part.bits)
    if codes is None:
        raise ValueError(f"codes have 4 or 8 bits, not {part.bits}")
    if part.codes.dtype is not codes or part.codes.dim() != 2 or part.codes.device.type != "cpu":
        raise ValueError(f"codes of {part.bits} bits are a {codes} matrix on the CPU, not {_describe(part.codes)}")
    _check_not_empty(part.codes)
    rows, in_features = part.shape
    if part.scales.dim() != 2 or part.scales.shape[0] != rows or not part.scales.shape[1]:
        raise ValueError(f"scales have shape [{rows}, number of groups], not {list(part.scales.shape)}")
    if part.scales.dtype not in (torch.float32, torch.float16):
        raise ValueError(f"scales are float32 or float16, not {part.scales.dtype}")
    if in_features % part.scales.shape[1] or (part.scales.shape[1] > 1 and part.group_size % 16):
        raise ValueError(
            f"{in_features} inputs cannot be cut into {part.scales.shape[1]} groups: a group is all of a row, or a "
            "multiple of 16 that divides it"
        )
    if part.offsets is not None and (
        part.offsets.shape != part.scales.shape or part.offsets.dtype is not part.scales.dtype
    ):
        raise ValueError(f"offsets are like the scales, {_describe(part.scales)}, not {_describe(part.offsets)}")


def _check_not_empty(numbers: torch.Tensor) -> None:
    if not numbers.numel():
        raise ValueError(f"a part has rows and inputs, not shape {list(numbers.shape)}")


def _dense(part: WeightPart) -> WeightPart:
    """The part with numbers that lie side by side in a row; scales without gaps."""
    if not isinstance(part, QuantizedRows):
        return part if part.stride(1) == 1 else part.contiguous()
    offsets = None if part.offsets is None else part.offsets.contiguous()
    codes = part.codes if part.codes.stride(1) == 1 else part.codes.contiguous()
    return QuantizedRows(part.bits, codes, part.scales.contiguous(), offsets)


def _source(part: WeightPart) -> _PartSource:
    if not isinstance(part, QuantizedRows):
        return _PartSource(
            ELEMENT_TYPES[part.dtype], 0, part.data_ptr(), None, None, part.shape[0], part.stride(0), part.shape[1]
        )
    return _PartSource(
        _INT4 if part.bits == 4 else _INT8,
        ELEMENT_TYPES[part.scales.dtype],
        part.codes.data_ptr(),
        part.scales.data_ptr(),
        None if part.offsets is None else part.offsets.data_ptr(),
        part.shape[0],
        part.codes.stride(0),
        part.group_size,
    )


def _data_bytes(part: WeightPart, in_features: int) -> int:
    blocks = _round_up(part.shape[0], _BLOCK_ROWS) // _BLOCK_ROWS
    if not isinstance(part, QuantizedRows):
        even = _round_up(in_features, 2) if part.dtype is torch.bfloat16 else in_features
        return blocks * _BLOCK_ROWS * even * part.element_size()
    codes = part.group_size if part.bits == 8 else _round_up(part.group_size, _CODES_PER_WORD) // 2
    scales = part.scales.element_size() * (1 if part.offsets is None else 2)
    return blocks * _BLOCK_ROWS * part.scales.shape[1] * (codes + scales)


def _round_up(value: int, to: int) -> int:
    return -(-value // to) * to


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
