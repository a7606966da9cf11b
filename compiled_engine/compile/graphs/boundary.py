"""Memory for values that leave one captured stretch of pieces and are read by attention or by a later stretch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from compiled_engine.compile.model import Instruction


def cut_at_attention(instructions: Sequence[Instruction]) -> tuple[tuple[Instruction, ...], ...]:
    """The instructions in order, cut into stretches of pieces and single attentions."""
    parts: list[list[Instruction]] = []
    for instruction in instructions:
        if instruction.layer is None and parts and parts[-1][-1].layer is None:
            parts[-1].append(instruction)
        else:
            parts.append([instruction])
    return tuple(map(tuple, parts))


def last_readers(parts: Sequence[Sequence[Instruction]], kept: Iterable[int]) -> Mapping[int, int]:
    """By place, for every value that outlives the part that makes it: the last part that reads it.

    Values in places ``kept`` are read after the end.
    """
    makers = {place: index for index, part in enumerate(parts) for step in part for place in step.makes}
    last = {place: index for index, part in enumerate(parts) for step in part for place in step.reads}
    last.update(dict.fromkeys(kept, len(parts)))
    return {place: last[place] for place, maker in makers.items() if last.get(place, maker) > maker}


class BoundaryBuffers:
    """Buffers by place, shared by values whose lives do not overlap and by the graphs of all sizes.

    Addresses are fixed from the first use on, which must be the largest one.
    """

    def __init__(self, last_reader: Mapping[int, int]) -> None:
        self._last_reader = last_reader
        self._buffers: dict[int, torch.Tensor] = {}
        self._free: list[torch.Tensor] = []
        self._in_use: dict[int, list[torch.Tensor]] = {}

    def needs(self, place: int) -> bool:
        """Whether the value in ``place`` outlives its part."""
        return place in self._last_reader

    def buffer_for(self, place: int, like: torch.Tensor) -> torch.Tensor:
        """A tensor with the shape, strides and dtype of ``like`` in the buffer of ``place``."""
        extent = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
        if place not in self._buffers:
            self._buffers[place] = self._take(extent, like)
            self._in_use.setdefault(self._last_reader[place], []).append(self._buffers[place])
        return self._buffers[place][:extent].as_strided(like.shape, like.stride())

    def end_part(self, index: int) -> None:
        """Part ``index`` has run: what only it still read may be used again by what follows."""
        self._free += self._in_use.pop(index, [])

    def _take(self, extent: int, like: torch.Tensor) -> torch.Tensor:
        for index, buffer in enumerate(self._free):
            if buffer.dtype == like.dtype and len(buffer) == extent:
                return self._free.pop(index)
        return torch.empty(extent, dtype=like.dtype, device=like.device)
