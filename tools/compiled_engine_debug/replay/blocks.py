"""Cache blocks for recorded requests: a small allocator that knows how long each request is needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from compiled_engine.engine.block_pool import RESERVED_BLOCK, BlockPool
from compiled_engine.errors import ConfigError
from compiled_engine.runners.base import CacheGroupLimits


@dataclass(eq=False)
class Holder:
    """One request between two preemptions: its tokens so far, and per cache group its block table."""

    request_id: str
    tokens: list[int]
    tables: list[list[int]] = field(default_factory=list)
    num_computed: int = 0


class BlockTables:
    """Gives blocks to holders, and lets one share the blocks of another that began alike.

    Blocks of holders that are done stay until they are wanted, as those of the engine's prefix cache do.
    """

    def __init__(self, groups: Sequence[CacheGroupLimits], block_size: int) -> None:
        self._block_size = block_size
        self._windows = tuple(group.sliding_window for group in groups)
        self._pools = tuple(BlockPool(group.num_blocks) for group in groups)
        self._active: list[Holder] = []
        self._done: list[Holder] = []

    def add(self, holder: Holder) -> None:
        """Take in a holder that has no blocks."""
        holder.tables = [[] for _ in self._pools]
        self._active.append(holder)

    def share(self, holder: Holder, num_tokens: int, anything: bool) -> bool:
        """Give ``holder`` its first ``num_tokens`` from another one; False, and no change, if none has them.

        ``anything``: nobody knows its tokens so far, so that it can take over those of the other.
        """
        if num_tokens % self._block_size:
            return False
        for donor in (*reversed(self._active), *reversed(self._done)):
            if donor is holder or not self._can_give(donor, num_tokens):
                continue
            if anything or donor.tokens[:num_tokens] == holder.tokens[:num_tokens]:
                self._take_over(holder, donor, num_tokens)
                return True
        return False

    def grow(self, holder: Holder, end: int) -> None:
        """Give ``holder`` the blocks of positions up to ``end``, and take what its windows have left behind.

        Raises ``ConfigError`` when the cache is too small.
        """
        for group, (pool, window, table) in enumerate(zip(self._pools, self._windows, holder.tables, strict=True)):
            first = min(self._first_visible(window, holder.num_computed), len(table))
            pool.free([block for block in table[:first] if block != RESERVED_BLOCK])
            table[:first] = [RESERVED_BLOCK] * first
            missing = -(-end // self._block_size) - len(table)
            if not self._make_room(group, missing):
                raise ConfigError(
                    f"request {holder.request_id!r} needs {missing} more cache blocks, and {pool.num_free_blocks} of "
                    f"{pool.num_usable_blocks} are free: give a larger --kv-cache-memory"
                )
            table.extend(pool.allocate(max(0, missing)))

    def has_room(self, holder: Holder, end: int) -> bool:
        """Whether ``grow`` would find blocks enough."""
        return all(
            self._make_room(group, -(-end // self._block_size) - len(table))
            for group, table in enumerate(holder.tables)
        )

    def finish(self, holders: Iterable[Holder]) -> None:
        """``holders`` run no more."""
        for holder in holders:
            self._active.remove(holder)
            self._done.append(holder)

    def _can_give(self, donor: Holder, num_tokens: int) -> bool:
        num_blocks = num_tokens // self._block_size
        return donor.num_computed >= num_tokens and all(
            len(table) >= num_blocks
            and RESERVED_BLOCK not in table[self._first_visible(window, num_tokens) : num_blocks]
            for window, table in zip(self._windows, donor.tables, strict=True)
        )

    def _take_over(self, holder: Holder, donor: Holder, num_tokens: int) -> None:
        num_blocks = num_tokens // self._block_size
        for pool, window, table, given in zip(self._pools, self._windows, holder.tables, donor.tables, strict=True):
            first = self._first_visible(window, num_tokens)
            shared = given[first:num_blocks]
            pool.retain(shared)
            table[:] = [RESERVED_BLOCK] * (num_blocks - len(shared)) + shared
        holder.tokens[:num_tokens] = donor.tokens[:num_tokens]
        holder.num_computed = num_tokens

    def _make_room(self, group: int, wanted: int) -> bool:
        """Take blocks from those that are done, the longest done first, each from its end; whether there are enough."""
        pool = self._pools[group]
        for holder in self._done:
            table = holder.tables[group]
            while table and pool.num_free_blocks < wanted:
                block = table.pop()
                if block != RESERVED_BLOCK:
                    pool.free([block])
        self._done = [holder for holder in self._done if any(holder.tables)]
        return pool.num_free_blocks >= wanted

    def _first_visible(self, window: int | None, position: int) -> int:
        """Index of the first block that a token at ``position`` can see."""
        return 0 if window is None else max(0, position - window + 1) // self._block_size
