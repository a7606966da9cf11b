"""Addresses of known memory among the bytes of launch arguments.

Most kernels take a pointer as an argument of 8 bytes. Some take structs by value with pointers in them (lists of
tensors, problem descriptions of matrix products), so every word of every argument is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

WORD = 8
"""Bytes of an address."""


@dataclass(frozen=True)
class AddressRange:
    """Memory that is known by name: ``num_bytes`` from ``address`` on. ``role``: see ``Role``, its value."""

    role: str
    name: str
    address: int
    num_bytes: int

    def contains(self, address: int) -> bool:
        """Whether ``address`` is that of a byte of this range: the one behind the last is not."""
        return self.address <= address < self.address + self.num_bytes

    def __str__(self) -> str:
        return f"{self.role} {self.name!r}"


@dataclass(frozen=True)
class Parameter:
    """One argument of a node. ``offset``: its place in the layout that the device sees, in bytes. ``data``: its bytes,
    as the device gets them (little-endian)."""

    label: str
    offset: int
    data: bytes


@dataclass(frozen=True)
class FoundAddress:
    """A word of ``parameter`` that is an address inside ``ranges``, which are never empty.

    ``position``: where in the parameter it begins, in bytes. ``is_aligned``: whether the device sees the word at a
    multiple of 8; compilers place pointers there, except in packed structs.
    """

    parameter: Parameter
    position: int
    address: int
    ranges: tuple[AddressRange, ...]
    is_aligned: bool

    @property
    def place(self) -> str:
        """The parameter and, where it holds more than this one word, the byte in it."""
        alone = len(self.parameter.data) == WORD
        return self.parameter.label if alone else f"{self.parameter.label} byte {self.position}"


class RangeIndex:
    """Finds the ranges that contain an address. They may overlap, be nested or be equal."""

    def __init__(self, ranges: Iterable[AddressRange]) -> None:
        known = sorted((item for item in ranges if item.num_bytes > 0), key=lambda item: item.address)
        self._ranges = tuple(known)
        self._starts = np.array([item.address for item in known], dtype=np.uint64)
        ends = np.array([item.address + item.num_bytes for item in known], dtype=np.uint64)
        # How far any of the first ranges reaches: it tells when looking further back is of no use.
        self._reach = np.maximum.accumulate(ends) if known else ends

    def containing(self, address: int) -> tuple[AddressRange, ...]:
        """All ranges that ``address`` is in, by their start."""
        found = []
        index = int(np.searchsorted(self._starts, np.uint64(address), side="right")) - 1
        while index >= 0 and address < int(self._reach[index]):
            if self._ranges[index].contains(address):
                found.append(self._ranges[index])
            index -= 1
        return tuple(reversed(found))

    def positions_inside(self, words: np.ndarray) -> list[int]:
        """Which of ``words`` (uint64 [n]) may be addresses in a range. None that is one is left out."""
        if not self._ranges:
            return []
        before = np.searchsorted(self._starts, words, side="right") - 1
        return np.flatnonzero((before >= 0) & (words < self._reach[before])).tolist()


def find_addresses(parameters: Iterable[Parameter], index: RangeIndex) -> list[FoundAddress]:
    """The words of ``parameters`` that are addresses inside the ranges of ``index``, in the order of their places.

    An unaligned word counts only where none of its bytes belongs to an aligned address.
    """
    return [found for parameter in parameters for found in _find_in(parameter, index)]


def _find_in(parameter: Parameter, index: RangeIndex) -> list[FoundAddress]:
    found = []
    for position in index.positions_inside(_words(parameter.data)):
        address = int.from_bytes(parameter.data[position : position + WORD], "little")
        if ranges := index.containing(address):
            is_aligned = (parameter.offset + position) % WORD == 0
            found.append(FoundAddress(parameter, position, address, ranges, is_aligned))
    aligned = [item.position for item in found if item.is_aligned]
    return [item for item in found if item.is_aligned or not _overlaps(item.position, aligned)]


def _words(data: bytes) -> np.ndarray:
    """The word that begins at each byte of ``data``: uint64 [max(0, len(data) - 7)]."""
    count = max(0, len(data) - WORD + 1)
    return np.ndarray((count,), dtype="<u8", buffer=data if count else bytes(WORD), strides=(1,))


def _overlaps(position: int, taken: Sequence[int]) -> bool:
    return any(abs(position - other) < WORD for other in taken)
