"""PrefixIndex: one object per prefix, however bad the hash, and none that nobody refers to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.engine.prefix_index import PrefixBlock, PrefixIndex, hash_block

blocks = st.tuples(st.integers(0, 1), st.integers(0, 1))
sequences = st.lists(st.lists(blocks, min_size=1, max_size=4), min_size=1, max_size=12)


def two_bits(parent_hash: int, token_ids: tuple[int, ...]) -> int:
    return hash_block(parent_hash, token_ids) & 3


def intern_all(index: PrefixIndex, sequence: list[tuple[int, ...]]) -> PrefixBlock:
    prefix = None
    for token_ids in sequence:
        prefix = index.intern(prefix, token_ids)
    return prefix


@given(sequences, st.sampled_from([hash_block, two_bits, lambda parent_hash, token_ids: 0]))
def test_same_object_means_same_prefix(work, hash_function):
    """Identity equals equality of all tokens, also under hashes that collide all the time."""
    index = PrefixIndex(hash_function)
    prefixes = [intern_all(index, sequence) for sequence in work]
    for first, sequence in zip(prefixes, work, strict=True):
        assert first.all_token_ids() == [token for block in sequence for token in block]
        for second, other in zip(prefixes, work, strict=True):
            assert (first is second) == (sequence == other)


@given(sequences, st.data())
def test_prefixes_that_nobody_refers_to_are_gone(work, data):
    """What is alive is exactly what is held, with the prefixes of it; a prefix that comes back is found again."""
    index = PrefixIndex(two_bits)
    held = {tuple(sequence): intern_all(index, sequence) for sequence in work}
    for sequence in data.draw(st.lists(st.sampled_from(sorted(held)), unique=True)):
        del held[sequence]
    assert len(index) == len({sequence[: i + 1] for sequence in held for i in range(len(sequence))})
    for sequence, prefix in held.items():
        assert intern_all(index, list(sequence)) is prefix
    held.clear()
    prefix = None
    assert len(index) == 0


def test_each_block_is_hashed_with_its_parents_hash():
    calls = []

    def recording(parent_hash, token_ids):
        calls.append((parent_hash, token_ids))
        return len(calls) * 10

    index = PrefixIndex(recording)
    last = index.intern(index.intern(None, (1, 2)), (3, 4))
    assert calls == [(0, (1, 2)), (10, (3, 4))]
    assert repr(last) == "PrefixBlock([1, 2, 3, 4])"


def test_a_very_long_prefix_can_be_dropped():
    """Objects that refer to each other in a long chain are freed without deep recursion."""
    index = PrefixIndex()
    prefix = intern_all(index, [(0,)] * 100_000)
    assert len(index) == 100_000
    del prefix
    assert len(index) == 0
