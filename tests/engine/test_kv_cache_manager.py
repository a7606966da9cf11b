"""KVCacheManager: what windows need at most, what a hit is made of, hashing once, order of reuse, clear errors.

The state machine of ``test_scheduler`` drives it together with the scheduler; here are its numbers and examples.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.engine.kv_cache_manager import KVCacheManager
from compiled_engine.engine.prefix_index import hash_block
from compiled_engine.engine.request import Request
from compiled_engine.errors import BlockPoolError, ConfigError, RequestError
from compiled_engine.runners.base import CacheGroupLimits

FULL, SLIDING = CacheGroupLimits(20), CacheGroupLimits(20, 5)


def make_request(token_ids, output=4, groups=1) -> Request:
    return Request("r", token_ids, arrival=0, max_output_tokens=output, num_cache_groups=groups)


def run(cache: KVCacheManager, request: Request, chunk: int = 100) -> int:
    """Compute all tokens of a request in chunks; how many of them came from the cache."""
    hit = cache.find_cached(request)
    first = cache.admit(request, hit, min(chunk, request.num_tokens - hit))
    assert first > 0
    request.num_computed_tokens = hit
    compute(cache, request, first)
    while request.num_computed_tokens < request.num_tokens:
        compute(cache, request, min(chunk, request.num_tokens - request.num_computed_tokens))
    return hit


def compute(cache: KVCacheManager, request: Request, count: int) -> None:
    before = request.num_computed_tokens
    count = cache.grow(request, count)
    assert count > 0
    request.num_computed_tokens += count
    cache.record_computed(request, before)


@given(st.integers(1, 5), st.none() | st.integers(1, 9), st.integers(1, 40))
def test_least_blocks_is_what_the_worst_token_needs(block_size, window, num_tokens):
    """Equal to a search through every token that a request can come to."""
    worst = 0
    for position in range(num_tokens):
        first = 0 if window is None else max(0, position - window + 1)
        worst = max(worst, len({seen // block_size for seen in range(first, position + 1)}))
    cache = KVCacheManager([CacheGroupLimits(2, window)], block_size)
    assert cache.least_blocks(num_tokens) == (worst,)


@given(st.integers(1, 4), st.integers(1, 7), st.integers(1, 30), st.integers(1, 9), st.data())
def test_chunks_are_cut_to_the_free_blocks_of_a_sliding_group(block_size, window, num_tokens, budget, data):
    """With any number of blocks from ``least_blocks`` on a request comes to its end, in the longest chunks possible."""
    least = KVCacheManager([CacheGroupLimits(2, window)], block_size).least_blocks(num_tokens)[0]
    usable = data.draw(st.integers(least, least + 4))
    cache = KVCacheManager([CacheGroupLimits(usable + 1, window)], block_size)
    request = make_request(range(num_tokens), output=1)
    cache.check_fits(request)
    while (start := request.num_computed_tokens) < num_tokens:
        wanted = min(budget, num_tokens - start)
        count = cache.grow(request, wanted) if start else cache.admit(request, 0, wanted)
        first = max(0, start - window + 1) // block_size
        fits = [n for n in range(1, wanted + 1) if (start + n - 1) // block_size - first + 1 <= usable]
        assert count == fits[-1]
        request.num_computed_tokens += count
        cache.record_computed(request, start)
        cache.check_integrity([request])


def test_a_long_request_fits_into_a_small_sliding_group():
    """A sliding group holds a window and a chunk at most, whatever the length; a full group holds everything."""
    cache = KVCacheManager([CacheGroupLimits(60), CacheGroupLimits(6, 5)], 2)
    request = make_request(range(100), groups=2)
    cache.check_fits(request)
    run(cache, request, chunk=3)
    assert sum(block != 0 for block in request.block_ids[0]) == 50
    assert request.block_ids[1][:48] == [0] * 48
    assert all(request.block_ids[1][48:])
    cache.check_integrity([request])
    cache.release(request)
    cache.check_integrity([])
    small = KVCacheManager([CacheGroupLimits(60), CacheGroupLimits(3, 5)], 2)
    with pytest.raises(
        RequestError, match=r"needs 3 .* of 2 tokens in cache group 1 \(sliding window of 5\) .* has 2: "
    ):
        small.check_fits(request)
    with pytest.raises(RequestError, match=r"needs 60 cache blocks .* in cache group 0 \(full attention\) .* has 59: "):
        cache.check_fits(make_request(range(117), groups=2))


@pytest.mark.parametrize(("num_tokens", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8)])
@pytest.mark.parametrize("groups", [[FULL], [SLIDING], [FULL, SLIDING], [CacheGroupLimits(20, 2)]])
def test_the_last_token_is_always_computed(num_tokens, hit, groups):
    """Also when the prompt is a multiple of the block size and every block of it is cached."""
    cache = KVCacheManager(groups, 4)
    for expected in (0, hit):
        request = make_request(range(num_tokens), groups=len(groups))
        assert run(cache, request) == expected
        cache.release(request)


def test_a_hit_needs_the_blocks_that_the_next_token_sees():
    """A hybrid model takes the longest length at which its sliding group still has the window before it."""
    cache = KVCacheManager([CacheGroupLimits(20), CacheGroupLimits(7, 5)], 2)
    first = make_request(range(12), groups=2)
    run(cache, first, chunk=1)
    last_held = first.block_ids[1][-2:]
    cache.release(first)
    full, sliding = cache.pools
    again = make_request([*range(12), 99], groups=2)
    assert cache.find_cached(again) == 12
    prefixes = again.prefixes

    def present(pool):
        return [pool.find(prefix) is not None for prefix in prefixes]

    # The window left blocks 0 to 3 behind one by one; 5 and 4 were freed at the end. Use block 3 once more.
    assert [sliding.find(prefix) for prefix in prefixes[4:]] == last_held
    block = sliding.find(prefixes[3])
    sliding.retain([block])
    sliding.free([block])
    taken = sliding.allocate(3)
    assert present(full) == [True] * 6
    assert present(sliding) == [False] * 3 + [True] * 3
    # The token at position 12 sees 8 to 12: blocks 4 and 5.
    assert cache.find_cached(again) == 12
    taken += sliding.allocate(1)
    assert present(sliding) == [False] * 3 + [True, True, False]
    # The token at position 10 sees 6 to 10: blocks 3 and 4.
    assert cache.find_cached(again) == 10
    assert cache.find_cached(make_request(range(9), groups=2)) == 0
    taken += sliding.allocate(1)
    assert cache.find_cached(again) == 0
    # A block that is missing in the full group ends every hit.
    sliding.free(taken)
    second = make_request(range(12), groups=2)
    assert run(cache, second) == 0
    cache.release(second)
    assert present(sliding) == [True] * 6
    full.allocate(19 - 5)
    assert present(full) == [True] * 5 + [False]
    assert cache.find_cached(again) == 10


def test_a_hit_takes_blocks_from_the_free_ones():
    """Blocks that are found and free are not handed out twice: all or nothing counts them."""
    cache = KVCacheManager([CacheGroupLimits(5)], 2)
    first = make_request(range(6))
    run(cache, first)
    cache.release(first)
    second = make_request([*range(6), 7, 8, 9])
    assert cache.find_cached(second) == 6
    assert cache.admit(second, 6, 3) == 0  # 3 blocks found, 2 to allocate, 4 in all
    assert not any(second.block_ids)
    assert cache.pools[0].num_free_blocks == 4
    third = make_request([*range(6), 7])
    assert cache.admit(third, cache.find_cached(third), 1)
    assert cache.pools[0].num_free_blocks == 0
    cache.check_integrity([third])


def test_requests_share_blocks_and_write_their_own():
    cache = KVCacheManager([CacheGroupLimits(20)], 2)
    requests = [make_request([1, 2, 3, 4, number]) for number in range(3)]
    assert [run(cache, request) for request in requests] == [0, 4, 4]
    tables = [request.block_ids[0] for request in requests]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    assert cache.pools[0].reference_count(tables[0][0]) == 3
    cache.release(requests[0])
    cache.check_integrity(requests[1:])


def test_each_block_is_hashed_once():
    """Over admission, computing, preemption and another admission."""
    hashed = []

    def counting(parent_hash, token_ids):
        hashed.append(token_ids)
        return hash_block(parent_hash, token_ids)

    cache = KVCacheManager([FULL, SLIDING], 2, hash_block=counting)
    request = make_request(range(9), groups=2)
    run(cache, request, chunk=3)
    request.append(9)
    compute(cache, request, 1)
    request.append(10)
    cache.release(request)
    request.num_computed_tokens = 0
    assert run(cache, request) == 10
    assert hashed == [(number, number + 1) for number in range(0, 10, 2)]


def test_without_prefix_caching_nothing_is_kept_or_hashed():
    def forbidden(parent_hash, token_ids):
        raise AssertionError("hashed")

    cache = KVCacheManager([FULL], 2, enable_prefix_caching=False, hash_block=forbidden)
    for _ in range(2):
        request = make_request(range(7))
        assert run(cache, request) == 0
        cache.release(request)
    assert all(cache.pools[0].content(block) is None for block in range(1, 20))


def test_what_two_requests_computed_at_once_is_published_once():
    cache = KVCacheManager([FULL], 2)
    requests = [make_request(range(5)), make_request(range(5))]
    for request in requests:
        assert cache.admit(request, 0, 5)
    for request in requests:
        request.num_computed_tokens = 5
        cache.record_computed(request, 0)
    pool = cache.pools[0]
    assert [pool.content(block) is not None for block in requests[0].block_ids[0]] == [True, True, False]
    assert not any(pool.content(block) for block in requests[1].block_ids[0])
    cache.release(requests[0])
    cache.release(requests[1])
    assert run(cache, make_request(range(5))) == 4


def test_forgetting_contents_leaves_running_requests_alone():
    cache = KVCacheManager([FULL], 2)
    request = make_request(range(4))
    run(cache, request)
    cache.forget_contents()
    cache.check_integrity([request])
    assert cache.find_cached(make_request(range(5))) == 0
    request.append(9)
    request.append(9)
    compute(cache, request, 2)
    assert cache.find_cached(make_request([*range(4), 9, 9, 9])) == 0  # the start is gone, the rest is of no use
    cache.release(request)
    cache.check_integrity([])


def test_errors():
    with pytest.raises(ConfigError, match="no cache group"):
        KVCacheManager([], 2)
    cache = KVCacheManager([FULL], 2)
    request = make_request(range(5))
    run(cache, request)
    with pytest.raises(BlockPoolError, match="cache group 0 has 1 holder.* and 0 by"):
        cache.check_integrity([])
    cache.forget_contents()
    with pytest.raises(BlockPoolError, match="no block holds PrefixBlock"):
        cache.admit(request, 4, 1)
