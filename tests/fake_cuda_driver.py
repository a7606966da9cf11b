"""A stand-in for the CUDA driver's calls that read graphs.

It is called through C function pointers like the driver, and fills in memory that it is given. Structures are written
byte by byte, at the offsets that a C compiler gives the fields in ``cuda.h`` of CUDA 13.0 on a machine of 64 bits.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from ctypes import CFUNCTYPE, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass, field
from typing import Any

INVALID_VALUE, INVALID_HANDLE = 1, 400
HOST, DEVICE, ARRAY, UNIFIED = 1, 2, 3, 4


@dataclass
class FakeKernel:
    """``layout``: offset and size of each parameter; None: asking for it fails."""

    name: bytes
    layout: Sequence[tuple[int, int]] | None
    is_loaded: bool = True


@dataclass
class FakeNode:
    """``type``: a ``CUgraphNodeType``. ``params``: what the call for this type writes, ``child``: a graph inside."""

    type: int
    params: bytes = b""
    child: int = 0


@dataclass
class FakeCudaDriver:
    """``allocations``: start and size of each. ``captures``: the graph that a stream captures into.

    ``capture_status``: of every such stream, 2 after an error. ``without``: names of calls that are missing.
    """

    allocations: list[tuple[int, int]] = field(default_factory=list)
    captures: dict[int, int] = field(default_factory=dict)
    capture_status: int = 1
    without: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self._objects: dict[int, Any] = {}
        self._alive: list[Any] = []
        words: Mapping[str, tuple[Callable[..., int], tuple[Any, ...]]] = {
            "cuGetErrorName": (self._error_name, (c_int, c_void_p)),
            "cuGraphGetNodes": (self._nodes, (c_void_p,) * 3),
            "cuGraphNodeGetType": (self._type, (c_void_p,) * 2),
            "cuGraphKernelNodeGetParams_v2": (self._params_of(0), (c_void_p,) * 2),
            "cuGraphMemcpyNodeGetParams": (self._params_of(1), (c_void_p,) * 2),
            "cuGraphMemsetNodeGetParams": (self._params_of(2), (c_void_p,) * 2),
            "cuGraphChildGraphNodeGetGraph": (self._child, (c_void_p,) * 2),
            "cuFuncGetName": (self._name_of(True), (c_void_p,) * 2),
            "cuFuncGetParamInfo": (self._info_of(True), (c_void_p, c_size_t, c_void_p, c_void_p)),
            "cuKernelGetName": (self._name_of(False), (c_void_p,) * 2),
            "cuKernelGetParamInfo": (self._info_of(False), (c_void_p, c_size_t, c_void_p, c_void_p)),
            "cuMemGetAddressRange_v2": (self._range, (c_void_p, c_void_p, c_uint64)),
            "cuStreamGetCaptureInfo_v2": (self._capture_info, (c_void_p,) * 6),
        }
        for name, (function, arguments) in words.items():
            if name not in self.without:
                setattr(self, name, CFUNCTYPE(c_int, *arguments)(_never_raising(function)))

    def graph(self, *nodes: int) -> int:
        """The handle of a new graph with ``nodes``."""
        return self._handle(list(nodes))

    def add(self, graph: int, node: int) -> None:
        """Put one more node at the end of ``graph``."""
        self._objects[graph].append(node)

    def kernel(
        self,
        name: str,
        *arguments: bytes,
        offsets: Sequence[int] | None = None,
        form: str = "parameters",
        is_loaded: bool = True,
    ) -> int:
        """A node that launches ``name``. ``offsets``: of the arguments on the device; None: each aligned to 8.

        ``form``: how the node keeps its arguments: "parameters", "extra", or "nothing".
        """
        if offsets is None:
            offsets, end = [], 0
            for argument in arguments:
                offsets.append(end)
                end += -(-len(argument) // 8) * 8
        layout = list(zip(offsets, map(len, arguments), strict=True))
        kernel = self._handle(FakeKernel(name.encode(), layout, is_loaded))
        parameters = extra = 0
        if form == "parameters":
            # Each argument lies in memory of its own, in no order, with other bytes around it.
            places = [self.keep(b"\xee" * 3 + argument + b"\xee" * 8) + 3 for argument in reversed(arguments)]
            parameters = self.keep(struct.pack(f"<{len(places)}Q", *reversed(places)) + b"\xee" * 8)
        elif form == "extra":
            packed = bytearray(b"\xee" * max([offset + size for offset, size in layout], default=0))
            for argument, (offset, size) in zip(arguments, layout, strict=True):
                packed[offset : offset + size] = argument
            size = self.keep(struct.pack("<Q", len(packed)))
            extra = self.keep(struct.pack("<5Q", 2, size, 1, self.keep(bytes(packed)), 0))
        return self.kernel_node(kernel, parameters, extra, is_loaded)

    def kernel_node(self, kernel: int, parameters: int, extra: int, is_loaded: bool = True) -> int:
        """A node of ``kernel`` whose arguments are at these addresses."""
        params = bytearray(72)
        struct.pack_into("<Q", params, 0 if is_loaded else 56, kernel)
        struct.pack_into("<7I", params, 8, 4, 1, 1, 128, 1, 1, 0)
        struct.pack_into("<QQ", params, 40, parameters, extra)
        return self._handle(FakeNode(0, bytes(params)))

    def copy(self, source: Mapping[str, int], destination: Mapping[str, int]) -> int:
        """A node that copies. Fields of either side: type, host, device, x, y, z, pitch, height."""
        params = bytearray(200)
        for start, side in ((0, source), (88, destination)):
            for name, place in {"x": 0, "y": 8, "z": 16, "host": 40, "device": 48, "pitch": 72, "height": 80}.items():
                struct.pack_into("<Q", params, start + place, side.get(name, 0))
            struct.pack_into("<I", params, start + 32, side["type"])
        struct.pack_into("<3Q", params, 176, 64, 1, 1)
        return self._handle(FakeNode(1, bytes(params)))

    def fill(self, address: int) -> int:
        """A node that fills memory."""
        return self._handle(FakeNode(2, struct.pack("<QQIIQQ", address, 0, 0, 4, 16, 1)))

    def child(self, graph: int) -> int:
        """A node that runs another graph."""
        return self._handle(FakeNode(4, child=graph))

    def other(self, kind: int) -> int:
        """A node of the type ``kind``, of which nothing can be asked."""
        return self._handle(FakeNode(kind))

    def keep(self, data: bytes) -> int:
        """The address of ``data`` in memory that stays as long as this driver."""
        self._alive.append(ctypes.create_string_buffer(data, max(1, len(data))))
        return ctypes.addressof(self._alive[-1])

    def new_kernel(self, name: str, layout: Sequence[tuple[int, int]] | None) -> int:
        """The handle of a kernel, to be launched by ``kernel_node``."""
        return self._handle(FakeKernel(name.encode(), layout))

    def _handle(self, thing: Any) -> int:
        handle = 0xAB00_0000_0000 + 16 * len(self._objects)
        self._objects[handle] = thing
        return handle

    def _node(self, handle: int, kind: int) -> FakeNode:
        node = self._objects[handle]
        if not isinstance(node, FakeNode) or node.type != kind:
            raise KeyError(handle)
        return node

    def _nodes(self, graph: int, nodes: int | None, count: int) -> int:
        handles = self._objects[graph]
        room = c_size_t.from_address(count)
        if nodes:
            written = min(room.value, len(handles))
            _write(nodes, struct.pack(f"<{written}Q", *handles[:written]) + bytes(8 * (room.value - written)))
            room.value = written
        else:
            room.value = len(handles)
        return 0

    def _type(self, node: int, kind: int) -> int:
        _write(kind, struct.pack("<I", self._objects[node].type))
        return 0

    def _params_of(self, kind: int) -> Callable[[int, int], int]:
        def params(node: int, place: int) -> int:
            _write(place, self._node(node, kind).params)
            return 0

        return params

    def _child(self, node: int, graph: int) -> int:
        _write(graph, struct.pack("<Q", self._node(node, 4).child))
        return 0

    def _kernel(self, handle: int, is_loaded: bool) -> FakeKernel:
        kernel = self._objects[handle]
        if kernel.is_loaded is not is_loaded:
            raise KeyError(handle)
        return kernel

    def _name_of(self, is_loaded: bool) -> Callable[[int, int], int]:
        def name(place: int, kernel: int) -> int:
            _write(place, struct.pack("<Q", self.keep(self._kernel(kernel, is_loaded).name + b"\0")))
            return 0

        return name

    def _info_of(self, is_loaded: bool) -> Callable[[int, int, int, int], int]:
        def info(kernel: int, index: int, offset: int, size: int) -> int:
            layout = self._kernel(kernel, is_loaded).layout
            if layout is None:
                return INVALID_HANDLE
            if index >= len(layout):
                return INVALID_VALUE
            _write(offset, struct.pack("<Q", layout[index][0]))
            _write(size, struct.pack("<Q", layout[index][1]))
            return 0

        return info

    def _range(self, base: int, size: int, address: int) -> int:
        for start, num_bytes in self.allocations:
            if start <= address < start + num_bytes:
                _write(base, struct.pack("<Q", start))
                _write(size, struct.pack("<Q", num_bytes))
                return 0
        # Nothing that was written by a call that fails may be used.
        _write(size, struct.pack("<Q", 2**63))
        return INVALID_VALUE

    def _capture_info(self, stream: int, status: int, identifier: int, graph: int, *rest: int | None) -> int:
        if any(rest):
            return INVALID_VALUE
        captured = self.captures.get(stream or 0)
        _write(status, struct.pack("<I", 0 if captured is None else self.capture_status))
        if captured is not None:
            _write(identifier, struct.pack("<Q", 1))
            _write(graph, struct.pack("<Q", captured))
        return 0

    def _error_name(self, code: int, place: int) -> int:
        _write(place, struct.pack("<Q", self.keep({400: b"CUDA_ERROR_INVALID_HANDLE"}.get(code, b"OTHER") + b"\0")))
        return 0


def _write(place: int, data: bytes) -> None:
    ctypes.memmove(place, data, len(data))


def _never_raising(function: Callable[..., int]) -> Callable[..., int]:
    """What raises in a C callback is lost: the caller is told that a handle is wrong."""

    def call(*arguments: Any) -> int:
        try:
            return function(*arguments)
        except KeyError:
            return INVALID_HANDLE

    return call
