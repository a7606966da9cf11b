"""Plots: values land where they belong, marks are round numbers, and what comes out is well-formed."""

from __future__ import annotations

import math
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plots import HEIGHT, WIDTH, Axis, Scale, Series, line_plot, page, ticks_of

positive = st.floats(1e-6, 1e9)


def elements(svg: str, tag: str) -> list[ET.Element]:
    return [element for element in ET.fromstring(svg).iter() if element.tag == tag]


def test_points_lie_on_their_scales() -> None:
    svg = line_plot(Axis("x"), Axis("y"), [Series("line", [(0, 0), (5, 10), (10, 20)])])
    places = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in elements(svg, "circle")]
    (x0, y0), (x1, y1), (x2, y2) = places
    assert x0 < x1 < x2
    assert y0 > y1 > y2, "y grows upward"
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.11)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.11)


def test_equal_ratios_are_equal_lengths_on_a_logarithmic_axis() -> None:
    svg = line_plot(Axis("x", log=True), Axis("y", log=True), [Series("line", [(1, 100), (8, 10), (64, 1)])])
    places = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in elements(svg, "circle")]
    assert places[1][0] - places[0][0] == pytest.approx(places[2][0] - places[1][0], abs=0.11)
    assert places[1][1] - places[0][1] == pytest.approx(places[2][1] - places[1][1], abs=0.11)


@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=5), st.booleans(), st.booleans(), st.booleans())
def test_everything_stays_inside_the_picture(
    points: list[tuple[float, float]], x_log: bool, y_log: bool, from_zero: bool
) -> None:
    axes = Axis("x", log=x_log, from_zero=from_zero), Axis("y", log=y_log, from_zero=from_zero)
    svg = line_plot(*axes, [Series("line", sorted(points))])
    dots = elements(svg, "circle")
    assert len(dots) == len(points)
    for dot in dots:
        assert 0 <= float(dot.attrib["cx"]) <= WIDTH
        assert 0 <= float(dot.attrib["cy"]) <= HEIGHT


@given(positive, st.floats(1.001, 1e6), st.booleans())
def test_marks_are_few_round_and_inside(low: float, ratio: float, log: bool) -> None:
    scale = Scale(low, low * ratio, 0, 100, log)
    ticks = ticks_of(Axis("x", log=log), scale)
    assert len(ticks) <= 10
    assert ticks == sorted(set(ticks))
    for tick in ticks:
        assert low * (1 - 1e-9) <= tick <= low * ratio * (1 + 1e-9)
        if log:
            assert round(tick / 10 ** math.floor(math.log10(tick) + 1e-9), 6) in (1, 2, 5)
    if not log:
        assert len(ticks) >= 2
        gaps = [later - earlier for earlier, later in pairwise(ticks)]
        assert gaps == pytest.approx([gaps[0]] * len(gaps))


def test_given_marks_are_kept_where_they_fit() -> None:
    assert ticks_of(Axis("x", log=True, ticks=(1, 2, 64, 128)), Scale(1, 70, 0, 100, True)) == [1, 2, 64]


def test_wide_logarithmic_axes_have_powers_of_ten() -> None:
    ticks = ticks_of(Axis("x", log=True), Scale(1, 1e6, 0, 1, True))
    assert ticks == pytest.approx([10.0**power for power in range(7)])


def test_a_single_point_and_equal_values_have_a_picture() -> None:
    for axis in (Axis("x"), Axis("x", log=True), Axis("x", from_zero=False)):
        assert len(elements(line_plot(axis, axis, [Series("line", [(3, 3)])]), "circle")) == 1


def test_names_are_escaped_and_every_line_is_in_the_legend() -> None:
    svg = line_plot(Axis("a < b"), Axis("c & d"), [Series("one <1>", [(1, 2)]), Series("two", [(1, 3)])])
    words = [element.text for element in elements(svg, "text")]
    assert {"a < b", "c & d", "one <1>", "two"} <= set(words)
    colours = {element.attrib["fill"] for element in elements(svg, "circle")}
    assert len(colours) == 2
    assert "<b>" not in page("t <b>", "i <b>", [("c <b>", svg)])


def test_what_cannot_be_shown_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to show"):
        line_plot(Axis("x"), Axis("y"), [Series("line", [])])
    with pytest.raises(ValueError, match="logarithmic and has the value 0"):
        line_plot(Axis("x"), Axis("y", log=True), [Series("line", [(1, 0)])])


def test_a_page_needs_no_other_file() -> None:
    document = page("title", "words", [("caption", line_plot(Axis("x"), Axis("y"), [Series("line", [(1, 2)])]))])
    assert "prefers-color-scheme: dark" in document
    for outside in ("http", "src=", "href=", "url(", "@import"):
        assert outside not in document
