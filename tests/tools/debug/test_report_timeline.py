"""The charts of steps: columns keep every sum, and outlines have the heights that the steps have."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_lines import Line, steps

from compiled_engine_debug.report.timeline import HEIGHT, MAX_COLUMNS, Timeline, timeline_of
from compiled_engine_debug.steps import Steps, StepsBuilder

MODES = ("full", "piecewise", "bucket", "eager")
SIZES = st.integers(1, 600)


def build(lines: list[Line]) -> Steps:
    builder = StepsBuilder()
    for line in lines:
        builder.add(line)
    return builder.build()


def charts_of(lines: list[Line]) -> Timeline:
    shown = timeline_of(build(lines))
    assert shown is not None
    return shown


def heights(path: str, num_columns: int) -> list[float]:
    """The height of each column below an outline, read from its path: "M0 100V40H3V70H5V100Z"."""
    begin, body = re.fullmatch(r"M0 (\S+?)((?:V[\d.e+-]+H\d+)+)(?:V100Z)?", path).groups()  # type: ignore[union-attr]
    assert float(begin) in (HEIGHT, float(body[1:].partition("H")[0]))
    found: list[float] = []
    for top, end in re.findall(r"V([\d.e+-]+)H(\d+)", body):
        assert int(end) > len(found), "an outline goes forward"
        found += [HEIGHT - float(top)] * (int(end) - len(found))
    assert len(found) == num_columns
    return found


def chart(shown: Timeline, name: str) -> dict[str, list[float]]:
    (found,) = (chart for chart in shown.charts if chart.name == name)
    return {mark.style: heights(mark.path, shown.num_columns) for mark in found.marks}


@given(
    st.lists(st.tuples(SIZES, st.integers(0, 600), st.sampled_from(MODES)), min_size=1, max_size=40), st.integers(1, 9)
)
def test_columns_keep_every_sum_and_every_step(cases: list[tuple[int, int, str]], most: int) -> None:
    lines = [
        {**line, "num_tokens": real, "num_padded_tokens": real + padding, "mode": mode}
        for line, (real, padding, mode) in zip(steps(len(cases)), cases, strict=True)
    ]
    shown = timeline_of(build(lines), most)
    assert shown is not None
    columns = shown.columns
    assert shown.num_columns == len(columns["first"]) <= most
    assert columns["first"][0] == 0
    assert columns["last"][-1] == len(lines) - 1
    assert columns["first"][1:] == [last + 1 for last in columns["last"][:-1]]
    for place, (first, last) in enumerate(zip(columns["first"], columns["last"], strict=True)):
        own = lines[first : last + 1]
        assert columns["tokens"][place] == sum(line["num_tokens"] for line in own)
        assert columns["padded"][place] == sum(line["num_padded_tokens"] for line in own)
        assert columns["seconds"][place] == pytest.approx(sum(line["seconds"] for line in own))
        assert columns["slowest"][place] == max(line["seconds"] for line in own)
        for mode in MODES:
            assert columns["modes"][mode][place] == sum(line["mode"] == mode for line in own)
        step = columns["shown"][place]
        assert first <= step["index"] <= last
        line = lines[step["index"]]
        wasted = [item["num_padded_tokens"] - item["num_tokens"] for item in own]
        assert line["num_padded_tokens"] - line["num_tokens"] == max(wasted)
        assert step["requests"] == line["requests"][:8]
        assert (step["num_requests"], step["key"], step["mode"]) == (len(line["requests"]), line["key"], line["mode"])


@pytest.mark.parametrize("count", [1, MAX_COLUMNS, MAX_COLUMNS + 1, 4 * MAX_COLUMNS, 4 * MAX_COLUMNS + 1])
def test_there_are_never_more_columns_than_the_page_can_show(count: int) -> None:
    shown = charts_of(list(steps(count)))
    assert shown.num_steps == count
    assert MAX_COLUMNS / 2 < shown.num_columns <= MAX_COLUMNS or count < MAX_COLUMNS
    assert -(-count // shown.steps_per_column) == shown.num_columns


def test_outlines_are_as_high_as_tokens_padding_modes_and_times() -> None:
    lines = list(steps(300))
    shown = charts_of(lines)
    assert shown.steps_per_column == 1
    most = max(line["num_padded_tokens"] for line in lines)
    tokens, share, modes, seconds = (chart(shown, name) for name in ("tokens", "padding", "modes", "seconds"))
    # The outline of padding is on top of all others; of the others, the highest is that of the last mode.
    padded = [line["num_padded_tokens"] for line in lines]
    assert tokens["padding"] == pytest.approx([HEIGHT * (value / most) ** 0.5 for value in padded], abs=0.06)
    real = np.max([values for style, values in tokens.items() if style != "padding"], axis=0)
    assert real == pytest.approx([HEIGHT * (line["num_tokens"] / most) ** 0.5 for line in lines], abs=0.06)
    wasted = [1 - line["num_tokens"] / line["num_padded_tokens"] for line in lines]
    assert share["padding"] == pytest.approx([HEIGHT * value for value in wasted], abs=0.06)
    assert set(modes) == {line["mode"] for line in lines}
    for place, line in enumerate(lines):
        own = MODES.index(line["mode"])
        assert [modes[mode][place] for mode in modes if MODES.index(mode) >= own] == pytest.approx(
            [HEIGHT for mode in modes if MODES.index(mode) >= own]
        )
        assert all(modes[mode][place] == 0 for mode in modes if MODES.index(mode) < own)
    slowest = max(line["seconds"] for line in lines)
    assert seconds["line"] == pytest.approx([HEIGHT * line["seconds"] / slowest for line in lines], abs=0.06)
    assert seconds["area"] == pytest.approx(seconds["line"])


def test_outlines_are_painted_from_the_highest_down() -> None:
    for item in charts_of(list(steps(300))).charts[:3]:
        piles: list[Any] = [heights(mark.path, 300) for mark in item.marks]
        assert all(np.all(np.array(high) >= np.array(low) - 1e-9) for high, low in itertools.pairwise(piles))


def test_steps_without_time_or_tokens_have_flat_charts() -> None:
    still = [{**line, "seconds": 0.0, "num_tokens": 0, "num_padded_tokens": 0} for line in steps(3)]
    assert chart(charts_of(still), "seconds")["line"] == [0, 0, 0]


def test_no_step_has_no_charts() -> None:
    assert timeline_of(build([])) is None
