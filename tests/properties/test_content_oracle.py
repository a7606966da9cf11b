"""What every layer reads from its paged cache is what was computed for that very prefix, whatever happened before.

``content_machine`` runs requests that come, share, grow, are set back and go. The planted faults show that it would
notice.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from compiled_engine.context import CacheLayer
from compiled_engine.engine.block_pool import BlockPool
from compiled_engine.engine.kv_cache_manager import KVCacheManager
from compiled_engine.engine.prefix_index import PrefixBlock
from compiled_engine.errors import BlockPoolError
from content_machine import ContentMachine

TestContentOracle = ContentMachine.TestCase


# Planted faults: each is a subclass or a patch that breaks one thing, and must be found.


class SwappedLayers(ContentMachine):
    """The graph calls two layers by each other's name, so each writes into the other's cache."""

    def called(self, name):
        return {"layers.0": "layers.3", "layers.3": "layers.0"}.get(name, name)


class CachesSwappedOnRebinding(ContentMachine):
    """Two layers of one shape change caches while requests run, as when a list is bound in another order."""

    def step(self):
        super().step()
        first, second = self.context["layers.0"], self.context["layers.3"]
        first._kv_cache, second._kv_cache = second._kv_cache, first._kv_cache


class SlotOffByOne(ContentMachine):
    """K/V is written one slot too far, in either group."""

    def stage(self, inputs):
        sizes = [group.num_blocks * self.block_size for group in self.limits]
        shifted = [(slots + 1) % size for slots, size in zip(inputs.slot_mappings, sizes, strict=True)]
        return dataclasses.replace(inputs, slot_mappings=tuple(shifted))


class StaleBlockTableColumn(ContentMachine):
    """A block table that stays from step to step, of which a column is not rewritten when a row gets a new request."""

    column = 0

    def stage(self, inputs):
        before = getattr(self, "tables", inputs.block_tables)
        self.tables = tuple(table.copy() for table in inputs.block_tables)
        for table, old, group in zip(self.tables, before, self.limits, strict=True):
            rows = min(len(table), len(old))
            if group.sliding_window is None and min(table.shape[1], old.shape[1]) > self.column:
                kept = old[:rows, self.column]
                table[:rows, self.column] = np.where(kept != 0, kept, table[:rows, self.column])
        return dataclasses.replace(inputs, block_tables=self.tables)


def free_twice(patch):
    """A request that ends gives its blocks back twice; blocks it shared are taken from the others."""
    release = KVCacheManager.release

    def faulty(self, request):
        tables = [list(table) for table in request.block_ids]
        release(self, request)
        for pool, table in zip(self.pools, tables, strict=True):
            pool.free([block for block in table if block and pool.reference_count(block)])

    patch.setattr(KVCacheManager, "release", faulty)


def free_twice_unshared(patch):
    """The same, of blocks that nobody else holds: the pool itself refuses."""
    release = KVCacheManager.release

    def faulty(self, request):
        tables = [list(table) for table in request.block_ids]
        release(self, request)
        for pool, table in zip(self.pools, tables, strict=True):
            pool.free([block for block in table if block])

    patch.setattr(KVCacheManager, "release", faulty)


def free_too_early(patch):
    """A window is taken for one position shorter than it is when blocks are left behind."""
    first_visible = KVCacheManager._first_visible

    def faulty(self, window, position):
        return first_visible(self, window if window is None else max(1, window - 1), position)

    patch.setattr(KVCacheManager, "_first_visible", faulty)


def free_while_held(patch):
    """A running request's first block falls free and is handed to another, while its table still names it."""
    record_computed = KVCacheManager.record_computed

    def faulty(self, request, num_computed_before):
        record_computed(self, request, num_computed_before)
        if num_computed_before == 0:
            self.pools[0].free(request.block_ids[0][:1])

    patch.setattr(KVCacheManager, "record_computed", faulty)
    patch.setattr(BlockPool, "free", lambda self, blocks, free=BlockPool.free: free(self, held(self, blocks)))


def held(pool, blocks):
    return [block for block in dict.fromkeys(blocks) if pool.reference_count(block)]


def sharer_that_writes(patch):
    """A layer that shares another's cache stores its own keys and values there."""
    patch.setattr(CacheLayer, "writes_cache", property(lambda self: self.spec is not None))


def hit_of_an_uncomputed_block(patch):
    """All full blocks of a prompt are published as soon as it is admitted."""
    admit, publish = KVCacheManager.admit, BlockPool.publish

    def faulty(self, request, num_cached_tokens, num_new_tokens):
        count = admit(self, request, num_cached_tokens, num_new_tokens)
        if count and self.enable_prefix_caching:
            prefixes = self._prefixes(request, request.num_tokens // self.block_size)
            for pool, table in zip(self.pools, request.block_ids, strict=True):
                for block, prefix in zip(table, prefixes, strict=False):
                    if block:
                        pool.publish(block, prefix)
        return count

    patch.setattr(KVCacheManager, "admit", faulty)
    patch.setattr(
        BlockPool, "publish", lambda self, block, prefix: self.content(block) is None and publish(self, block, prefix)
    )


def collision_accepted(patch):
    """What the hash finds is taken without a look at the tokens."""
    patch.setattr(PrefixBlock, "continues", lambda self, parent, token_ids: True)


def parent_not_compared(patch):
    """Only the last block's tokens are looked at, not what comes before them."""
    patch.setattr(PrefixBlock, "continues", lambda self, parent, token_ids: self.token_ids == token_ids)


def hit_of_all_tokens(patch):
    """A prompt that is cached as a whole is taken as a whole, and nothing is left to compute."""
    find_cached = KVCacheManager.find_cached

    def faulty(self, request):
        request.token_ids.append(0)
        try:
            return find_cached(self, request)
        finally:
            request.token_ids.pop()
            del request.prefixes[request.num_tokens // self.block_size :]

    patch.setattr(KVCacheManager, "find_cached", faulty)


def content_survives_reuse(patch):
    """A block that is handed out again can still be found under what it held before."""
    take = BlockPool._take

    def faulty(self):
        before = dict(self._published)
        block = take(self)
        self._published.update((prefix, other) for prefix, other in before.items() if other == block)
        return block

    patch.setattr(BlockPool, "_take", faulty)


FAULTS = [
    (SwappedLayers, None, "attention content"),
    (CachesSwappedOnRebinding, None, "attention content"),
    (SlotOffByOne, None, "attention content"),
    (StaleBlockTableColumn, None, "attention"),
    (ContentMachine, free_twice, "counts"),
    (ContentMachine, free_twice_unshared, "counts"),
    (ContentMachine, free_too_early, "attention content"),
    (ContentMachine, free_while_held, "counts attention content"),
    (ContentMachine, sharer_that_writes, "attention content"),
    (ContentMachine, hit_of_an_uncomputed_block, "content"),
    (ContentMachine, collision_accepted, "attention content"),
    (ContentMachine, parent_not_compared, "attention content"),
    (ContentMachine, hit_of_all_tokens, ""),
    (ContentMachine, content_survives_reuse, "counts attention content"),
]


def run_with(machine: type[ContentMachine], eyes: str) -> None:
    """Run ``machine`` until it fails, at most 200 times, looking with these of its eyes."""
    quick = settings(
        max_examples=200,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        print_blob=False,
    )
    seeing = type(machine.__name__, (machine,), {"eyes": frozenset(eyes.split())})
    run_state_machine_as_test(seeing, settings=quick)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "plant", "eyes"),
    [
        pytest.param(machine, plant, eyes, id=f"{plant.__name__ if plant else machine.__name__}-{eyes or 'progress'}")
        for machine, plant, finders in FAULTS
        for eyes in finders.split() or [""]
    ],
)
def test_planted_faults_are_found(machine, plant, eyes, monkeypatch):
    """By each way of looking that must find them, with the others closed. The pools refuse some by themselves; and a
    step that schedules nothing although requests are unfinished is a fault to all."""
    if plant is not None:
        plant(monkeypatch)
    with pytest.raises((AssertionError, BlockPoolError)):
        run_with(machine, eyes)
