"""Which cache slots still matter: those that a later step reads before any step writes them."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_engine.runners.batch import ScheduledBatch, ScheduledRequest


def live_slots(
    batches: Sequence[ScheduledBatch], block_size: int, windows: Sequence[int | None]
) -> list[tuple[set[int], ...]]:
    """For each of ``batches``, which run in order: per cache group, the slots that matter when it begins.

    ``windows``: per group, positions that a query sees, its own included; None: all.
    """
    live: list[set[int]] = [set() for _ in windows]
    before: list[tuple[set[int], ...]] = []
    for batch in reversed(batches):
        for group, window in enumerate(windows):
            read: set[int] = set()
            written: set[int] = set()
            for request in batch.requests:
                table = request.block_tables[group]
                slots = [table[p // block_size] * block_size + p % block_size for p in range(request.seq_len)]
                written.update(slots[request.num_computed_tokens :])
                read.update(slots[_first_seen(request, window) : request.num_computed_tokens])
            live[group] = (live[group] - written) | (read - written)
        before.append(tuple(set(slots) for slots in live))
    return before[::-1]


def _first_seen(request: ScheduledRequest, window: int | None) -> int:
    """The first position that the request's first token of the step sees."""
    return 0 if window is None else max(0, request.num_computed_tokens - window + 1)
