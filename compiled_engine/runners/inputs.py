"""A scheduled batch as the arrays that graphs and attention read, built on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from compiled_engine.errors import RequestError
from compiled_engine.runners.batch import ScheduledRequest


@dataclass(frozen=True)
class StepInputs:
    """One step's inputs, padding included.

    input_ids, positions: int64 [num_padded_tokens].
    query_start_loc: int32 [num_padded_requests + 1].   seq_lens: int32 [num_padded_requests].
    slot_mappings, block_tables: one per cache group, int64 [num_padded_tokens] and int32 [num_padded_requests,
    max_blocks].
    logits_indices: int64 [num_logits], the token rows that sample.

    Padding contract: a padded row is a request of one token 0 at position 0, with seq_len 1, a block table of zeros
    and a slot inside block 0, which no request owns. No index is ever negative.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    slot_mappings: tuple[torch.Tensor, ...]
    block_tables: tuple[np.ndarray, ...]
    logits_indices: torch.Tensor
    num_tokens: int

    @property
    def num_logits(self) -> int:
        return self.logits_indices.shape[0]

    @property
    def num_padded_tokens(self) -> int:
        return self.input_ids.shape[0]


def build_step_inputs(requests: Sequence[ScheduledRequest], block_size: int, min_tokens: int = 1) -> StepInputs:
    """Lay out ``requests`` in row order and pad with one-token rows up to ``min_tokens``.

    Raises ``RequestError`` for a request without tokens, or with fewer blocks than its positions need: its K/V would
    go to block 0 unseen.
    """
    for request in requests:
        fewest = min(map(len, request.block_tables))
        if not request.token_ids or fewest * block_size < request.seq_len:
            raise RequestError(
                f"request {request.request_id!r} schedules {request.num_scheduled_tokens} tokens after "
                f"{request.num_computed_tokens} with {fewest} blocks of {block_size} tokens"
            )
    query_lens = np.array([request.num_scheduled_tokens for request in requests], dtype=np.int64)
    num_tokens = int(query_lens.sum())
    padding = max(0, min_tokens - num_tokens)
    rows = num_tokens + padding
    num_computed = np.array([request.num_computed_tokens for request in requests], dtype=np.int64)
    starts = np.cumsum(query_lens) - query_lens
    owner = np.repeat(np.arange(len(requests)), query_lens)
    positions = np.zeros(rows, dtype=np.int64)
    positions[:num_tokens] = np.arange(num_tokens) - starts[owner] + num_computed[owner]
    num_groups = len(requests[0].block_tables) if requests else 1
    block_tables = [
        _block_table([request.block_tables[group] for request in requests], len(requests) + padding)
        for group in range(num_groups)
    ]
    slot_mappings = [_slot_mapping(table, owner, positions, block_size) for table in block_tables]
    input_ids = np.zeros(rows, dtype=np.int64)
    input_ids[:num_tokens] = [token for request in requests for token in request.token_ids]

    query_start_loc = np.zeros(len(requests) + padding + 1, dtype=np.int32)
    query_start_loc[1:] = np.cumsum(np.concatenate([query_lens, np.ones(padding, dtype=np.int64)]))
    seq_lens = np.concatenate([num_computed + query_lens, np.ones(padding, dtype=np.int64)]).astype(np.int32)
    samples = np.array([request.samples for request in requests], dtype=bool)
    last_rows = (starts + query_lens - 1)[samples]
    return StepInputs(
        input_ids=torch.from_numpy(input_ids),
        positions=torch.from_numpy(positions),
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        slot_mappings=tuple(torch.from_numpy(slots) for slots in slot_mappings),
        block_tables=tuple(block_tables),
        logits_indices=torch.from_numpy(last_rows),
        num_tokens=num_tokens,
    )


def empty_step_inputs(num_groups: int) -> StepInputs:
    """A step without tokens and requests, to be padded."""
    none, row = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
    return StepInputs(
        input_ids=torch.from_numpy(none),
        positions=torch.from_numpy(none),
        query_start_loc=np.zeros(1, dtype=np.int32),
        seq_lens=row,
        slot_mappings=(torch.from_numpy(none),) * num_groups,
        block_tables=(row.reshape(0, 1),) * num_groups,
        logits_indices=torch.from_numpy(none),
        num_tokens=0,
    )


def _block_table(tables: Sequence[Sequence[int]], num_rows: int) -> np.ndarray:
    block_table = np.zeros((num_rows, max([1, *map(len, tables)])), dtype=np.int32)
    for row, table in enumerate(tables):
        block_table[row, : len(table)] = table
    return block_table


def _slot_mapping(block_table: np.ndarray, owner: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    """Slots of the real tokens, whose requests are ``owner``; padding keeps slot 0."""
    slots = np.zeros(len(positions), dtype=np.int64)
    real = positions[: len(owner)]
    slots[: len(owner)] = block_table[owner, real // block_size].astype(np.int64) * block_size + real % block_size
    return slots
