"""Structures and numbers of NVIDIA's CUDA driver API, "Data types used by CUDA driver", as ``ctypes`` has them."""

from __future__ import annotations

import ctypes
from ctypes import c_size_t, c_uint, c_uint64, c_void_p
from enum import IntEnum


class NodeType(IntEnum):
    """``CUgraphNodeType``."""

    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2
    HOST = 3
    GRAPH = 4
    EMPTY = 5
    WAIT_EVENT = 6
    EVENT_RECORD = 7
    EXT_SEMAS_SIGNAL = 8
    EXT_SEMAS_WAIT = 9
    MEM_ALLOC = 10
    MEM_FREE = 11
    BATCH_MEM_OP = 12
    CONDITIONAL = 13


class MemoryType(IntEnum):
    """``CUmemorytype``."""

    HOST = 1
    DEVICE = 2
    ARRAY = 3
    UNIFIED = 4


class KernelNodeParams(ctypes.Structure):
    """``CUDA_KERNEL_NODE_PARAMS_v2``."""

    _fields_ = (
        ("func", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_mem_bytes", c_uint),
        ("kernel_params", c_void_p),
        ("extra", c_void_p),
        ("kern", c_void_p),
        ("ctx", c_void_p),
    )


class MemcpySide(ctypes.Structure):
    """One half of ``CUDA_MEMCPY3D_v2``: where a copy comes from or goes to."""

    _fields_ = (
        ("x_in_bytes", c_size_t),
        ("y", c_size_t),
        ("z", c_size_t),
        ("lod", c_size_t),
        ("memory_type", c_uint),
        ("host", c_void_p),
        ("device", c_uint64),
        ("array", c_void_p),
        ("reserved", c_void_p),
        ("pitch", c_size_t),
        ("height", c_size_t),
    )


class MemcpyParams(ctypes.Structure):
    """``CUDA_MEMCPY3D_v2``."""

    _fields_ = (
        ("source", MemcpySide),
        ("destination", MemcpySide),
        ("width_in_bytes", c_size_t),
        ("height", c_size_t),
        ("depth", c_size_t),
    )


class MemsetParams(ctypes.Structure):
    """``CUDA_MEMSET_NODE_PARAMS_v1``."""

    _fields_ = (
        ("destination", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("element_size", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    )
