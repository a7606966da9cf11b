"""Batches with the sizes of recorded steps: the same requests, lengths and order, random tokens, own blocks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from compiled_engine.compile.records import ScheduledShare
from compiled_engine.errors import ConfigError
from compiled_engine.ops.sampling import greedy_batch
from compiled_engine.runners.base import RunnerLimits
from compiled_engine.runners.batch import ScheduledBatch, ScheduledRequest
from compiled_engine_debug.replay.blocks import BlockTables, Holder
from compiled_engine_debug.steps import Steps

Shares = Sequence[ScheduledShare]


@dataclass(frozen=True)
class ReplayStep:
    """A step to run. ``position``: of the step in the recording that it stands for; None: it is made up."""

    batch: ScheduledBatch
    position: int | None


def replay_steps(steps: Steps, limits: RunnerLimits, seed: int = 0, most: int | None = None) -> Iterator[ReplayStep]:
    """The first ``most`` recorded steps (None: all), and one more: a step that failed has left no record.

    Where requests begin with tokens that were in the cache already, they share the blocks of one that computed so many;
    if the recording has none, steps are made up that compute them. Everything is sampled greedily. Raises
    ``ConfigError`` for steps that do not fit into ``limits``.
    """
    count = len(steps) if most is None else min(most, len(steps))
    recorded = [steps.requests(position) for position in range(count)]
    return _Schedule(recorded, limits, seed).steps()


class _Schedule:
    def __init__(self, recorded: Sequence[Shares], limits: RunnerLimits, seed: int) -> None:
        self._recorded = recorded
        self._limits = limits
        self._random = random.Random(seed)
        self._tables = BlockTables(limits.cache_groups, limits.block_size)
        self._holders: dict[str, Holder] = {}
        self._tokens: dict[str, list[int]] = {}
        self._ends = _last_steps(recorded)

    def steps(self) -> Iterator[ReplayStep]:
        for position, shares in enumerate(self._recorded):
            self._check(shares, f"step {position} of the recording")
            for share in shares:
                if not self._goes_on(share):
                    yield from self._begin(share)
            yield ReplayStep(self._batch(shares), position)
            # Those of the last step go on in the step after it.
            if position < len(self._recorded) - 1:
                done = [share.request_id for share in shares if (share.request_id, position) in self._ends]
                self._tables.finish(self._holders.pop(request_id) for request_id in done)
        going_on = self._one_more_each()
        if going_on:
            yield ReplayStep(self._batch(going_on), None)

    def _check(self, shares: Shares, where: str) -> None:
        limits = self._limits
        num_tokens = sum(share.num_scheduled_tokens for share in shares)
        if not shares or len({share.request_id for share in shares}) < len(shares):
            raise ConfigError(f"{where} has no request, or one twice")
        if any(share.num_scheduled_tokens < 1 or share.num_computed_tokens < 0 for share in shares):
            raise ConfigError(f"{where} has a request without tokens")
        if num_tokens > limits.max_num_batched_tokens or len(shares) > limits.max_num_seqs:
            raise ConfigError(
                f"{where} has {num_tokens} tokens of {len(shares)} requests, and at most "
                f"{limits.max_num_batched_tokens} of {limits.max_num_seqs} fit: leave these settings as recorded"
            )
        longest = max(share.num_computed_tokens + share.num_scheduled_tokens for share in shares)
        if longest > limits.max_model_len:
            raise ConfigError(f"{where} has a request of {longest} tokens, and max_model_len is {limits.max_model_len}")

    def _goes_on(self, share: ScheduledShare) -> bool:
        holder = self._holders.get(share.request_id)
        return holder is not None and holder.num_computed == share.num_computed_tokens

    def _begin(self, share: ScheduledShare) -> Iterator[ReplayStep]:
        """A request is admitted, maybe again; made-up steps compute what nobody has computed for it."""
        known = share.request_id in self._tokens
        holder = Holder(share.request_id, self._tokens.setdefault(share.request_id, []))
        self._tables.add(holder)
        self._holders[share.request_id] = holder
        num_cached = share.num_computed_tokens
        if num_cached and not self._tables.share(holder, num_cached, anything=not known):
            yield from self._compute(holder, num_cached)

    def _compute(self, holder: Holder, num_tokens: int) -> Iterator[ReplayStep]:
        most = self._limits.max_num_batched_tokens
        while holder.num_computed < num_tokens:
            length = min(most, num_tokens - holder.num_computed)
            share = ScheduledShare(holder.request_id, holder.num_computed, length, samples=False)
            yield ReplayStep(self._batch([share]), None)

    def _batch(self, shares: Shares) -> ScheduledBatch:
        requests = tuple(self._row(share) for share in shares)
        positions = [request.seq_len for request in requests if request.samples]
        sampling = replace(greedy_batch(len(positions)), positions=torch.tensor(positions, dtype=torch.int64))
        return ScheduledBatch(requests, sampling)

    def _row(self, share: ScheduledShare) -> ScheduledRequest:
        holder = self._holders[share.request_id]
        end = share.num_computed_tokens + share.num_scheduled_tokens
        self._tables.grow(holder, end)
        # Token 0 is that of padding.
        holder.tokens.extend(
            self._random.randrange(min(1, self._limits.vocab_size - 1), self._limits.vocab_size)
            for _ in range(end - len(holder.tokens))
        )
        holder.num_computed = end
        return ScheduledRequest(
            request_id=share.request_id,
            token_ids=tuple(holder.tokens[share.num_computed_tokens : end]),
            num_computed_tokens=share.num_computed_tokens,
            block_tables=tuple(map(tuple, holder.tables)),
            samples=share.samples,
        )

    def _one_more_each(self) -> Shares:
        """A token for each request of the last step, as far as they fit."""
        limits, going_on = self._limits, []
        for share in (self._recorded[-1] if self._recorded else ())[: limits.max_num_batched_tokens]:
            holder = self._holders[share.request_id]
            end = holder.num_computed + 1
            if end <= limits.max_model_len and self._tables.has_room(holder, end):
                self._tables.grow(holder, end)
                going_on.append(ScheduledShare(share.request_id, holder.num_computed, 1, samples=True))
        return going_on


def _last_steps(recorded: Sequence[Shares]) -> set[tuple[str, int]]:
    """Request and step, wherever a request runs for the last time, or for the last time before it is set back."""
    ends: set[tuple[str, int]] = set()
    latest: dict[str, tuple[int, int]] = {}
    for position, shares in enumerate(recorded):
        for share in shares:
            before = latest.get(share.request_id)
            if before is not None and before[1] != share.num_computed_tokens:
                ends.add((share.request_id, before[0]))
            latest[share.request_id] = (position, share.num_computed_tokens + share.num_scheduled_tokens)
    return ends | {(request_id, position) for request_id, (position, _) in latest.items()}
