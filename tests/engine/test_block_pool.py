"""BlockPool against a plain model: conservation, all-or-nothing, no double free, clear errors."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from compiled_engine.engine.block_pool import BlockPool
from compiled_engine.errors import BlockPoolError, ConfigError

NUM_BLOCKS = 6


class PoolMachine(RuleBasedStateMachine):
    """The model is the number of holders of each block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.holders: Counter[int] = Counter()

    @property
    def held(self) -> list[int]:
        return sorted(self.holders.elements())

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count):
        free = NUM_BLOCKS - 1 - len(self.holders)
        blocks = self.pool.allocate(count)
        if count > free:
            assert blocks is None
            return
        assert len(set(blocks)) == count
        assert not set(blocks) & set(self.holders)
        assert 0 not in blocks
        self.holders.update(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def retain(self, data):
        blocks = data.draw(st.lists(st.sampled_from(self.held), min_size=1, max_size=4))
        self.pool.retain(blocks)
        self.holders.update(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data):
        blocks = data.draw(st.permutations(self.held))[: data.draw(st.integers(1, len(self.held)))]
        self.pool.free(blocks)
        self.holders -= Counter(blocks)

    @rule(data=st.data(), good=st.booleans())
    def wrong_free_changes_nothing(self, data, good):
        wrong = data.draw(st.integers(-2, NUM_BLOCKS + 2).filter(lambda block: block not in self.holders))
        blocks = [*self.held, wrong] if good else [wrong]
        with pytest.raises(BlockPoolError, match=f"block {wrong} "):
            self.pool.free(blocks)
        with pytest.raises(BlockPoolError, match=f"block {wrong} "):
            self.pool.retain(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def freeing_too_often_changes_nothing(self, data):
        block = data.draw(st.sampled_from(self.held))
        times = self.holders[block] + 1
        with pytest.raises(BlockPoolError, match=f"block {block} would be freed {times} time"):
            self.pool.free([block] * times)

    @rule()
    def reset(self):
        self.pool.reset()
        self.holders.clear()

    @invariant()
    def conserved(self):
        self.pool.check_integrity()
        assert self.pool.num_free_blocks + len(self.holders) == self.pool.num_usable_blocks == NUM_BLOCKS - 1
        for block in range(1, NUM_BLOCKS):
            assert self.pool.reference_count(block) == self.holders[block]


TestBlockPool = PoolMachine.TestCase


def test_free_blocks_are_reused_oldest_first_and_tails_before_heads():
    pool = BlockPool(6)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.free(second)
    pool.free(first)
    assert pool.allocate(5) == [5, *reversed(second), *reversed(first)]


def test_too_small_a_pool_is_refused():
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        BlockPool(1)


def test_integrity_check_finds_planted_faults():
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool._free.append(block)
    with pytest.raises(BlockPoolError, match=f"block {block} "):
        pool.check_integrity()
    pool.reset()
    pool._free.pop()
    with pytest.raises(BlockPoolError, match="block 3 is 0 time"):
        pool.check_integrity()
