"""The nodes of a CUDA graph and their arguments, asked from the driver.

Structures and calls are those of NVIDIA's CUDA driver API, "Graph Management" and "Execution Control". The sizes of
kernel parameters can be asked for since CUDA 12.4 (``cuFuncGetParamInfo``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from ctypes import c_char_p, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, Protocol

from compiled_engine.errors import CompiledEngineError
from compiled_engine_debug.cuda_bindings.parameters import Parameter
from compiled_engine_debug.cuda_bindings.structures import (
    KernelNodeParams,
    MemcpyParams,
    MemcpySide,
    MemoryType,
    MemsetParams,
    NodeType,
)

LIBRARY = "libcuda.so.1"

_SUCCESS, _INVALID_VALUE = 0, 1
# No kernel takes more: parameters end after 32764 bytes.
_MOST_PARAMETERS = 32764
# Names of the values in a launch's "extra" list.
_EXTRA_END, _EXTRA_BUFFER, _EXTRA_SIZE = 0, 1, 2
_CAPTURE_ACTIVE = 1
# They use no memory but that of the graph itself.
_WITHOUT_MEMORY = frozenset(
    {NodeType.EMPTY, NodeType.WAIT_EVENT, NodeType.EVENT_RECORD, NodeType.MEM_ALLOC, NodeType.MEM_FREE}
)


class DriverUnavailable(CompiledEngineError):
    """There is no driver here, or it is too old to tell what is asked."""


class DriverError(CompiledEngineError):
    """A call of the driver failed."""


class DriverLibrary(Protocol):
    """The driver's calls by their C names: those of ``_SIGNATURES``, each of which returns a ``CUresult``.

    ``ctypes.CDLL`` of the driver is one.
    """

    def __getattr__(self, name: str) -> Any: ...


# An address of something that the call fills in is given as a plain address.
_SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "cuGetErrorName": (c_int, c_void_p),
    "cuGraphGetNodes": (c_void_p, c_void_p, c_void_p),
    "cuGraphNodeGetType": (c_void_p, c_void_p),
    "cuGraphKernelNodeGetParams_v2": (c_void_p, c_void_p),
    "cuGraphMemcpyNodeGetParams": (c_void_p, c_void_p),
    "cuGraphMemsetNodeGetParams": (c_void_p, c_void_p),
    "cuGraphChildGraphNodeGetGraph": (c_void_p, c_void_p),
    "cuFuncGetName": (c_void_p, c_void_p),
    "cuFuncGetParamInfo": (c_void_p, c_size_t, c_void_p, c_void_p),
    "cuKernelGetName": (c_void_p, c_void_p),
    "cuKernelGetParamInfo": (c_void_p, c_size_t, c_void_p, c_void_p),
    "cuMemGetAddressRange_v2": (c_void_p, c_void_p, c_uint64),
    "cuStreamGetCaptureInfo_v2": (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
}


@dataclass(frozen=True)
class GraphNode:
    """One node of a graph or of a graph inside it.

    ``handle``: the driver's, of the node of the outer graph. ``path``: its index in ``cuGraphGetNodes``, after those of
    the nodes it is inside of, as in "12.3". ``name``: the kernel's, else what the node does. ``unread``: why its
    arguments cannot be told; empty where ``parameters`` are all of them.
    """

    handle: int
    path: str
    type: NodeType
    name: str
    parameters: tuple[Parameter, ...]
    unread: str = ""


def load_driver() -> GraphReader:
    """A reader of the graphs of this process. Raises ``DriverUnavailable``."""
    try:
        library: Any = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise DriverUnavailable(f"there is no CUDA driver here ({error}): run this on a machine with a GPU") from error
    return GraphReader(library)


class GraphReader:
    """Reads captured graphs through ``library``.

    A graph is given by its ``CUgraph`` as an integer: ``torch.cuda.CUDAGraph.raw_cuda_graph()`` of one that was made
    with ``keep_graph=True``. It must outlive what is asked about it, and nobody may change it meanwhile. Raises
    ``DriverUnavailable`` where calls are missing.
    """

    def __init__(self, library: DriverLibrary) -> None:
        missing = [name for name in _SIGNATURES if not hasattr(library, name)]
        if missing:
            raise DriverUnavailable(
                f"the CUDA driver has no {', '.join(missing)}: kernel parameters can be read with a driver for CUDA "
                "12.4 or newer"
            )
        for name, arguments in _SIGNATURES.items():
            call = getattr(library, name)
            call.argtypes, call.restype = arguments, c_int
        self._library = library

    def node_handles(self, graph: int) -> tuple[int, ...]:
        """The handles of the nodes of ``graph`` itself."""
        count = c_size_t()
        self._ask("cuGraphGetNodes", graph, None, ctypes.addressof(count))
        handles = (c_void_p * count.value)()
        if count.value:
            self._ask("cuGraphGetNodes", graph, ctypes.addressof(handles), ctypes.addressof(count))
        return tuple(handle or 0 for handle in handles[: count.value])

    def walk(self, graph: int) -> Iterator[GraphNode]:
        """Every node that does something, those of child graphs after one another in place of the node they are in.

        Raises ``DriverError``.
        """
        for index, handle in enumerate(self.node_handles(graph)):
            yield from self._nodes_of(handle, str(index), handle)

    def is_allocated(self, address: int) -> bool:
        """Whether the driver has allocated memory at ``address``."""
        base, size = c_uint64(), c_size_t()
        code = self._library.cuMemGetAddressRange_v2(ctypes.addressof(base), ctypes.addressof(size), address)
        return code == _SUCCESS and base.value <= address < base.value + size.value

    def graph_being_captured(self, stream: int) -> int | None:
        """The graph that ``stream`` (a ``CUstream``) captures into; None where it does not capture."""
        status, identifier, graph = c_int(), c_uint64(), c_void_p()
        places = [ctypes.addressof(item) for item in (status, identifier, graph)]
        self._ask("cuStreamGetCaptureInfo_v2", stream, *places, None, None)
        return graph.value if status.value == _CAPTURE_ACTIVE else None

    def _nodes_of(self, node: int, path: str, outer: int) -> Iterator[GraphNode]:
        number = c_int()
        self._ask("cuGraphNodeGetType", node, ctypes.addressof(number))
        try:
            kind = NodeType(number.value)
        except ValueError as error:
            raise DriverError(f"node {path} is of a type {number.value} that is not known here") from error
        if kind is NodeType.GRAPH:
            child = c_void_p()
            self._ask("cuGraphChildGraphNodeGetGraph", node, ctypes.addressof(child))
            for index, inner in enumerate(self.node_handles(child.value or 0)):
                yield from self._nodes_of(inner, f"{path}.{index}", outer)
        elif kind is NodeType.KERNEL:
            yield self._kernel(node, path, outer)
        elif kind is NodeType.MEMCPY:
            copied = MemcpyParams()
            self._ask("cuGraphMemcpyNodeGetParams", node, ctypes.addressof(copied))
            sides = [("source", copied.source), ("destination", copied.destination)]
            parameters = tuple(parameter for label, side in sides for parameter in _memcpy_parameter(label, side))
            unread = "" if len(parameters) == len(sides) else "it copies from or to an array"
            yield GraphNode(outer, path, kind, "copy", parameters, unread)
        elif kind is NodeType.MEMSET:
            filled = MemsetParams()
            self._ask("cuGraphMemsetNodeGetParams", node, ctypes.addressof(filled))
            yield GraphNode(outer, path, kind, "fill", (_pointer("destination", filled.destination),))
        elif kind not in _WITHOUT_MEMORY:
            name = kind.name.lower().replace("_", " ")
            yield GraphNode(outer, path, kind, name, (), f"what a {name} node uses cannot be told")

    def _kernel(self, node: int, path: str, outer: int) -> GraphNode:
        params = KernelNodeParams()
        self._ask("cuGraphKernelNodeGetParams_v2", node, ctypes.addressof(params))
        # A kernel of a library that no context has loaded yet has no function.
        name_call, info_call, kernel = "cuFuncGetName", "cuFuncGetParamInfo", params.func
        if not kernel:
            name_call, info_call, kernel = "cuKernelGetName", "cuKernelGetParamInfo", params.kern
        text = c_char_p()
        self._ask(name_call, ctypes.addressof(text), kernel)
        name = (text.value or b"").decode(errors="replace")
        layout = self._layout(info_call, kernel)
        try:
            parameters = _kernel_parameters(params, layout)
        except _Unreadable as error:
            return GraphNode(outer, path, NodeType.KERNEL, name, (), str(error))
        return GraphNode(outer, path, NodeType.KERNEL, name, parameters)

    def _layout(self, call: str, kernel: int) -> list[tuple[int, int]]:
        """Offset and size of each parameter. Their number is not told: the first that is not there is an error."""
        layout: list[tuple[int, int]] = []
        offset, size = c_size_t(), c_size_t()
        places = ctypes.addressof(offset), ctypes.addressof(size)
        while len(layout) < _MOST_PARAMETERS:
            code = getattr(self._library, call)(kernel, len(layout), *places)
            if code == _INVALID_VALUE:
                break
            self._check(call, code)
            layout.append((offset.value, size.value))
        return layout

    def _ask(self, call: str, *arguments: Any) -> None:
        self._check(call, getattr(self._library, call)(*arguments))

    def _check(self, call: str, code: int) -> None:
        if code == _SUCCESS:
            return
        name = c_char_p()
        self._library.cuGetErrorName(code, ctypes.addressof(name))
        raise DriverError(f"{call} failed with {code} ({(name.value or b'unknown').decode()})")


class _Unreadable(Exception):
    """The parameters of a kernel are not where they should be."""


def _kernel_parameters(params: KernelNodeParams, layout: list[tuple[int, int]]) -> tuple[Parameter, ...]:
    """The bytes of each parameter. The array and what it points to belong to the node."""
    if not layout:
        return ()
    if params.kernel_params:
        pointers = (c_void_p * len(layout)).from_address(params.kernel_params)
        places = [(pointer, offset, size) for pointer, (offset, size) in zip(pointers, layout, strict=True)]
    elif params.extra:
        buffer, buffer_size = _extra_buffer(params.extra)
        if any(offset + size > buffer_size for offset, size in layout):
            raise _Unreadable(f"its buffer of {buffer_size} bytes does not hold its parameters")
        places = [(buffer + offset, offset, size) for offset, size in layout]
    else:
        raise _Unreadable("the driver gives no parameters, and the kernel has some")
    parameters = []
    for index, (pointer, offset, size) in enumerate(places):
        if not pointer:
            raise _Unreadable(f"the driver gives no parameter {index}")
        parameters.append(Parameter(f"parameter {index}", offset, ctypes.string_at(pointer, size)))
    return tuple(parameters)


def _extra_buffer(extra: int) -> tuple[int, int]:
    """Address and size of the buffer with all parameters: a list of names, each before its value, ends with 0."""
    found = {_EXTRA_BUFFER: 0, _EXTRA_SIZE: 0}
    word = ctypes.sizeof(c_void_p)
    place = extra
    while (name := c_void_p.from_address(place).value or 0) != _EXTRA_END:
        if name not in found:
            raise _Unreadable(f"its launch has an option {name} that is not known here")
        found[name] = c_void_p.from_address(place + word).value or 0
        place += 2 * word
    if not all(found.values()):
        raise _Unreadable("its launch has a buffer without a size, or none")
    return found[_EXTRA_BUFFER], c_size_t.from_address(found[_EXTRA_SIZE]).value


def _memcpy_parameter(label: str, side: MemcpySide) -> tuple[Parameter, ...]:
    """Where a copy begins; nothing for an array, which has no address."""
    if side.memory_type == MemoryType.ARRAY:
        return ()
    start = (side.host or 0) if side.memory_type == MemoryType.HOST else side.device
    return (_pointer(label, start + side.x_in_bytes + side.pitch * (side.y + side.height * side.z)),)


def _pointer(label: str, address: int) -> Parameter:
    return Parameter(label, 0, address.to_bytes(8, "little"))
