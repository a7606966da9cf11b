"""The CPU's matrix product with packed weights, as a function of tensors."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import Any

import torch

from compiled_engine.ops.cpu.elements import ELEMENT_TYPES
from compiled_engine.ops.cpu.packing import can_gate, packed_shape

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS: list[Any] = [_POINTER, _SIZE, _SIZE, ctypes.c_int32, _POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _SIZE]


class Activation(IntEnum):
    """What is applied to the product after its bias.

    ``*_AND_MULTIPLY``: the first half of the columns, activated, times the second half.
    """

    NONE = 0
    GELU = 1
    GELU_TANH = 2
    SILU = 3
    SILU_AND_MULTIPLY = 4
    GELU_TANH_AND_MULTIPLY = 5
    GELU_AND_MULTIPLY = 6

    @property
    def gated(self) -> bool:
        """Whether the output has half the columns of the product."""
        return self >= Activation.SILU_AND_MULTIPLY


class PackedLinear:
    """``packed_linear`` of a library from ``load_kernels``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._function = library.packed_linear
        self._function.argtypes, self._function.restype = _ARGUMENTS, None

    def __call__(
        self,
        input: torch.Tensor,
        packed: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        activation: Activation = Activation.NONE,
    ) -> torch.Tensor:
        """``activation(input @ weight.T + bias) + residual`` in float32, rounded once to the input's dtype.

        input: float32, bfloat16 or float16 [..., in_features]; packed: from ``pack_into``; bias: [out_features];
        residual: like the output, [..., out_features], or half of that where the activation is gated. All have the
        input's dtype. Raises ``ValueError`` for tensors that do not fit together.

        A row of the result depends, bit for bit, on that row and the weight's numbers alone, however these are stored.
        Only the path ``avx512_bf16`` multiplies a bfloat16 input and parts stored as bfloat16 with an instruction that
        sums in an order of its own and takes subnormal numbers for zero.
        """
        out_features, in_features = packed_shape(packed)
        if input.dtype not in ELEMENT_TYPES or input.device.type != "cpu" or input.shape[-1:] != (in_features,):
            raise ValueError(
                f"the input must be a floating-point CPU tensor with {in_features} columns, not {input.dtype} "
                f"{list(input.shape)} on {input.device}"
            )
        columns = _out_columns(packed, out_features, activation)
        rows = _rows(input)
        out = input.new_empty(*input.shape[:-1], columns)
        if bias is not None:
            _check_like(bias, input, (out_features,), "bias")
            bias = bias.contiguous()
        if residual is not None:
            _check_like(residual, input, out.shape, "residual")
            residual = _rows(residual)
        self._function(
            rows.data_ptr(),
            rows.stride(0),
            rows.shape[0],
            ELEMENT_TYPES[input.dtype],
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            0 if residual is None else residual.stride(0),
            out.data_ptr(),
            activation,
        )
        return out


def _out_columns(packed: torch.Tensor, out_features: int, activation: Activation) -> int:
    if not activation.gated:
        return out_features
    if not can_gate(packed):
        raise ValueError(f"{activation.name} needs gate and up as parts of equal size of the packed weight")
    return out_features // 2


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """[..., n] as a matrix whose rows are dense, without a copy where there is such a view."""
    rows = tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _check_like(tensor: torch.Tensor, input: torch.Tensor, shape: tuple[int, ...], name: str) -> None:
    if tensor.dtype is not input.dtype or tensor.device != input.device or tensor.shape != shape:
        raise ValueError(
            f"the {name} must be {input.dtype} {list(shape)} on {input.device}, not {tensor.dtype} "
            f"{list(tensor.shape)} on {tensor.device}"
        )
