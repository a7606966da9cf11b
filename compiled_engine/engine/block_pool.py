"""The blocks of the KV cache: who holds which, and which are free."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from compiled_engine.errors import BlockPoolError, ConfigError

RESERVED_BLOCK = 0


class BlockPool:
    """Hands out block ids ``1 .. num_blocks - 1``. Block 0 is reserved for padding and never handed out.

    Each block in use has a reference count, so that several requests can hold one. Blocks whose count falls to zero
    are free; of the free blocks the one that was freed first is handed out first.
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
        """Make every block free, whatever was held before."""
        self._free: deque[int] = deque(range(1, self.num_blocks))
        self._reference_counts = [0] * self.num_blocks

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def reference_count(self, block_id: int) -> int:
        """How many holders the block has; 0 if it is free."""
        return self._reference_counts[self._known(block_id)]

    def allocate(self, count: int) -> list[int] | None:
        """``count`` free blocks with one reference each, or None (and no change) if fewer are free."""
        if count < 0:
            raise BlockPoolError(f"cannot allocate {count} blocks")
        if count > len(self._free):
            return None
        blocks = [self._free.popleft() for _ in range(count)]
        for block_id in blocks:
            self._reference_counts[block_id] = 1
        return blocks

    def retain(self, block_ids: Sequence[int]) -> None:
        """Add one holder to each of these blocks, all of which must be in use. Raises before anything changes."""
        for block_id in block_ids:
            if self._reference_counts[self._known(block_id)] == 0:
                raise BlockPoolError(f"block {block_id} is free and cannot be shared: allocate it first")
        for block_id in block_ids:
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
                self._free.append(block_id)

    def check_integrity(self) -> None:
        """Raise ``BlockPoolError`` unless every block is either free once, or held. For tests and idle moments."""
        free = Counter(self._free)
        for block_id in range(self.num_blocks):
            expected = int(block_id != RESERVED_BLOCK and self._reference_counts[block_id] == 0)
            if free[block_id] != expected or self._reference_counts[block_id] < 0:
                raise BlockPoolError(
                    f"block {block_id} is {free[block_id]} time(s) in the free list with "
                    f"{self._reference_counts[block_id]} holder(s)"
                )

    def _known(self, block_id: int) -> int:
        if not RESERVED_BLOCK < block_id < self.num_blocks:
            raise BlockPoolError(f"block {block_id} is not one of the pool's blocks 1 to {self.num_blocks - 1}")
        return block_id
