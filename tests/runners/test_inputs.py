"""The host side of a step against a slow account of the same rules, token by token."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.errors import RequestError
from compiled_engine.runners.batch import ScheduledRequest
from compiled_engine.runners.inputs import StepInputs, build_step_inputs


@dataclass
class Expected:
    """What a step must hold, in plain lists. ``slots`` and ``tables``: one entry per cache group and token, request."""

    input_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[list[int]] = field(default_factory=list)
    first_rows: list[int] = field(default_factory=lambda: [0])
    seq_lens: list[int] = field(default_factory=list)
    tables: list[tuple[tuple[int, ...], ...]] = field(default_factory=list)
    sampled_rows: list[int] = field(default_factory=list)


def account(requests: list[ScheduledRequest], block_size: int, min_tokens: int) -> Expected:
    expected = Expected()
    for request in requests:
        position = request.num_computed_tokens
        for token in request.token_ids:
            block, offset = divmod(position, block_size)
            slots = [table[block] * block_size + offset for table in request.block_tables]
            expected.input_ids.append(token)
            expected.positions.append(position)
            expected.slots.append(slots)
            position += 1
        expected.first_rows.append(len(expected.input_ids))
        expected.seq_lens.append(position)
        expected.tables.append(request.block_tables)
        if request.samples:
            expected.sampled_rows.append(len(expected.input_ids) - 1)
    while len(expected.input_ids) < min_tokens:
        expected.input_ids.append(0)
        expected.positions.append(0)
        expected.slots.append([])  # anywhere in block 0
        expected.first_rows.append(len(expected.input_ids))
        expected.seq_lens.append(1)
        expected.tables.append(())
    return expected


def check(inputs: StepInputs, requests: list[ScheduledRequest], block_size: int, min_tokens: int) -> None:
    expected = account(requests, block_size, min_tokens)
    num_real = sum(len(request.token_ids) for request in requests)
    assert inputs.input_ids.tolist() == expected.input_ids
    assert inputs.positions.tolist() == expected.positions
    assert inputs.query_start_loc.tolist() == expected.first_rows
    assert inputs.seq_lens.tolist() == expected.seq_lens
    num_groups = len(requests[0].block_tables) if requests else 1
    assert len(inputs.slot_mappings) == len(inputs.block_tables) == num_groups
    for group, (slots, block_table) in enumerate(zip(inputs.slot_mappings, inputs.block_tables, strict=True)):
        for slot, by_group in zip(slots.tolist(), expected.slots, strict=True):
            assert slot == by_group[group] if by_group else 0 <= slot < block_size
        assert block_table.shape[1] >= 1
        for row, tables in zip(block_table.tolist(), expected.tables, strict=True):
            table = list(tables[group]) if tables else []
            assert row == table + [0] * (len(row) - len(table))
    assert inputs.num_tokens == num_real
    assert inputs.num_padded_tokens == len(expected.input_ids)
    assert inputs.num_logits == len(expected.sampled_rows)
    assert inputs.logits_indices.tolist() == expected.sampled_rows
    for array in (inputs.query_start_loc, inputs.seq_lens, *inputs.block_tables):
        assert array.dtype == np.int32
        assert (array >= 0).all()
    for tensor in (inputs.input_ids, inputs.positions, *inputs.slot_mappings, inputs.logits_indices):
        assert tensor.dtype is torch.int64
        assert (tensor >= 0).all()


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[ScheduledRequest], int]:
    block_size = draw(st.sampled_from([1, 2, 3, 16]))
    num_groups = draw(st.sampled_from([1, 1, 3]))
    free = [list(draw(st.permutations(range(1, 200)))) for _ in range(num_groups)]
    requests = []
    for row in range(draw(st.integers(0, 5))):
        tokens = draw(st.lists(st.integers(0, 2**31), min_size=1, max_size=draw(st.sampled_from([1, 1, 8]))))
        computed = draw(st.integers(0, 20))
        if draw(st.booleans()):
            # Ends exactly with a block.
            computed += -(computed + len(tokens)) % block_size
        tables = []
        for blocks in free:
            # A scheduler may own blocks ahead of need, and have given up those that a window has left behind.
            count = -(-(computed + len(tokens)) // block_size) + draw(st.sampled_from([0, 0, 2]))
            behind = draw(st.integers(0, computed // block_size))
            tables.append((*[0] * behind, *(blocks.pop() for _ in range(count - behind))))
        requests.append(ScheduledRequest(f"r{row}", tuple(tokens), computed, tuple(tables), draw(st.booleans())))
    return requests, block_size


@given(batch=batches(), min_tokens=st.integers(0, 6))
def test_equals_the_slow_account(batch: tuple[list[ScheduledRequest], int], min_tokens: int) -> None:
    requests, block_size = batch
    check(build_step_inputs(requests, block_size, min_tokens), requests, block_size, min_tokens)


def test_a_step_of_nothing_is_all_padding() -> None:
    inputs = build_step_inputs([], 4, 2)
    check(inputs, [], 4, 2)
    assert inputs.num_padded_tokens == 2
    assert inputs.num_logits == 0


@pytest.mark.parametrize("samples", [False, True])
def test_one_token_is_padded_to_two_rows(samples: bool) -> None:
    request = ScheduledRequest("r", (7,), 8, ((3, 9, 5),), samples)
    inputs = build_step_inputs([request], 4, 2)
    assert inputs.slot_mappings[0].tolist()[0] == 5 * 4
    assert inputs.seq_lens.tolist() == [9, 1]
    assert inputs.block_tables[0].tolist() == [[3, 9, 5], [0, 0, 0]]
    assert inputs.logits_indices.tolist() == ([0] if samples else [])


def test_large_slots_do_not_overflow() -> None:
    """Block id times block size leaves int32 long before memory ends."""
    block = 2**31 - 1
    inputs = build_step_inputs([ScheduledRequest("r", (1,), 0, ((block,),), True)], 128, 2)
    assert inputs.slot_mappings[0].tolist()[0] == block * 128


@pytest.mark.parametrize(
    "request_",
    [
        ScheduledRequest("short", (1, 2, 3), 2, ((5,),), True),
        ScheduledRequest("short", (1,), 4, ((5,),), False),
        ScheduledRequest("short", (1,), 0, ((),), False),
        ScheduledRequest("short", (1,), 4, ((5, 6), (7,)), False),
    ],
)
def test_too_few_blocks_are_refused_whatever_the_width_of_the_table(request_: ScheduledRequest) -> None:
    """Beside a longer request the missing entry would be the zero of padding, and K/V would go there unseen."""
    table = tuple(range(6, 11))
    longer = ScheduledRequest("longer", (1,) * 20, 0, (table,) * len(request_.block_tables), True)
    for batch in ([request_], [longer, request_]):
        with pytest.raises(RequestError, match="'short' schedules"):
            build_step_inputs(batch, 4, 2)


def test_a_request_without_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="'idle' schedules 0 tokens"):
        build_step_inputs([ScheduledRequest("idle", (), 3, ((1,),), True)], 4, 2)
