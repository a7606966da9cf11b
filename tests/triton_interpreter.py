"""Triton's interpreter (``TRITON_INTERPRET=1``, set before Triton is imported) with three of its faults mended.

It runs kernels as NumPy code on CPU tensors. As it is, loops cannot be bounded by tensors under NumPy 2.4, products of
bfloat16 are products of the bits read as integers, and conversions to narrow types cut digits instead of rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

_TORCH_TYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _convert_float(data: np.ndarray, source: Any, target: Any, rounding_mode: object) -> np.ndarray:
    """The bits of ``data`` as ``target``, rounded to nearest. What an e4m3 cannot hold is NaN: not all devices cut."""
    source_type, target_type = _TORCH_TYPES[source.name], _TORCH_TYPES[target.name]
    bits = torch.from_numpy(np.ascontiguousarray(data).view(f"i{source_type.itemsize}"))
    numbers = bits.view(_BITS[source_type.itemsize]).view(source_type)
    if target_type is torch.float8_e4m3fn:
        numbers = numbers.masked_fill(numbers.abs() > torch.finfo(target_type).max, float("nan"))
    converted = numbers.to(target_type)
    return converted.view(_BITS[target_type.itemsize]).numpy().view(f"u{target_type.itemsize}")


def _as_numbers(handle: Any) -> np.ndarray:
    """A tile that NumPy can calculate with: it has no bfloat16 and no 8-bit types."""
    if handle.dtype.scalar.name in ("fp32", "fp16"):
        return handle.data
    from triton import language

    return _convert_float(handle.data, handle.dtype.scalar, language.float32, None).view(np.float32)


@contextmanager
def mended_interpreter() -> Iterator[None]:
    """Inside, kernels run in the mended interpreter."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *precision: object) -> Any:
        product = np.matmul(_as_numbers(a), _as_numbers(b), dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang_tensor", patch_tensor_and_index)
        patch.setattr(interpreter, "_convert_float", _convert_float)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        yield


@contextmanager
def programs_in_reverse() -> Iterator[None]:
    """Inside, the interpreter runs the programs of a grid from last to first: on a device, any order is possible."""
    from triton.runtime import interpreter

    set_program = interpreter.InterpreterBuilder.set_grid_idx

    def set_opposite_program(builder: Any, *program: int) -> None:
        set_program(builder, *(size - 1 - index for size, index in zip(builder.grid_dim, program, strict=True)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "set_grid_idx", set_opposite_program)
        yield
