"""Prefixes of token sequences, block by block: one object stands for one prefix, found through a chained hash."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

HashBlock = Callable[[int, tuple[int, ...]], int]


def hash_block(parent_hash: int, token_ids: tuple[int, ...]) -> int:
    """Hash of a prefix from that of the prefix one block shorter and the tokens of its last block.

    It only has to spread well: what it finds is compared before it is used.
    """
    return hash((parent_hash, token_ids))


class PrefixBlock:
    """A prefix of whole blocks: its last block's tokens, and the prefix before them. Compared by identity.

    ``PrefixIndex.intern`` makes them, one for each prefix; so two requests begin with the same tokens exactly if they
    have the same object, and neither hashes nor tokens need to be looked at again.
    """

    __slots__ = ("__weakref__", "hash_value", "parent", "token_ids")

    def __init__(self, parent: PrefixBlock | None, token_ids: tuple[int, ...], hash_value: int) -> None:
        self.parent = parent
        self.token_ids = token_ids
        self.hash_value = hash_value

    def continues(self, parent: PrefixBlock | None, token_ids: tuple[int, ...]) -> bool:
        """Whether this is the prefix ``parent`` followed by ``token_ids``."""
        return self.parent is parent and self.token_ids == token_ids

    def all_token_ids(self) -> list[int]:
        """Every token of the prefix, from its start. Takes time in its length."""
        blocks = [self.token_ids]
        parent = self.parent
        while parent is not None:
            blocks.append(parent.token_ids)
            parent = parent.parent
        return [token for block in reversed(blocks) for token in block]

    def __repr__(self) -> str:
        return f"PrefixBlock({self.all_token_ids()})"


class PrefixIndex:
    """All prefixes that something still refers to: a cache block, a request, or a longer prefix.

    The hash finds candidates and nothing more. A candidate is taken only if its last block has the same tokens and its
    parent is the very same object. By induction over the blocks that means the same whole prefix, however bad the hash
    is: under one of two bits all lookups still are right, only slower.

    ``hash_block`` (parent's hash, tokens of the block) may be replaced, for tests.
    """

    def __init__(self, hash_block: HashBlock = hash_block) -> None:
        self._hash_block = hash_block
        self._by_hash: dict[int, list[weakref.ref[PrefixBlock]]] = {}

    def __len__(self) -> int:
        """Number of prefixes that are alive."""
        return sum(map(len, self._by_hash.values()))

    def intern(self, parent: PrefixBlock | None, token_ids: tuple[int, ...]) -> PrefixBlock:
        """The one object for ``parent`` followed by ``token_ids``; ``parent`` must come from this index."""
        value = self._hash_block(0 if parent is None else parent.hash_value, token_ids)
        for reference in self._by_hash.get(value, ()):
            known = reference()
            if known is not None and known.continues(parent, token_ids):
                return known
        block = PrefixBlock(parent, token_ids, value)
        # The last reference to a prefix is dropped by whoever holds it, and takes its entry here along.
        reference = weakref.ref(block, partial(_remove, self._by_hash, value))
        self._by_hash.setdefault(value, []).append(reference)
        return block


def _remove(
    by_hash: dict[int, list[weakref.ref[PrefixBlock]]], value: int, reference: weakref.ref[PrefixBlock]
) -> None:
    entries = by_hash[value]
    entries.remove(reference)
    if not entries:
        del by_hash[value]
