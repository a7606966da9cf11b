"""The blocks of one cache group: who holds which, which are free, and what those that are full contain."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence

from compiled_engine.engine.prefix_index import PrefixBlock
from compiled_engine.errors import BlockPoolError, ConfigError

RESERVED_BLOCK = 0


class BlockPool:
    """Hands out block ids ``1 .. num_blocks - 1``. Block 0 is reserved for padding and never handed out.

    Each block in use has a reference count, so that several requests can hold one; at zero it is free. A block that is
    full of computed K/V can be published under its prefix. A free block keeps its content until it is handed out
    again, and whoever wants that very prefix in the meantime takes it back with ``retain``.

    Free blocks without content are handed out first, those freed first before others. Then come those with content, the
    least recently used one first.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigError(
                f"the KV cache has {num_blocks} block(s), at least 2 are needed because block 0 is reserved: raise "
                "kv_cache_memory"
            )
        self.num_blocks = num_blocks
        self.reset()

    def reset(self) -> None:
        """Make every block free and empty, whatever was held before."""
        self._empty: deque[int] = deque(range(1, self.num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # free blocks with content, least recently used first
        self._reference_counts = [0] * self.num_blocks
        self._contents: list[PrefixBlock | None] = [None] * self.num_blocks
        self._published: dict[PrefixBlock, int] = {}

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, those with content included."""
        return len(self._empty) + len(self._cached)

    def reference_count(self, block_id: int) -> int:
        """How many holders the block has; 0 if it is free."""
        return self._reference_counts[self._known(block_id)]

    def content(self, block_id: int) -> PrefixBlock | None:
        """The prefix that the block is published under, None if it is not."""
        return self._contents[self._known(block_id)]

    def find(self, prefix: PrefixBlock) -> int | None:
        """The block that is published under ``prefix``, held or free; None if there is none."""
        return self._published.get(prefix)

    def num_free_blocks_after_retaining(self, block_ids: Iterable[int]) -> int:
        """Blocks that would be left to hand out once these, each named once, were retained."""
        return self.num_free_blocks - sum(self._reference_counts[block_id] == 0 for block_id in block_ids)

    def allocate(self, count: int) -> list[int]:
        """``count`` free blocks with one reference each and no content.

        Raises ``BlockPoolError``, and changes nothing, if fewer are free: look at ``num_free_blocks`` first.
        """
        if count < 0:
            raise BlockPoolError(f"cannot allocate {count} blocks")
        if count > self.num_free_blocks:
            raise BlockPoolError(f"cannot allocate {count} blocks, {self.num_free_blocks} are free")
        return [self._take() for _ in range(count)]

    def retain(self, block_ids: Sequence[int]) -> None:
        """Add one holder to each of these blocks, which must be held or have content.

        Raises ``BlockPoolError`` before anything changes.
        """
        for block_id in block_ids:
            if self._reference_counts[self._known(block_id)] == 0 and self._contents[block_id] is None:
                raise BlockPoolError(f"block {block_id} is free and empty and cannot be shared: allocate it first")
        for block_id in block_ids:
            if self._reference_counts[block_id] == 0:
                del self._cached[block_id]
            self._reference_counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference for each occurrence of an id; raises before anything changes if one has none left.

        Blocks are queued from the last to the first, so that the start of a sequence is reused last.
        """
        for block_id, count in Counter(block_ids).items():
            held = self._reference_counts[self._known(block_id)]
            if count > held:
                raise BlockPoolError(f"block {block_id} would be freed {count} time(s), it has {held} holder(s)")
        for block_id in reversed(block_ids):
            self._reference_counts[block_id] -= 1
            if self._reference_counts[block_id] == 0:
                if self._contents[block_id] is None:
                    self._empty.append(block_id)
                else:
                    self._cached[block_id] = None

    def publish(self, block_id: int, prefix: PrefixBlock) -> bool:
        """Let ``prefix`` be found in this block, which is full of computed K/V and held. It must not be written again.

        False, and no change, if another block is published under the prefix already. Raises ``BlockPoolError`` for a
        block that is free or published.
        """
        if self._reference_counts[self._known(block_id)] == 0:
            raise BlockPoolError(f"block {block_id} is free and cannot be published")
        if self._contents[block_id] is not None:
            raise BlockPoolError(f"block {block_id} is published already")
        if prefix in self._published:
            return False
        self._contents[block_id] = prefix
        self._published[prefix] = block_id
        return True

    def forget_contents(self) -> None:
        """Publish nothing any more. Who holds which block stays as it is."""
        self._empty.extend(self._cached)
        self._cached.clear()
        self._contents = [None] * self.num_blocks
        self._published.clear()

    def check_integrity(self) -> None:
        """Raise ``BlockPoolError`` unless every block is either held or free once, and content is found where it is.

        For tests and idle moments: takes time in the size of the pool.
        """
        empty = Counter(self._empty)
        for block_id in range(self.num_blocks):
            count, content = self._reference_counts[block_id], self._contents[block_id]
            free = block_id != RESERVED_BLOCK and count == 0
            listed = (empty[block_id], int(block_id in self._cached))
            if listed != (int(free and content is None), int(free and content is not None)) or count < 0:
                raise BlockPoolError(
                    f"block {block_id} is {sum(listed)} time(s) in the free lists (empty, with content: {listed}) with "
                    f"{count} holder(s) and content {content}"
                )
            if content is not None and self._published.get(content) != block_id:
                raise BlockPoolError(f"block {block_id} holds {content}, which is not found there")
        if len(self._published) != sum(content is not None for content in self._contents):
            raise BlockPoolError("a prefix is published under a block that does not hold it")

    def _take(self) -> int:
        if self._empty:
            block_id = self._empty.popleft()
        else:
            block_id, _ = self._cached.popitem(last=False)
            content = self._contents[block_id]
            if content is not None:
                del self._published[content]
            self._contents[block_id] = None
        self._reference_counts[block_id] = 1
        return block_id

    def _known(self, block_id: int) -> int:
        if not RESERVED_BLOCK < block_id < self.num_blocks:
            raise BlockPoolError(f"block {block_id} is not one of the pool's blocks 1 to {self.num_blocks - 1}")
        return block_id
