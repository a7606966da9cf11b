"""Matrix products with weights that are packed once, when they are loaded.

On CPU a weight reaches the op as the head of a packed buffer (see ``cpu/packing.py``): the buffer says how its numbers
are stored, so one graph serves float and quantised weights alike.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from compiled_engine.errors import KernelBuildError
from compiled_engine.ops.cpu.elements import ELEMENT_TYPES
from compiled_engine.ops.cpu.linear import Activation, PackedLinear
from compiled_engine.ops.cpu.packing import PACKED_HEAD_BYTES, WeightPart, pack_into
from compiled_engine.ops.library import LIBRARY

C_SHIM = (
    "AOTITorchError aoti_torch_cpu_packed_linear(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle*, "
    "AtenTensorHandle*, int64_t, int64_t, AtenTensorHandle*)"
)
"""What a piece compiled ahead of time calls instead of the op, without Python: see ``cpu/shims.cpp``."""


def can_pack(device: torch.device, dtype: torch.dtype = torch.float32) -> bool:
    """Whether there are kernels over packed weights for arithmetic of ``dtype`` on this device."""
    return device.type == "cpu" and dtype in ELEMENT_TYPES


def pack_weight(parts: Sequence[WeightPart], out: torch.Tensor) -> torch.Tensor:
    """Pack the rows of ``parts`` into ``out`` (see ``pack_into``) and return its head, which is what graphs take.

    Needs loaded kernels (``cpu.build.load_kernels``); raises ``KernelBuildError`` without.
    """
    pack_into(parts, out, _loaded_kernels())
    return out[:PACKED_HEAD_BYTES]


def _loaded_kernels() -> ctypes.CDLL:
    """The kernels by the names that loading them has made global, as compiled pieces find them too."""
    names = ctypes.CDLL(None)
    if not hasattr(names, "packed_linear"):
        raise KernelBuildError("the CPU kernels are not loaded: compiled_engine.ops.cpu.build.load_kernels does it")
    return names


def _packed_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out_features: int,
    activation: int,
) -> torch.Tensor:
    return PackedLinear(_loaded_kernels())(input, weight, bias, residual, Activation(activation))


def _shape_only(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out_features: int,
    activation: int,
) -> torch.Tensor:
    return input.new_empty(*input.shape[:-1], out_features)


LIBRARY.impl("packed_linear", _packed_linear, "CPU")
LIBRARY._register_fake("packed_linear", _shape_only)
