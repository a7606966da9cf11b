"""Which blocks each request holds in every cache group, and which of them it can take from earlier requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from compiled_engine.engine.block_pool import RESERVED_BLOCK, BlockPool
from compiled_engine.engine.prefix_index import HashBlock, PrefixBlock, PrefixIndex, hash_block
from compiled_engine.engine.request import Request
from compiled_engine.errors import BlockPoolError, ConfigError, RequestError
from compiled_engine.runners.base import CacheGroupLimits


class KVCacheManager:
    """The block tables of all requests: one pool of blocks per cache group, all groups in step.

    ``Request.block_ids`` has an entry for each block of positions. A full-attention group holds them all. A group with
    a sliding window w holds those that the request's next token, at position p, can see (p - w + 1 .. p) and those
    after it; what lies wholly behind is freed and its entry is 0.

    Prefix caching: once the K/V of a full block is computed, the block is published under its prefix, and it is never
    written again. A request that begins alike takes such blocks instead of computing them, also after it was set back.
    Its last known token is always computed, because logits are wanted. A hit of n tokens needs, in every group, all
    blocks that the token at position n can see.

    Blocks are given in every group or in none.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroupLimits],
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        hash_block: HashBlock = hash_block,
    ) -> None:
        if not groups:
            raise ConfigError("the model has no cache group: a model without any KV cache cannot be served")
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.windows = tuple(group.sliding_window for group in groups)
        self.pools = tuple(BlockPool(group.num_blocks) for group in groups)
        self._index = PrefixIndex(hash_block)

    @property
    def num_groups(self) -> int:
        return len(self.pools)

    def least_blocks(self, num_tokens: int) -> tuple[int, ...]:
        """Per group, the fewest blocks with which a request can compute ``num_tokens`` tokens, be it one by one."""
        full = self._blocks_for(num_tokens)
        return tuple(
            # A token touches at most window positions in a row, which may begin at the last slot of a block.
            full if window is None else min(full, self._blocks_for(window - 1) + 1)
            for window in self.windows
        )

    def check_fits(self, request: Request) -> None:
        """Raise ``RequestError`` if ``request`` could not run to its end with the whole cache to itself."""
        least = self.least_blocks(request.max_cached_tokens)
        for index, (needed, pool) in enumerate(zip(least, self.pools, strict=True)):
            if needed > pool.num_usable_blocks:
                raise RequestError(
                    f"the request needs {needed} cache blocks of {self.block_size} tokens{self._group_name(index)} for "
                    f"{request.num_prompt_tokens} prompt and up to {request.max_output_tokens} new tokens, the whole "
                    f"cache has {pool.num_usable_blocks}: shorten the prompt, lower max_tokens, or raise "
                    "kv_cache_memory"
                )

    def find_cached(self, request: Request) -> int:
        """How many of the request's first tokens ``admit`` can take from the cache: whole blocks, never all tokens.

        The largest number for which every group has what it needs. One look at each block per group: of full groups
        the first block that is missing ends the search; of sliding groups the run of blocks that are there up to each
        block is compared with what the window behind it reaches.
        """
        if not self.enable_prefix_caching:
            return 0
        prefixes = self._prefixes(request, (request.num_tokens - 1) // self.block_size)
        for pool, window in zip(self.pools, self.windows, strict=True):
            if window is None:
                missing = (index for index, prefix in enumerate(prefixes) if pool.find(prefix) is None)
                prefixes = prefixes[: next(missing, len(prefixes))]
        suits_all = [True] * (len(prefixes) + 1)
        for pool, window in zip(self.pools, self.windows, strict=True):
            if window is not None:
                run = 0
                for count, prefix in enumerate(prefixes, 1):
                    run = 0 if pool.find(prefix) is None else run + 1
                    reach = count - self._first_visible(window, count * self.block_size)
                    # With a window of 1 nothing behind is seen; still, only what was computed once counts as a hit.
                    suits_all[count] &= run >= max(1, reach)
        return max(count for count, suits in enumerate(suits_all) if suits) * self.block_size

    def admit(self, request: Request, num_cached_tokens: int, num_new_tokens: int) -> int:
        """Give blocks to a request that has none; returns how many of ``num_new_tokens`` can be computed now.

        The first ``num_cached_tokens`` come from the cache and must be what ``find_cached`` has just said. Full groups
        get blocks for all tokens known, so that a prompt cannot run out of them half-way; sliding groups for this step,
        which is cut short where they have too few. 0, and no change, if there are too few for any token.
        """
        num_cached_blocks = num_cached_tokens // self.block_size
        num_known_blocks = self._blocks_for(request.num_tokens)
        hits_by_group: list[list[int]] = []
        for pool, window in zip(self.pools, self.windows, strict=True):
            first = self._first_visible(window, num_cached_tokens)
            hits = [_published(pool, prefix) for prefix in request.prefixes[first:num_cached_blocks]]
            num_free = pool.num_free_blocks_after_retaining(hits)
            if window is None and num_free < num_known_blocks - num_cached_blocks:
                return 0
            num_new_tokens = min(num_new_tokens, num_free * self.block_size)
            hits_by_group.append(hits)
        if num_new_tokens == 0:
            return 0
        num_blocks = self._blocks_for(num_cached_tokens + num_new_tokens)
        for pool, window, table, hits in zip(self.pools, self.windows, request.block_ids, hits_by_group, strict=True):
            pool.retain(hits)
            end = num_known_blocks if window is None else num_blocks
            unseen = [RESERVED_BLOCK] * (num_cached_blocks - len(hits))
            table[:] = unseen + hits + pool.allocate(end - num_cached_blocks)
        return num_new_tokens

    def grow(self, request: Request, num_new_tokens: int) -> int:
        """Add the blocks that the next ``num_new_tokens`` lack; returns how many tokens can be computed now.

        Fewer where a group has too few blocks; 0, and no change, if there are none for any token.
        """
        size, num_computed = self.block_size, request.num_computed_tokens
        for pool, table in zip(self.pools, request.block_ids, strict=True):
            num_new_tokens = min(num_new_tokens, (len(table) + pool.num_free_blocks) * size - num_computed)
        num_blocks = self._blocks_for(num_computed + num_new_tokens)
        for pool, table in zip(self.pools, request.block_ids, strict=True):
            if num_blocks > len(table):
                table.extend(pool.allocate(num_blocks - len(table)))
        return num_new_tokens

    def record_computed(self, request: Request, num_computed_before: int) -> None:
        """A step has raised ``request.num_computed_tokens``: publish what is full now, free what windows left."""
        now = request.num_computed_tokens
        num_full_before, num_full = num_computed_before // self.block_size, now // self.block_size
        if self.enable_prefix_caching and num_full > num_full_before:
            prefixes = self._prefixes(request, num_full)
            for pool, table in zip(self.pools, request.block_ids, strict=True):
                for index in range(num_full_before, num_full):
                    pool.publish(table[index], prefixes[index])
        for pool, window, table in zip(self.pools, self.windows, request.block_ids, strict=True):
            start, end = self._first_visible(window, num_computed_before), self._first_visible(window, now)
            if end > start:
                pool.free(table[start:end])
                table[start:end] = [RESERVED_BLOCK] * (end - start)

    def release(self, request: Request) -> None:
        """Take all blocks from the request. What they contain can be found until they are handed out again."""
        for pool, table in zip(self.pools, request.block_ids, strict=True):
            pool.free([block_id for block_id in table if block_id != RESERVED_BLOCK])
            table.clear()

    def reset(self) -> None:
        """Make every block free and empty, whatever was held before."""
        for pool in self.pools:
            pool.reset()

    def forget_contents(self) -> None:
        """Let nothing that was computed so far be found any more; requests keep the blocks they hold."""
        for pool in self.pools:
            pool.forget_contents()

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise ``BlockPoolError`` unless ``requests`` hold the blocks as often as the pools count. For tests."""
        holders = [Counter[int]() for _ in self.pools]
        for request in requests:
            for counter, table in zip(holders, request.block_ids, strict=True):
                counter.update(block_id for block_id in table if block_id != RESERVED_BLOCK)
        for index, (pool, counter) in enumerate(zip(self.pools, holders, strict=True)):
            pool.check_integrity()
            for block_id in range(1, pool.num_blocks):
                if pool.reference_count(block_id) != counter[block_id]:
                    raise BlockPoolError(
                        f"block {block_id} of cache group {index} has {pool.reference_count(block_id)} holder(s) by "
                        f"the pool's count and {counter[block_id]} by the requests'"
                    )

    def _prefixes(self, request: Request, count: int) -> list[PrefixBlock]:
        """The prefixes of the request's first ``count`` blocks. Each is hashed once in the request's life."""
        known, size = request.prefixes, self.block_size
        for start in range(len(known) * size, count * size, size):
            token_ids = tuple(request.token_ids[start : start + size])
            known.append(self._index.intern(known[-1] if known else None, token_ids))
        return known[:count]

    def _first_visible(self, window: int | None, position: int) -> int:
        """Index of the first block that a token at ``position`` can see."""
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _group_name(self, index: int) -> str:
        if self.num_groups == 1:
            return ""
        window = self.windows[index]
        kind = "full attention" if window is None else f"sliding window of {window}"
        return f" in cache group {index} ({kind})"


def _published(pool: BlockPool, prefix: PrefixBlock) -> int:
    block_id = pool.find(prefix)
    if block_id is None:
        raise BlockPoolError(f"no block holds {prefix}: it was evicted after it had been found")
    return block_id
