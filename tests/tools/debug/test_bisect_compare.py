"""How differences are measured, and how a rung is judged by them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine_debug.bisect.compare import (
    Difference,
    Limits,
    Measured,
    Place,
    Watch,
    default_tolerance,
    difference,
)
from compiled_engine_debug.bisect.outcome import Verdict
from compiled_engine_debug.bisect.trace import Site, TensorName
from compiled_engine_debug.bisect.verdict import Below, judge

NUMBERS = st.one_of(st.floats(-8, 8, width=32), st.sampled_from([math.nan, math.inf, -math.inf]))
ROWS = st.integers(1, 12).flatmap(lambda size: st.lists(st.tuples(NUMBERS, NUMBERS), min_size=size, max_size=size))


def place(number: int) -> Place:
    return Place(number, "0", Site(f"layer {number}", TensorName.OUT))


def watch_of(*relative: float, tolerance: float = 0.1, reference: str = "below") -> Watch:
    watch = Watch(reference, Limits(tolerance, {}))
    for number, value in enumerate(relative):
        watch.take(Measured(place(number), Difference(value, 1.0)))
    return watch


@given(ROWS)
def test_difference_equals_one_worked_out_number_by_number(rows: list[tuple[float, float]]) -> None:
    ours, theirs = (torch.tensor(column, dtype=torch.float32) for column in zip(*rows, strict=True))
    same = [(a == b) or (math.isnan(a) and math.isnan(b)) for a, b in rows]
    strange = [
        a if not math.isfinite(a) else b
        for (a, b), equal in zip(rows, same, strict=True)
        if not equal and not (math.isfinite(a) and math.isfinite(b))
    ]
    gaps = [abs(a - b) for a, b in rows if math.isfinite(a) and math.isfinite(b)]
    scale = max([abs(b) for _, b in rows if math.isfinite(b)], default=0.0)

    found = difference(ours, theirs)

    assert found.scale == pytest.approx(scale)
    if strange:
        assert found.relative == math.inf
        assert found.not_finite == ("NaN" if any(map(math.isnan, strange)) else "inf")
    else:
        largest = max(gaps, default=0.0)
        expected = 0.0 if largest == 0 else largest / scale if scale else math.inf
        assert found.relative == pytest.approx(expected)
        assert found.not_finite == ""


def test_other_shapes_are_no_numbers_to_compare() -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        difference(torch.zeros(2, 3), torch.zeros(3, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tolerance_is_wider_than_a_dtypes_spacing(dtype: torch.dtype) -> None:
    assert torch.finfo(dtype).eps < default_tolerance(dtype) < 0.5


def test_watch_keeps_the_first_beyond_and_the_largest() -> None:
    watch = watch_of(0.05, 0.2, 0.9, 0.3)
    assert watch.beyond is not None
    assert watch.beyond.place == place(1)
    assert watch.largest is not None
    assert watch.largest.place == place(2)
    assert not watch.agrees


def test_difference_of_the_very_tolerance_agrees() -> None:
    assert watch_of(0.1).agrees


def test_not_finite_comes_before_an_earlier_finite_difference() -> None:
    watch = watch_of(0.2)
    strange = Measured(place(5), Difference(math.inf, 1.0, "NaN"))
    watch.take(strange)
    assert [item.place for item in watch.first_places] == [place(5), place(0)]


def test_not_finite_that_is_also_the_first_is_reported_once() -> None:
    watch = watch_of()
    watch.take(Measured(place(1), Difference(math.inf, 1.0, "inf")))
    watch.take(Measured(place(2), Difference(0.5, 1.0)))
    assert [item.place for item in watch.first_places] == [place(1)]


def test_limit_grows_with_the_rounding_errors_of_the_site_alone() -> None:
    noisy, quiet = place(0).site, place(1).site
    limits = Limits(0.1, {noisy: 0.2, quiet: 0.001})
    assert (limits.of(noisy), limits.of(quiet), limits.of(place(2).site)) == (pytest.approx(0.8), 0.1, 0.1)
    watch = Watch("below", limits)
    for number in (0, 1):
        watch.take(Measured(place(number), Difference(0.5, 1.0)))
    assert watch.beyond is not None
    assert watch.beyond.place == place(1)


GOOD, BAD = watch_of(0.01), watch_of(0.01, 0.5)


def test_judging() -> None:
    assert judge(GOOD, GOOD, None, by_oracle=True).verdict is Verdict.CLEAN
    diverged = judge(GOOD, BAD, None, by_oracle=True)
    assert (diverged.verdict, diverged.watch) == (Verdict.DIVERGES, BAD)
    far = watch_of(0.5)
    drifted = judge(far, GOOD, None, by_oracle=True)
    assert (drifted.verdict, drifted.watch) == (Verdict.DRIFTS, far)


def test_judging_what_is_above_a_wrong_rung() -> None:
    assert judge(BAD, BAD, Below(GOOD, None), by_oracle=True).verdict is Verdict.INHERITS
    assert judge(GOOD, GOOD, Below(BAD, None), by_oracle=True).verdict is Verdict.CLEAN
    below = watch_of(0.5)
    elsewhere = judge(BAD, BAD, Below(below, Measured(place(0), Difference(0.5, 1.0))), by_oracle=True)
    assert (elsewhere.verdict, elsewhere.watch) == (Verdict.DIVERGES, BAD)
    same_place = judge(BAD, BAD, Below(below, Measured(place(1), Difference(0.5, 1.0))), by_oracle=True)
    assert (same_place.verdict, same_place.watch) == (Verdict.DIVERGES, below)


def test_quantised_weights_are_not_judged_by_transformers() -> None:
    assert judge(BAD, BAD, None, by_oracle=False).verdict is Verdict.NOT_JUDGED
    assert judge(BAD, GOOD, None, by_oracle=False).verdict is Verdict.CLEAN
    assert judge(BAD, watch_of(0.5), None, by_oracle=False).verdict is Verdict.DIVERGES
