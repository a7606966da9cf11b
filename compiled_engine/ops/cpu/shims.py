"""Giving the kernels' library the functions of torch that its shims call (see ``shims.cpp``)."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

TORCH_FUNCTIONS = (
    "get_data_ptr",
    "get_dim",
    "get_sizes",
    "get_strides",
    "get_dtype",
    "get_storage_size",
    "get_storage_offset",
    "empty_strided",
    "dtype_float32",
    "dtype_bfloat16",
    "dtype_float16",
    "device_type_cpu",
)
"""Of torch's stable C interface, each with ``aoti_torch_`` before it."""

_LIBRARIES = ("libtorch_cpu.so", "libtorch_cpu.dylib")


def connect_torch(library: ctypes.CDLL) -> None:
    """Hand ``library`` the addresses of ``TORCH_FUNCTIONS`` in the torch that this process has loaded."""
    folder = Path(torch.__file__).parent / "lib"
    path = next(folder / name for name in _LIBRARIES if (folder / name).is_file())
    loaded_torch = ctypes.CDLL(str(path))
    functions = (getattr(loaded_torch, f"aoti_torch_{name}") for name in TORCH_FUNCTIONS)
    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
    library.connect_torch((ctypes.c_void_p * len(addresses))(*addresses))
