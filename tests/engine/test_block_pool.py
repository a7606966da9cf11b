"""BlockPool against a plain model: conservation, order of reuse, contents, no double free, clear errors."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from compiled_engine.engine.block_pool import BlockPool
from compiled_engine.engine.prefix_index import PrefixBlock, PrefixIndex, hash_block
from compiled_engine.errors import BlockPoolError, ConfigError

BLOCK_SIZE = 2
contents = st.lists(st.tuples(*[st.integers(0, 1)] * BLOCK_SIZE), min_size=1, max_size=2).map(tuple)


def two_bits(parent_hash: int, token_ids: tuple[int, ...]) -> int:
    return hash_block(parent_hash, token_ids) & 3


class PoolMachine(RuleBasedStateMachine):
    """The model: holders of each block, the content of each, and the free blocks in the order of their reuse."""

    @initialize(num_blocks=st.integers(2, 8))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(two_bits)
        self.holders: Counter[int] = Counter()
        self.contents: dict[int, tuple[tuple[int, ...], ...]] = {}
        self.free_blocks = list(range(1, num_blocks))  # in the order in which they fell free

    def prefix(self, content) -> PrefixBlock:
        prefix = None
        for token_ids in content:
            prefix = self.index.intern(prefix, token_ids)
        return prefix

    @property
    def held(self) -> list[int]:
        return sorted(self.holders.elements())

    @property
    def reuse_order(self) -> list[int]:
        """Empty ones first; among equals those first that fell free first."""
        return sorted(self.free_blocks, key=lambda block: block in self.contents)

    @rule(count=st.integers(0, 9))
    def allocate(self, count):
        """All or nothing, in the order of reuse; what was in the blocks is found no more."""
        expected = self.reuse_order[:count]
        if count > len(self.free_blocks):
            with pytest.raises(BlockPoolError, match=f"cannot allocate {count} blocks, {len(self.free_blocks)} are"):
                self.pool.allocate(count)
            return
        assert self.pool.allocate(count) == expected
        for block in expected:
            self.free_blocks.remove(block)
            if self.contents.pop(block, None) is not None:
                event("evicted")
        self.holders.update(expected)

    @precondition(lambda self: self.holders or self.contents)
    @rule(data=st.data())
    def retain(self, data):
        """A held block gets another holder, a free one with content leaves the free blocks with its content."""
        usable = sorted({*self.holders, *self.contents})
        blocks = data.draw(st.lists(st.sampled_from(usable), min_size=1, max_size=4))
        self.pool.retain(blocks)
        self.holders.update(blocks)
        if any(block in self.free_blocks for block in blocks):
            event("taken back from the free blocks")
        self.free_blocks = [block for block in self.free_blocks if block not in blocks]

    @rule(data=st.data())
    def count_free_blocks_after_retaining(self, data):
        """As many as would be free after retain, which is not done."""
        usable = sorted({*self.holders, *self.contents})
        blocks = data.draw(st.lists(st.sampled_from(usable), unique=True)) if usable else []
        left = len(set(self.free_blocks) - set(blocks))
        assert self.pool.num_free_blocks_after_retaining(blocks) == left

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data):
        blocks = data.draw(st.permutations(self.held))[: data.draw(st.integers(1, len(self.held)))]
        self.pool.free(blocks)
        for block in reversed(blocks):
            self.holders[block] -= 1
            if not self.holders[block]:
                self.free_blocks.append(block)
        self.holders = +self.holders

    @precondition(lambda self: any(block not in self.contents for block in self.holders))
    @rule(data=st.data(), content=contents)
    def publish(self, data, content):
        """One block per prefix: a second one with the same content stays unpublished."""
        block = data.draw(st.sampled_from(sorted(set(self.holders) - set(self.contents))))
        new = content not in self.contents.values()
        assert self.pool.publish(block, self.prefix(content)) is new
        if new:
            self.contents[block] = content

    @rule(data=st.data(), content=contents)
    def wrong_publish_changes_nothing(self, data, content):
        wrong = sorted({*self.free_blocks, *self.contents})
        if wrong:
            block = data.draw(st.sampled_from(wrong))
            reason = "free" if block in self.free_blocks else "published already"
            with pytest.raises(BlockPoolError, match=f"block {block} is {reason}"):
                self.pool.publish(block, self.prefix(content))

    @rule(data=st.data(), good=st.booleans())
    def wrong_ids_change_nothing(self, data, good):
        wrong = data.draw(st.integers(-2, self.pool.num_blocks + 2).filter(lambda block: block not in self.holders))
        blocks = [*self.held, wrong] if good else [wrong]
        with pytest.raises(BlockPoolError, match=f"block {wrong} "):
            self.pool.free(blocks)
        if wrong not in self.contents:
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
    def forget_contents(self):
        self.pool.forget_contents()
        # Those that had content queue behind those that had none.
        self.free_blocks = self.reuse_order
        self.contents.clear()

    @rule()
    def reset(self):
        self.pool.reset()
        self.holders.clear()
        self.contents.clear()
        self.free_blocks = list(range(1, self.pool.num_blocks))

    @invariant()
    def agrees_with_the_model(self):
        """Conservation: each block is held or free once, and a prefix is found exactly where its content is."""
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        usable = self.pool.num_usable_blocks
        assert self.pool.num_free_blocks + len(self.holders) == usable == self.pool.num_blocks - 1
        where = {content: block for block, content in self.contents.items()}
        for block in range(1, self.pool.num_blocks):
            assert self.pool.reference_count(block) == self.holders[block]
            content = self.pool.content(block)
            assert (content is None) == (block not in self.contents)
            assert content is None or content is self.prefix(self.contents[block])
        for first in _ALL_BLOCKS:
            for content in ((first,), *((first, second) for second in _ALL_BLOCKS)):
                assert self.pool.find(self.prefix(content)) == where.get(content)


_ALL_BLOCKS = [(first, second) for first in (0, 1) for second in (0, 1)]

TestBlockPool = PoolMachine.TestCase


def test_free_blocks_are_reused_oldest_first_and_tails_before_heads():
    pool = BlockPool(6)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.free(second)
    pool.free(first)
    assert pool.allocate(5) == [5, *reversed(second), *reversed(first)]


def test_blocks_with_content_are_reused_last_and_least_recently_used_first():
    pool, index = BlockPool(6), PrefixIndex()
    blocks = pool.allocate(4)
    prefixes = [index.intern(None, (number,)) for number in range(3)]
    for block, prefix in zip(blocks, prefixes, strict=False):
        assert pool.publish(block, prefix)
    for block in blocks:
        pool.free([block])
    pool.retain([blocks[0]])  # used again: now the most recent
    pool.free([blocks[0]])
    assert pool.allocate(3) == [5, blocks[3], blocks[1]]
    assert [pool.find(prefix) for prefix in prefixes] == [blocks[0], None, blocks[2]]
    assert pool.allocate(2) == [blocks[2], blocks[0]]


def test_too_small_a_pool_is_refused():
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        BlockPool(1)
    with pytest.raises(BlockPoolError, match="-1"):
        BlockPool(2).allocate(-1)


def test_integrity_check_finds_planted_faults():
    index = PrefixIndex()
    prefix = index.intern(None, (1, 2))

    def check(spoil, message):
        pool = BlockPool(4)
        (block,) = pool.allocate(1)
        pool.publish(block, prefix)
        spoil(pool, block)
        with pytest.raises(BlockPoolError, match=message):
            pool.check_integrity()

    check(lambda pool, block: pool._empty.append(block), "block 1 is 1 time")
    check(lambda pool, block: pool._empty.pop(), "block 3 is 0 time")
    check(lambda pool, block: pool._cached.update({block: None}), "block 1 is 1 time")
    check(lambda pool, block: pool._published.clear(), "not found there")
    check(lambda pool, block: pool._contents.__setitem__(block, None), "does not hold it")
    check(lambda pool, block: pool._reference_counts.__setitem__(block, -1), "block 1 is 0 time")
