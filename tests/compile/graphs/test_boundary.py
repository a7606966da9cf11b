"""Buffers between captured pieces: no value is overwritten while something still reads it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.compile.graphs.boundary import BoundaryBuffers, cut_at_attention, last_readers
from compiled_engine.compile.model import Instruction


def nothing(values: object, launch: object) -> None:
    """What an instruction does here."""


@st.composite
def programs(draw: st.DrawFn) -> list[list[Instruction]]:
    """Parts of one or two instructions; each reads values made before and makes new ones."""
    parts: list[list[Instruction]] = []
    places = 0
    for _ in range(draw(st.integers(1, 7))):
        part = []
        for _ in range(draw(st.integers(1, 2))):
            reads = draw(st.lists(st.integers(0, places - 1), max_size=3, unique=True)) if places else []
            makes = tuple(range(places, places + draw(st.integers(0, 3))))
            places += len(makes)
            part.append(Instruction("step", nothing, tuple(reads), makes, ()))
        parts.append(part)
    return parts


@given(programs(), st.data())
def test_no_live_value_shares_a_buffer(parts: list[list[Instruction]], data: st.DataObject) -> None:
    made = [place for part in parts for step in part for place in step.makes]
    kept = data.draw(st.sets(st.sampled_from(made))) if made else set()
    shapes = {place: data.draw(st.sampled_from([(2,), (3,)])) for place in made}
    last = last_readers(parts, kept)
    buffers = BoundaryBuffers(last)
    live: dict[int, torch.Tensor] = {}
    for index, part in enumerate(parts):
        for step in part:
            for place in step.makes:
                if buffers.needs(place):
                    live[place] = buffers.buffer_for(place, torch.empty(shapes[place]))
                    live[place].fill_(place)
        for place, value in live.items():
            assert (value == place).all(), f"value {place} was overwritten in part {index}"
        reads = {place for later in parts[index + 1 :] for step in later for place in step.reads} | kept
        live = {place: value for place, value in live.items() if place in reads}
        buffers.end_part(index)
    outlive = {
        place
        for index, part in enumerate(parts)
        for step in part
        for place in step.makes
        if place in kept or any(place in later.reads for other in parts[index + 1 :] for later in other)
    }
    assert set(last) == outlive


def test_buffers_are_used_again_and_keep_their_places() -> None:
    """A chain of parts needs two buffers: one that is read while the other is written."""
    parts = [[Instruction("step", nothing, (place - 1,) if place else (), (place,), ())] for place in range(6)]
    buffers = BoundaryBuffers(last_readers(parts, (5,)))
    for size in (4, 2):
        addresses = []
        for index in range(6):
            like = torch.empty(size, 3)
            view = buffers.buffer_for(index, like)
            assert (view.shape, view.stride()) == (like.shape, like.stride())
            addresses.append(view.data_ptr())
            buffers.end_part(index)
        assert len(set(addresses)) == 2
        if size == 4:
            first = addresses
    assert addresses == first


def test_parts_are_stretches_of_pieces_and_single_attentions() -> None:
    layer = object()
    kinds = [None, None, layer, layer, None]
    steps = [Instruction(str(index), nothing, (), (), (), kind) for index, kind in enumerate(kinds)]  # type: ignore[arg-type]
    assert [[step.name for step in part] for part in cut_at_attention(steps)] == [["0", "1"], ["2"], ["3"], ["4"]]
