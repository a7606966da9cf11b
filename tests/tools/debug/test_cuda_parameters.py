"""Addresses among argument bytes, against a search that tries every byte and every range."""

from __future__ import annotations

import ctypes
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine_debug.cuda_bindings.parameters import (
    AddressRange,
    FoundAddress,
    Parameter,
    RangeIndex,
    find_addresses,
)

BASE = 0x7F32_1000_0000
CACHE = AddressRange("KV cache of layer", "layers.0", BASE, 4096)
WEIGHT = AddressRange("weight", "embed", BASE + 4096, 512)


def found_in(data: bytes, *ranges: AddressRange, offset: int = 0) -> list[FoundAddress]:
    return find_addresses([Parameter("parameter 3", offset, data)], RangeIndex(ranges))


def names(found: FoundAddress) -> list[str]:
    return [item.name for item in found.ranges]


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (BASE - 1, []),
        (BASE, ["layers.0"]),
        (BASE + 1, ["layers.0"]),
        (BASE + 4095, ["layers.0"]),
        (BASE + 4096, ["embed"]),
        (BASE + 4096 + 511, ["embed"]),
        (BASE + 4096 + 512, []),
    ],
)
def test_a_range_ends_before_the_byte_behind_it(address: int, expected: list[str]) -> None:
    found = found_in(struct.pack("<Q", address), CACHE, WEIGHT)
    assert [name for item in found for name in names(item)] == expected
    assert all((item.address, item.position, item.is_aligned) == (address, 0, True) for item in found)


class TensorList(ctypes.Structure):
    """As kernels over lists of tensors take it: addresses, sizes, and small numbers behind them."""

    _fields_ = (("addresses", ctypes.c_uint64 * 4), ("sizes", ctypes.c_int64 * 4), ("block", ctypes.c_ubyte * 5))


class Packed(ctypes.Structure):
    """A pointer where no compiler would place one."""

    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("flag", ctypes.c_ubyte), ("rows", ctypes.c_uint32), ("pointer", ctypes.c_uint64))


def test_pointers_in_a_struct_are_found_by_their_byte() -> None:
    value = TensorList((BASE, 0, BASE + 4096 + 16, BASE - 8), (4096, 1, 2, 3), (1, 2, 3, 4, 5))
    found = found_in(bytes(value), CACHE, WEIGHT)
    assert [(item.place, names(item), item.is_aligned) for item in found] == [
        ("parameter 3 byte 0", ["layers.0"], True),
        ("parameter 3 byte 16", ["embed"], True),
    ]


def test_a_pointer_in_a_packed_struct_is_not_aligned() -> None:
    (found,) = found_in(bytes(Packed(1, 7, BASE + 64)), CACHE)
    assert (found.position, found.address, found.is_aligned) == (5, BASE + 64, False)


def test_alignment_is_that_of_the_whole_layout() -> None:
    """A parameter of 4 bytes before a packed one moves it to a place that is no multiple of 8, or back to one."""
    data = b"\0" * 4 + struct.pack("<Q", BASE)
    assert [item.is_aligned for item in found_in(data, CACHE, offset=4)] == [True]
    assert [item.is_aligned for item in found_in(data, CACHE, offset=8)] == [False]


def test_words_that_share_bytes_with_an_aligned_address_are_none() -> None:
    # Read one byte further on, this address is one in the second range.
    address = 0x7F32_1000_0040
    shifted = AddressRange("weight", "chance", (address >> 8) - 1, 4)
    data = struct.pack("<QQ", address, 0)
    assert [names(item) for item in found_in(data, CACHE, shifted)] == [["layers.0"]]
    assert [names(item) for item in found_in(data, shifted)] == [["chance"]]
    assert [item.position for item in found_in(data, shifted)] == [1]


def test_one_shared_byte_is_enough() -> None:
    """The last byte of one address is the first of another, which lies in the same range."""
    data = struct.pack("<QQ", BASE + 8, (BASE + 0x100) >> 8)
    assert [item.position for item in found_in(data, CACHE)] == [0]
    assert [item.position for item in found_in(b"\xff" * 7 + data[7:], CACHE)] == [7]


def test_a_plain_pointer_needs_no_byte() -> None:
    (found,) = found_in(struct.pack("<Q", BASE), CACHE)
    assert found.place == "parameter 3"


def test_overlapping_ranges_are_all_told() -> None:
    whole = AddressRange("weight", "qkv", BASE, 3000)
    part = AddressRange("weight", "k", BASE + 1000, 1000)
    tied = AddressRange("weight", "k again", BASE + 1000, 1000)
    (found,) = found_in(struct.pack("<Q", BASE + 1500), part, whole, tied)
    assert sorted(names(found)) == ["k", "k again", "qkv"]
    for behind in (2000, 2500):
        (found,) = found_in(struct.pack("<Q", BASE + behind), part, whole, tied)
        assert names(found) == ["qkv"]


@pytest.mark.parametrize("size", range(8))
def test_less_than_a_word_holds_no_address(size: int) -> None:
    everything = AddressRange("weight", "everything", 0, 1 << 63)
    assert found_in(bytes(size), everything) == []


def test_without_ranges_nothing_is_found() -> None:
    assert found_in(struct.pack("<Q", BASE)) == []
    assert found_in(struct.pack("<Q", BASE), AddressRange("weight", "empty", BASE, 0)) == []


RANGES = st.lists(
    st.builds(
        AddressRange,
        st.sampled_from(["weight", "metadata"]),
        st.text("abc", min_size=1, max_size=2),
        st.integers(BASE, BASE + 400) | st.integers(0, 2**64 - 300),
        st.integers(0, 250),
    ),
    max_size=9,
)
# Words near the ranges, numbers of all sizes, and bytes that move all that follows to another place.
CHUNKS = st.lists(
    st.integers(BASE - 20, BASE + 700).map(lambda value: struct.pack("<Q", value))
    | st.integers(0, 2**64 - 1).map(lambda value: struct.pack("<Q", value))
    | st.integers(-(2**31), 2**31 - 1).map(lambda value: struct.pack("<i", value))
    | st.binary(max_size=3),
    max_size=8,
)


@given(RANGES, CHUNKS, st.integers(0, 40))
def test_all_bytes_and_ranges_tried_one_by_one_find_the_same(
    ranges: list[AddressRange], chunks: list[bytes], offset: int
) -> None:
    data = b"".join(chunks)
    hits = {}
    for position in range(len(data) - 7):
        (address,) = struct.unpack_from("<Q", data, position)
        inside = [item for item in ranges if item.address <= address <= item.address + item.num_bytes - 1]
        if inside:
            hits[position] = (address, sorted(map(str, inside)))
    aligned = {position for position in hits if (offset + position) % 8 == 0}
    taken = {byte for position in aligned for byte in range(position, position + 8)}
    expected = [
        (position, address, inside, position in aligned)
        for position, (address, inside) in hits.items()
        if position in aligned or not taken & set(range(position, position + 8))
    ]
    found = found_in(data, *ranges, offset=offset)
    assert [(item.position, item.address, sorted(map(str, item.ranges)), item.is_aligned) for item in found] == expected


@given(RANGES, st.integers(0, 2**64 - 1) | st.integers(BASE - 5, BASE + 700))
def test_ranges_of_an_address_are_found_whatever_their_order(ranges: list[AddressRange], address: int) -> None:
    forward, backward = RangeIndex(ranges).containing(address), RangeIndex(ranges[::-1]).containing(address)
    assert sorted(map(repr, forward)) == sorted(map(repr, backward))
    assert sorted(map(repr, forward)) == sorted(repr(item) for item in ranges if item.contains(address))
