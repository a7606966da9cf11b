"""Reading CUDA graphs from a stand-in for the driver that is called as C is called."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest

from compiled_engine_debug.cuda_bindings import driver as driver_module
from compiled_engine_debug.cuda_bindings import structures
from compiled_engine_debug.cuda_bindings.driver import DriverError, DriverUnavailable, GraphReader, load_driver
from compiled_engine_debug.cuda_bindings.structures import NodeType
from fake_cuda_driver import ARRAY, DEVICE, HOST, UNIFIED, FakeCudaDriver

BASE = 0x7F00_0000_0000


def word(value: int) -> bytes:
    return struct.pack("<Q", value)


@pytest.fixture
def fake() -> FakeCudaDriver:
    return FakeCudaDriver(allocations=[(BASE, 0x10000)])


@pytest.fixture
def reader(fake: FakeCudaDriver) -> GraphReader:
    return GraphReader(fake)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("structure", "size", "places"),
    [
        (
            structures.KernelNodeParams,
            72,
            {"func": 0, "shared_mem_bytes": 32, "kernel_params": 40, "extra": 48, "kern": 56, "ctx": 64},
        ),
        (structures.MemcpyParams, 200, {"source": 0, "destination": 88, "width_in_bytes": 176}),
        (structures.MemcpySide, 88, {"memory_type": 32, "host": 40, "device": 48, "pitch": 72, "height": 80}),
        (structures.MemsetParams, 40, {"destination": 0, "pitch": 8, "element_size": 20, "width": 24}),
    ],
)
def test_fields_lie_where_the_header_puts_them(
    structure: type[ctypes.Structure], size: int, places: dict[str, int]
) -> None:
    """The numbers are what a C compiler says of ``cuda.h``."""
    assert ctypes.sizeof(structure) == size
    assert {name: getattr(structure, name).offset for name in places} == places


@pytest.mark.parametrize("form", ["parameters", "extra"])
@pytest.mark.parametrize("is_loaded", [True, False])
def test_parameters_of_a_kernel_are_read_to_the_byte(
    fake: FakeCudaDriver, reader: GraphReader, form: str, is_loaded: bool
) -> None:
    arguments = (word(BASE), struct.pack("<i", -7), bytes(range(40)), word(2**64 - 1), b"\x05")
    offsets = (0, 8, 16, 56, 64)
    node = fake.kernel("attend_kernel", *arguments, offsets=offsets, form=form, is_loaded=is_loaded)
    (read,) = reader.walk(fake.graph(node))
    assert (read.handle, read.path, read.type, read.name, read.unread) == (
        node,
        "0",
        NodeType.KERNEL,
        "attend_kernel",
        "",
    )
    assert [(item.label, item.offset, item.data) for item in read.parameters] == [
        (f"parameter {index}", offset, argument)
        for index, (offset, argument) in enumerate(zip(offsets, arguments, strict=True))
    ]


def test_a_kernel_without_parameters_has_none(fake: FakeCudaDriver, reader: GraphReader) -> None:
    (read,) = reader.walk(fake.graph(fake.kernel("nothing", form="nothing")))
    assert (read.parameters, read.unread) == ((), "")


def test_what_cannot_be_read_says_why(fake: FakeCudaDriver, reader: GraphReader) -> None:
    kernel = fake.new_kernel("k", [(0, 8), (8, 8)])
    one = fake.keep(word(1))
    short = fake.keep(struct.pack("<5Q", 1, one, 2, fake.keep(word(8)), 0))
    unknown = fake.keep(struct.pack("<5Q", 1, one, 77, 1, 0))
    sizeless = fake.keep(struct.pack("<3Q", 1, one, 0))
    gap = fake.keep(struct.pack("<2Q", one, 0))
    nodes = [
        fake.kernel_node(kernel, 0, 0),
        fake.kernel_node(kernel, gap, 0),
        fake.kernel_node(kernel, 0, short),
        fake.kernel_node(kernel, 0, unknown),
        fake.kernel_node(kernel, 0, sizeless),
        fake.other(3),
        fake.other(13),
        fake.copy({"type": ARRAY}, {"type": DEVICE, "device": BASE}),
    ]
    read = list(reader.walk(fake.graph(*nodes)))
    assert [node.unread for node in read] == [
        "the driver gives no parameters, and the kernel has some",
        "the driver gives no parameter 1",
        "its buffer of 8 bytes does not hold its parameters",
        "its launch has an option 77 that is not known here",
        "its launch has a buffer without a size, or none",
        "what a host node uses cannot be told",
        "what a conditional node uses cannot be told",
        "it copies from or to an array",
    ]
    assert [parameter.label for parameter in read[-1].parameters] == ["destination"]


def test_copies_begin_where_their_place_is(fake: FakeCudaDriver, reader: GraphReader) -> None:
    copy = fake.copy(
        {"type": DEVICE, "device": BASE, "host": 5, "x": 3, "y": 2, "z": 1, "pitch": 100, "height": 10},
        {"type": UNIFIED, "device": BASE + 64},
    )
    back = fake.copy({"type": DEVICE, "device": BASE}, {"type": HOST, "host": 0x5500_0000, "device": 9, "x": 4})
    read = list(reader.walk(fake.graph(copy, back, fake.fill(BASE + 8))))
    starts = [[(item.label, int.from_bytes(item.data, "little")) for item in node.parameters] for node in read]
    assert starts == [
        [("source", BASE + 3 + 200 + 1000), ("destination", BASE + 64)],
        [("source", BASE), ("destination", 0x5500_0004)],
        [("destination", BASE + 8)],
    ]
    assert [node.name for node in read] == ["copy", "copy", "fill"]


def test_graphs_inside_graphs_are_read_with_their_path(fake: FakeCudaDriver, reader: GraphReader) -> None:
    inner = fake.child(fake.graph(fake.other(5), fake.kernel("inner", word(BASE))))
    outer = fake.child(fake.graph(fake.kernel("middle"), inner))
    read = list(reader.walk(fake.graph(fake.other(5), outer, fake.kernel("last"))))
    assert [(node.path, node.name) for node in read] == [("1.0", "middle"), ("1.1.1", "inner"), ("2", "last")]
    assert [node.handle for node in read[:2]] == [outer, outer]


def test_an_empty_graph_has_no_nodes(fake: FakeCudaDriver, reader: GraphReader) -> None:
    assert list(reader.walk(fake.graph())) == []


def test_memory_is_the_drivers_or_not(reader: GraphReader) -> None:
    places = (BASE - 1, BASE, BASE + 0xFFFF, BASE + 0x10000)
    assert [reader.is_allocated(place) for place in places] == [False, True, True, False]


def test_only_a_capture_that_is_well_has_a_graph(fake: FakeCudaDriver, reader: GraphReader) -> None:
    fake.captures[5] = graph = fake.graph()
    assert [reader.graph_being_captured(stream) for stream in (5, 6)] == [graph, None]
    fake.capture_status = 2
    assert reader.graph_being_captured(5) is None


def test_errors_name_the_call(fake: FakeCudaDriver, reader: GraphReader) -> None:
    with pytest.raises(DriverError, match=r"cuGraphGetNodes failed with 400 \(CUDA_ERROR_INVALID_HANDLE\)"):
        list(reader.walk(12345))
    kernel = fake.kernel_node(fake.new_kernel("k", None), 0, 0)
    with pytest.raises(DriverError, match="cuFuncGetParamInfo failed with 400"):
        list(reader.walk(fake.graph(kernel)))
    with pytest.raises(DriverError, match="node 0 is of a type 99"):
        list(reader.walk(fake.graph(fake.other(99))))


def test_an_old_driver_and_no_driver_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    old: Any = FakeCudaDriver(without=frozenset({"cuFuncGetParamInfo", "cuKernelGetParamInfo"}))
    with pytest.raises(DriverUnavailable, match=r"no cuFuncGetParamInfo, cuKernelGetParamInfo: .* CUDA 12\.4"):
        GraphReader(old)
    monkeypatch.setattr(driver_module, "LIBRARY", "libcuda_that_is_nowhere.so.1")
    with pytest.raises(DriverUnavailable, match="there is no CUDA driver here"):
        load_driver()
