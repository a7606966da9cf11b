"""Steps in memory that stays where it is: every row of a padded step is its own, and padding is what it should be."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.runners.batch import ScheduledRequest
from compiled_engine.runners.inputs import build_step_inputs, empty_step_inputs
from compiled_engine.runners.step_buffers import Padding, StepBuffers

BLOCK_SIZE, MAX_TOKENS, MAX_REQUESTS, MAX_BLOCKS, GROUPS = 2, 12, 5, 6, 2
CPU = torch.device("cpu")


@st.composite
def steps(draw: st.DrawFn) -> list[ScheduledRequest]:
    requests = []
    tokens = MAX_TOKENS
    for row in range(draw(st.integers(0, MAX_REQUESTS))):
        count = draw(st.integers(1, 3))
        if count > tokens:
            break
        tokens -= count
        computed = draw(st.integers(0, BLOCK_SIZE * MAX_BLOCKS - count))
        blocks = -(-(computed + count) // BLOCK_SIZE)
        tables = tuple(tuple(draw(st.lists(st.integers(1, 99), min_size=blocks, max_size=blocks))) for _ in range(2))
        ids = tuple(draw(st.lists(st.integers(1, 999), min_size=count, max_size=count)))
        requests.append(ScheduledRequest(str(row), ids, computed, tables, draw(st.booleans())))
    return requests


@given(st.lists(st.tuples(steps(), st.booleans(), st.data()), min_size=1, max_size=4))
def test_a_staged_step_is_its_inputs_and_padding(run: list[tuple[list[ScheduledRequest], bool, st.DataObject]]) -> None:
    """Several steps through the same buffers: nothing of an earlier one is left in a later one."""
    buffers = StepBuffers(MAX_TOKENS, MAX_REQUESTS, GROUPS, MAX_BLOCKS, CPU)
    places = None
    for requests, wants_uniform, data in run:
        uniform = wants_uniform and all(len(request.token_ids) == 1 for request in requests)
        inputs = build_step_inputs(requests, BLOCK_SIZE) if requests else empty_step_inputs(GROUPS)
        rows = data.draw(st.integers(max(1, len(requests)), MAX_REQUESTS))
        tokens = rows if uniform else data.draw(st.integers(max(1, inputs.num_tokens), MAX_TOKENS))
        staged = buffers.stage(inputs, Padding(tokens, rows, rows, uniform))
        real, num_tokens = len(requests), inputs.num_tokens

        ids = [token for request in requests for token in request.token_ids]
        assert staged.input_ids.tolist() == ids + [0] * (tokens - num_tokens)
        positions = [
            request.num_computed_tokens + index for request in requests for index in range(len(request.token_ids))
        ]
        assert staged.positions.tolist() == positions + [0] * (tokens - num_tokens)
        starts = [0]
        for request in requests:
            starts.append(starts[-1] + len(request.token_ids))
        for _ in range(rows - real):
            starts.append(starts[-1] + (1 if uniform else 0))
        assert staged.query_start_loc.tolist() == starts
        assert staged.seq_lens.tolist() == [r.seq_len for r in requests] + [int(uniform)] * (rows - real)
        last = [end - 1 for request, end in zip(requests, starts[1:], strict=False) if request.samples]
        assert staged.logits_indices.tolist() == last + [0] * (rows - len(last))
        for group in range(GROUPS):
            tables = np.zeros((rows, MAX_BLOCKS), dtype=np.int32)
            slots = []
            for row, request in enumerate(requests):
                table = request.block_tables[group]
                tables[row, : len(table)] = table
                slots += [
                    table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                    for position in range(request.num_computed_tokens, request.seq_len)
                ]
            assert staged.block_tables[group].tolist() == tables.tolist()
            assert staged.slot_mappings[group].tolist() == slots + [0] * (tokens - num_tokens)

        now = {name: tensor.data_ptr() for name, tensor in staged.metadata().items()}
        assert places is None or now == places, "tensors stay where they are"
        places = now


def test_a_step_without_padding_is_its_inputs() -> None:
    request = ScheduledRequest("0", (5, 6, 7), 1, ((3, 4), (8, 9)), True)
    inputs = build_step_inputs([request], BLOCK_SIZE)
    staged = StepBuffers(MAX_TOKENS, MAX_REQUESTS, GROUPS, MAX_BLOCKS, CPU).stage(inputs, Padding.none(inputs))
    assert torch.equal(staged.input_ids, inputs.input_ids)
    assert torch.equal(staged.positions, inputs.positions)
    assert torch.equal(staged.logits_indices, inputs.logits_indices)
    assert staged.query_start_loc.tolist() == inputs.query_start_loc.tolist()
    assert [slots.tolist() for slots in staged.slot_mappings] == [slots.tolist() for slots in inputs.slot_mappings]
