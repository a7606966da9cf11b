"""Which sizes are captured: no limit falls off the end, nothing is captured that no step can have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.compile.graphs.sizes import LARGEST_DEFAULT_TOKEN_SIZE, decode_sizes, token_sizes
from compiled_engine.errors import ConfigError

SizesFunction = Callable[..., tuple[int, ...]]
both = pytest.mark.parametrize("sizes_of", [decode_sizes, token_sizes])

limits = st.integers(1, 1500)


def documented(limit: int) -> list[int]:
    """The default sizes up to ``limit`` (at most 2048), band by band as the docs list them."""
    listed = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, 1024, 32), *range(1024, 2049, 64)]
    return [size for size in listed if size <= limit]


def test_default_decode_sizes_end_with_max_num_seqs_whatever_it_is() -> None:
    assert decode_sizes(1) == (1,)
    assert decode_sizes(3) == (1, 2, 3)
    assert decode_sizes(12) == (1, 2, 4, 8, 12)
    assert decode_sizes(100)[-3:] == (88, 96, 100)
    assert decode_sizes(257)[-2:] == (256, 257)
    assert decode_sizes(300)[-3:] == (272, 288, 300)


@given(limit=limits)
def test_default_sizes_are_the_documented_ones_and_the_limit(limit: int) -> None:
    assert decode_sizes(limit) == tuple(sorted({*documented(limit), limit}))
    top = min(limit, 512)
    assert token_sizes(limit) == tuple(sorted({*documented(top), top}))


@given(limit=st.integers(128, 1500), needed=st.integers(128, 1500))
def test_default_padding_is_less_than_a_sixteenth(limit: int, needed: int) -> None:
    needed = min(limit, needed)
    padded = min(size for size in decode_sizes(limit) if size >= needed)
    assert 16 * (padded - needed) < needed


def test_an_explicit_maximum_is_captured_as_it_is() -> None:
    assert decode_sizes(100, maximum=42) == (1, 2, 4, 8, 16, 24, 32, 40, 42)
    assert token_sizes(8192, maximum=42) == (1, 2, 4, 8, 16, 24, 32, 40, 42)
    assert decode_sizes(100, (4, 8), 42) == (4, 8, 42)
    assert token_sizes(8192, (4, 8), 42) == (4, 8, 42)
    assert token_sizes(8192, maximum=1000)[-3:] == (960, 992, 1000)


def test_a_budget_below_the_default_ceiling_is_captured_as_it_is() -> None:
    assert token_sizes(300)[-3:] == (272, 288, 300)
    assert token_sizes(8192)[-1] == LARGEST_DEFAULT_TOKEN_SIZE == 512


def test_explicit_sizes_replace_the_default_ones() -> None:
    assert decode_sizes(100, (8, 3, 8)) == (3, 8, 100)
    assert token_sizes(8192, (700, 3, 700)) == (3, 700)


@both
@given(data=st.data(), limit=limits)
def test_sizes_ascend_within_the_limit_and_hold_what_was_asked_for(
    sizes_of: SizesFunction, data: st.DataObject, limit: int
) -> None:
    maximum = data.draw(st.none() | st.integers(1, limit))
    sizes = st.integers(1, maximum or limit)
    explicit = data.draw(st.none() | st.lists(sizes, min_size=1, max_size=5).map(tuple))
    answer = sizes_of(limit, explicit, maximum)
    assert list(answer) == sorted(set(answer))
    assert answer[0] >= 1
    assert answer[-1] <= limit
    if maximum is not None:
        assert answer[-1] == maximum
    elif sizes_of is decode_sizes:
        assert answer[-1] == limit
    if explicit is not None:
        assert set(explicit) <= set(answer) <= {*explicit, answer[-1]}


@both
@pytest.mark.parametrize("bad", [0, -1, 1.5, "8", True, None])
def test_a_limit_that_is_no_positive_number_is_refused(sizes_of: SizesFunction, bad: object) -> None:
    with pytest.raises(ConfigError, match=r"^max_num_(seqs|batched_tokens) is .*give a whole number of at least 1"):
        sizes_of(bad)


@both
@pytest.mark.parametrize("bad", [0, -3, 2.0, "8", True])
def test_sizes_that_are_no_positive_numbers_are_refused(sizes_of: SizesFunction, bad: object) -> None:
    with pytest.raises(ConfigError, match=r"graph size is .*give a whole number of at least 1"):
        sizes_of(16, (8, bad))
    with pytest.raises(ConfigError, match=r"^the maximum .*graph size is .*give a whole number of at least 1"):
        sizes_of(16, None, bad)


@both
def test_sizes_that_contradict_a_limit_are_refused_with_both_numbers(sizes_of: SizesFunction) -> None:
    with pytest.raises(ConfigError, match=r"graph size is 17, above max_num_\w+ 16"):
        sizes_of(16, (8, 17))
    with pytest.raises(ConfigError, match=r"^the maximum \w+ graph size is 17, above max_num_\w+ 16"):
        sizes_of(16, None, 17)
    with pytest.raises(ConfigError, match=r"graph size is 12, above the maximum 8"):
        sizes_of(16, (4, 12), 8)
    with pytest.raises(ConfigError, match=r"give at least one, or None"):
        sizes_of(16, ())
