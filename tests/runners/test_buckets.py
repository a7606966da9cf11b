"""Sizes that steps are padded to: few, close enough, and a place for every step that can be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.config import EngineConfig
from compiled_engine.errors import ConfigError, RequestError
from compiled_engine.runners.buckets import Buckets, padded_sizes, request_buckets, token_buckets

size_lists = st.sets(st.integers(1, 300), min_size=1).map(lambda sizes: tuple(sorted(sizes)))
largest_sizes = st.integers(1, 5000)


@given(sizes=size_lists, number=st.integers(0, 320))
def test_the_smallest_size_that_holds_the_number(sizes: tuple[int, ...], number: int) -> None:
    holding = [size for size in sizes if size >= number]
    if holding:
        assert Buckets(sizes).fit(number) == min(holding)
        return
    with pytest.raises(RequestError, match=f"a step of {number} is above {sizes[-1]}, the largest"):
        Buckets(sizes).fit(number)


@given(smallest=st.integers(1, 64), largest=largest_sizes, gap=st.integers(0, 600))
def test_padding_is_bounded(smallest: int, largest: int, gap: int) -> None:
    sizes = padded_sizes(smallest, largest, gap)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == largest
    assert sizes[0] == min(smallest, largest)
    for below, above in itertools.pairwise(sizes):
        assert above - below <= (gap or below)
        # A number just above a size is padded most; it has a way to go to twice itself.
        assert above < 2 * (below + 1)


@given(smallest=st.integers(1, 64), largest=largest_sizes, gap=st.integers(0, 600))
def test_no_size_can_be_left_out(smallest: int, largest: int, gap: int) -> None:
    """Without one of them (but for the first and the last two) padding would exceed the gap or the doubling."""
    sizes = padded_sizes(smallest, largest, gap)
    for below, above in zip(sizes[:-2], sizes[2:-1], strict=False):
        assert above - below > (gap or below) or above > 2 * below


@pytest.mark.parametrize(
    ("smallest", "largest", "gap", "sizes"),
    [
        (16, 512, 0, (16, 32, 64, 128, 256, 512)),
        (16, 500, 0, (16, 32, 64, 128, 256, 500)),
        (16, 512, 64, (16, 32, 64, 128, 192, 256, 320, 384, 448, 512)),
        (16, 300, 100, (16, 32, 64, 128, 228, 300)),
        (16, 40, 8, (16, 24, 32, 40)),
        (16, 17, 0, (16, 17)),
        (16, 16, 0, (16,)),
        (16, 5, 0, (5,)),
        (1, 3, 1, (1, 2, 3)),
    ],
)
def test_examples(smallest: int, largest: int, gap: int, sizes: tuple[int, ...]) -> None:
    assert padded_sizes(smallest, largest, gap) == sizes


@pytest.mark.parametrize("arguments", [(0, 8, 0), (8, 0, 0), (8, 8, -1)])
def test_sizes_that_make_no_sense(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="sizes are at least 1"):
        padded_sizes(*arguments)


@given(
    tokens=st.integers(1, 3000),
    seqs=st.integers(1, 300),
    gap=st.integers(0, 300),
    chosen=st.none() | st.sets(st.integers(1, 300)).map(tuple),
)
def test_every_step_has_its_buckets(tokens: int, seqs: int, gap: int, chosen: tuple[int, ...] | None) -> None:
    settings = {"max_num_batched_tokens": tokens, "max_num_seqs": seqs, "bucket_gap": gap}
    rows = min(tokens, seqs)
    for largest, name, make in ((tokens, "token_buckets", token_buckets), (rows, "request_buckets", request_buckets)):
        fitting = None if chosen is None else tuple(size for size in chosen if size <= largest)
        buckets = make(EngineConfig(**settings, **{name: fitting}))  # type: ignore[arg-type]
        assert buckets.fit(largest) == buckets.sizes[-1] == largest
        assert list(buckets.sizes) == sorted(set(buckets.sizes))
        if fitting is not None:
            assert set(buckets.sizes) == {*fitting, largest}


def test_defaults() -> None:
    assert token_buckets(EngineConfig()).sizes == (16, 32, 64, 128, 256, 512)
    assert token_buckets(EngineConfig(bucket_gap=128)).sizes == (16, 32, 64, 128, 256, 384, 512)
    assert request_buckets(EngineConfig()).sizes == (8, 16, 32, 64)
    assert request_buckets(EngineConfig(bucket_gap=8)).sizes == (8, 16, 32, 64)
    assert request_buckets(EngineConfig(max_num_batched_tokens=20)).sizes == (8, 16, 20)


def test_sizes_that_no_step_can_have() -> None:
    with pytest.raises(ConfigError, match="513 of token_buckets is above max_num_batched_tokens, which is 512.*raise"):
        token_buckets(EngineConfig(token_buckets=(16, 513)))
    with pytest.raises(ConfigError, match="65 of request_buckets is above max_num_seqs, which is 64"):
        request_buckets(EngineConfig(request_buckets=(65,)))
    with pytest.raises(ConfigError, match="33 of request_buckets is above max_num_batched_tokens, which is 32"):
        request_buckets(EngineConfig(request_buckets=(33,), max_num_batched_tokens=32))
