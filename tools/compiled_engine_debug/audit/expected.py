"""What a step's arrays must hold, worked out from the scheduled batch in plain loops.

The engine lays steps out with numpy; this says the same a second time, element by element, so that a fault in one of
the two shows.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiled_engine.compile.graphs.keys import GraphKey, GraphKind
from compiled_engine.runners.batch import ScheduledBatch

Arrays = dict[str, list[int]]
"""By name: ``input_ids``, ``positions``, ``query_start_loc``, ``seq_lens``, ``logits_indices``, and per cache group
``slot_mapping of group G``. Block tables are compared row by row: see ``ExpectedStep.block_tables``."""

PADDING = None
"""Stands for a request where a row belongs to none."""


@dataclass(frozen=True)
class ExpectedStep:
    """One step as the scheduler wrote it, padded as the graph that serves it wants it.

    ``token_owners``, ``request_owners``: the request of each token row and each request row, None: padding.
    ``block_tables``: per cache group and request row, block ids; what a staged row has beyond them must be 0.
    """

    arrays: Arrays
    block_tables: tuple[tuple[tuple[int, ...], ...], ...]
    token_owners: tuple[str | None, ...]
    request_owners: tuple[str | None, ...]
    num_tokens: int
    num_requests: int

    def slots(self, group: int) -> list[int]:
        """Where the real tokens' K/V go, in row order."""
        return self.arrays[f"slot_mapping of group {group}"][: self.num_tokens]

    def owner(self, array: str, index: int) -> str | None:
        """The request that element ``index`` of ``array`` belongs to; None for padding."""
        if array == "query_start_loc":
            index = max(0, index - 1)
        if array == "logits_indices":
            index = self.arrays[array][index]
            return self.token_owners[index]
        owners = self.token_owners if _is_by_token(array) else self.request_owners
        return owners[index] if index < len(owners) else None


def _is_by_token(array: str) -> bool:
    return array in ("input_ids", "positions") or array.startswith("slot_mapping")


def expected_step(batch: ScheduledBatch, block_size: int, key: GraphKey | None) -> ExpectedStep:
    """The arrays of ``batch``, padded for the graph ``key`` (None: no padding)."""
    arrays: Arrays = {"input_ids": [], "positions": [], "query_start_loc": [0], "seq_lens": [], "logits_indices": []}
    num_groups = len(batch.requests[0].block_tables)
    for group in range(num_groups):
        arrays[f"slot_mapping of group {group}"] = []
    token_owners: list[str | None] = []
    for request in batch.requests:
        for offset, token_id in enumerate(request.token_ids):
            position = request.num_computed_tokens + offset
            arrays["input_ids"].append(token_id)
            arrays["positions"].append(position)
            token_owners.append(request.request_id)
            for group, table in enumerate(request.block_tables):
                slot = table[position // block_size] * block_size + position % block_size
                arrays[f"slot_mapping of group {group}"].append(slot)
        arrays["query_start_loc"].append(len(token_owners))
        arrays["seq_lens"].append(request.num_computed_tokens + len(request.token_ids))
        if request.samples:
            arrays["logits_indices"].append(len(token_owners) - 1)
    num_tokens, num_requests = len(token_owners), len(batch.requests)
    _pad(arrays, num_groups, key)
    padded_tokens, padded_requests = len(arrays["input_ids"]), len(arrays["seq_lens"])
    return ExpectedStep(
        arrays=arrays,
        block_tables=tuple(
            tuple(request.block_tables[group] for request in batch.requests) + ((),) * (padded_requests - num_requests)
            for group in range(num_groups)
        ),
        token_owners=tuple(token_owners) + (PADDING,) * (padded_tokens - num_tokens),
        request_owners=tuple(request.request_id for request in batch.requests)
        + (PADDING,) * (padded_requests - num_requests),
        num_tokens=num_tokens,
        num_requests=num_requests,
    )


def _pad(arrays: Arrays, num_groups: int, key: GraphKey | None) -> None:
    """Padding is token 0 at position 0 in slot 0. A padded request of a decode graph has one such token; elsewhere
    padded requests have none, and padded tokens belong to no request."""
    if key is None:
        return
    for name in ("input_ids", "positions", *(f"slot_mapping of group {group}" for group in range(num_groups))):
        while len(arrays[name]) < key.num_padded_tokens:
            arrays[name].append(0)
    if key.kind is GraphKind.PIECEWISE:
        return
    tokens_each = 0 if key.uniform_query_len is None else key.uniform_query_len
    while len(arrays["seq_lens"]) < key.num_padded_requests:
        arrays["query_start_loc"].append(arrays["query_start_loc"][-1] + tokens_each)
        arrays["seq_lens"].append(tokens_each)
    while len(arrays["logits_indices"]) < key.num_padded_requests:
        arrays["logits_indices"].append(0)
