"""``expect``: passes for exactly what was named, fails for anything else."""

from __future__ import annotations

import pytest

from compiled_engine.compile.counters import CompileCounters


def test_the_named_growth_passes() -> None:
    counters = CompileCounters(captures=5)
    with counters.expect(captures=1, pieces=2):
        counters.captures += 1
        counters.pieces += 2


@pytest.mark.parametrize("growth", [0, 1, 3])
def test_another_growth_fails_and_tells_both(growth: int) -> None:
    counters = CompileCounters(pieces=7)
    with pytest.raises(AssertionError, match=rf"'pieces': {growth}.*expected.*'pieces': 2"), counters.expect(pieces=2):
        counters.pieces += growth


def test_counters_that_are_not_named_do_not_matter() -> None:
    counters = CompileCounters()
    with counters.expect(captures=0):
        counters.pieces += 3


def test_zero_forbids_a_change() -> None:
    counters = CompileCounters()
    with pytest.raises(AssertionError), counters.expect(captures=0):
        counters.captures += 1


@pytest.mark.parametrize("name", ["capture", "passes", "expect"])
def test_an_unknown_counter_is_refused_before_anything_runs(name: str) -> None:
    ran = []
    with pytest.raises(TypeError, match=name), CompileCounters().expect(**{name: 1}):
        ran.append(name)
    assert not ran


def test_an_exception_inside_is_not_replaced() -> None:
    with pytest.raises(KeyError), CompileCounters().expect(captures=1):
        raise KeyError("inner")


def test_blocks_may_nest() -> None:
    counters = CompileCounters()
    with counters.expect(pieces=3):
        counters.pieces += 1
        with counters.expect(pieces=2):
            counters.pieces += 2
