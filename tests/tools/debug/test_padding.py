"""Capture sizes: the best list against all lists, and replays against the engine's own dispatcher and buckets."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_recordings import step, write_recording

from compiled_engine.compile.graphs.dispatcher import Dispatcher
from compiled_engine.compile.graphs.keys import GraphKind, StepShape
from compiled_engine.compile.records import KeyRecord, StepRecord
from compiled_engine.config import EngineConfig
from compiled_engine.runners.buckets import request_buckets, token_buckets
from compiled_engine.runners.description import key_records
from compiled_engine.runners.gpu import make_dispatcher
from compiled_engine_debug.capture_sizes import compare_lists, mismatches, size_options
from compiled_engine_debug.cli import main
from compiled_engine_debug.padding import Demand, Padding, best_sizes, powers_of_two, replay
from compiled_engine_debug.recording import read_recording

MODES = ("full_decode_only", "piecewise", "full", "full_and_piecewise")
GPU: dict[str, Any] = {"device": "cpu", "max_num_seqs": 7, "max_num_batched_tokens": 24}
TPU: dict[str, Any] = {"device": "tpu", "max_num_seqs": 7, "max_num_batched_tokens": 24}


def demand(values: Sequence[int], always: int | None = None, recorded: tuple[int, ...] = ()) -> Demand:
    array = np.asarray(values, dtype=np.int64)
    return Demand("some", "tokens", array, array, np.arange(len(array)), recorded, always)


def padded_sum(demands: Sequence[Demand], sizes: Sequence[int], maximum: int | None) -> int | None:
    """Tokens after padding, step by step; None where one does not fit."""
    total = 0
    for one in demands:
        captured = {*sizes, *([] if one.always is None else [one.always])}
        for value in one.values.tolist():
            if maximum is not None and value > maximum:
                continue
            holding = [size for size in captured if size >= value]
            if not holding:
                return None
            total += min(holding)
    return total


def best_of_all(demands: Sequence[Demand], count: int, maximum: int | None) -> tuple[int, ...]:
    """The best list, found by looking at every one."""
    seen = sorted({value for one in demands for value in one.values.tolist() if maximum is None or value <= maximum})
    lists = [sizes for length in range(count + 1) for sizes in itertools.combinations(seen, length)]
    ranked = [(padded_sum(demands, sizes, maximum), len(sizes), sizes) for sizes in lists]
    return min(entry for entry in ranked if entry[0] is not None)[2]


demands_strategy = st.lists(
    st.tuples(st.lists(st.integers(1, 12), max_size=14), st.none() | st.integers(0, 3)).map(
        lambda pair: demand(pair[0], None if pair[1] is None else max([1, *pair[0]]) + pair[1])
    ),
    min_size=1,
    max_size=2,
)


@settings(deadline=None)
@given(demands_strategy, st.integers(1, 6), st.none() | st.integers(1, 12))
def test_the_proposed_list_is_the_best_of_all(demands: list[Demand], count: int, maximum: int | None) -> None:
    assert best_sizes(demands, count, maximum) == best_of_all(demands, count, maximum)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=120), st.integers(1, 12))
def test_many_distinct_sizes_against_the_plain_recursion(values: list[int], count: int) -> None:
    sizes, counts = np.unique(values, return_counts=True)
    best = [0.0] + [np.inf] * len(sizes)
    for _ in range(count):
        best = [0.0] + [
            min(best[begin] + sizes[end] * counts[begin : end + 1].sum() for begin in range(end + 1))
            for end in range(len(sizes))
        ]
    one = demand(values)
    found = best_sizes([one], count)
    assert len(found) <= count
    assert replay(one, found).num_padded == best[-1]


def test_ties_are_broken_by_fewer_and_then_smaller_sizes() -> None:
    assert best_sizes([demand([3, 3, 5])], 9) == (3, 5)
    # 1 -> 2 costs as much as 2 -> 3.
    assert best_sizes([demand([1, 2, 3])], 2) == (1, 3)
    assert best_sizes([demand([4, 4], always=4)], 3) == ()
    # Steps of 4 are padded to 4 without the list's help.
    assert best_sizes([demand([4], always=4), demand([6])], 2) == (6,)


def test_no_steps_need_no_sizes_and_no_count_below_one() -> None:
    assert best_sizes([demand([])], 3) == ()
    assert best_sizes([demand([9])], 3, maximum=8) == ()
    with pytest.raises(ValueError, match="count is 0"):
        best_sizes([demand([1])], 0)


@given(st.lists(st.integers(1, 40), max_size=30), st.sets(st.integers(1, 40), max_size=5))
def test_a_replay_pads_each_step_to_the_smallest_size_that_holds_it(values: list[int], sizes: set[int]) -> None:
    holding = [[size for size in sizes if size >= value] for value in values]
    padded = [min(sizes, default=value) for value, sizes in zip(values, holding, strict=True)]
    eager = sum(not sizes for sizes in holding)
    assert replay(demand(values), sorted(sizes)) == Padding(len(values), eager, sum(values), sum(padded))


def test_the_share_of_padding() -> None:
    padding = Padding(2, 0, 6, 8)
    assert (padding.num_wasted, padding.share) == (2, 0.25)
    assert Padding(0, 0, 0, 0).share == 0
    assert padding + Padding(1, 1, 10, 10) == Padding(3, 1, 16, 18)


@pytest.mark.parametrize(
    ("largest", "limit", "sizes"),
    [
        (1, None, (1,)),
        (5, None, (1, 2, 4, 8)),
        (8, None, (1, 2, 4, 8)),
        (8, 8, (1, 2, 4, 8)),
        (20, 24, (1, 2, 4, 8, 16, 24)),
        (5, 24, (1, 2, 4, 8)),
        (24, 24, (1, 2, 4, 8, 16, 24)),
    ],
)
def test_powers_of_two(largest: int, limit: int | None, sizes: tuple[int, ...]) -> None:
    assert powers_of_two(largest, limit) == sizes


def dispatcher_of(config: EngineConfig) -> Dispatcher:
    return make_dispatcher(config, (96,), lambda requests, length: 1)


def random_shapes(count: int, seed: int = 3) -> list[StepShape]:
    generator = np.random.default_rng(seed)
    shapes = []
    for _ in range(count):
        requests = int(generator.integers(1, 8))
        lengths = [1] * requests if generator.random() < 0.5 else generator.integers(1, 4, requests).tolist()
        tokens = sum(lengths)
        shapes.append(StepShape(tokens, requests, max(lengths), 40, tokens == requests * max(lengths)))
    return shapes


def dispatched(shapes: Sequence[StepShape], dispatcher: Dispatcher) -> list[StepRecord]:
    """What the engine would record of these steps."""
    steps = []
    for index, shape in enumerate(shapes):
        decision = dispatcher.dispatch(shape)
        key, facts = decision.key, {"reason": decision.reason or None}
        if key is not None:
            requests = key.num_padded_requests if key.kind is GraphKind.FULL else shape.num_requests
            facts = {"mode": key.kind.value, "key": str(key), "num_padded_requests": requests}
            facts["num_padded_tokens"] = key.num_padded_tokens
        steps.append(step(index, shape.num_tokens, shape.num_requests, **facts))
    return steps


def is_served(shape: StepShape, mode: str) -> bool:
    return shape.is_decode or mode != "full_decode_only"


@pytest.mark.parametrize("sizes", [{}, {"graph_sizes": (2, 5, 9, 16)}, {"graph_sizes": (1, 4), "max_graph_size": 5}])
@pytest.mark.parametrize("mode", MODES)
def test_the_recorded_list_gives_the_recorded_padding(tmp_path: Path, mode: str, sizes: dict[str, Any]) -> None:
    config = EngineConfig(**GPU, graph_mode=mode, **sizes)
    dispatcher, shapes = dispatcher_of(config), random_shapes(200)
    steps = dispatched(shapes, dispatcher)
    recording = read_recording(
        write_recording(tmp_path / "a.jsonl", *steps, keys=key_records(dispatcher.keys()), config=config)
    )
    (option,) = size_options(recording)
    assert mismatches(recording, option) == ()
    recorded = compare_lists(option, None, None, ())[0]
    served = [one for one, shape in zip(steps, shapes, strict=True) if is_served(shape, mode)]
    assert recorded.total == Padding(
        num_steps=len(served),
        num_eager=sum(one.mode == "eager" for one in served),
        num_real=sum(one.num_tokens for one in served),
        num_padded=sum(one.num_padded_tokens for one in served),
    )


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("limits", [{}, {"max_graph_size": 5, "graph_sizes": (1, 3)}])
@pytest.mark.parametrize("mode", MODES)
def test_an_engine_with_the_proposed_option_pads_as_foretold(
    tmp_path: Path, mode: str, limits: dict[str, Any], count: int
) -> None:
    config = EngineConfig(**GPU, graph_mode=mode, **limits)
    shapes = random_shapes(150)
    before = dispatcher_of(config)
    path = write_recording(
        tmp_path / "a.jsonl", *dispatched(shapes, before), keys=key_records(before.keys()), config=config
    )
    (option,) = size_options(read_recording(path))
    proposed = compare_lists(option, count, None, ())[1]
    words = option.text(proposed.sizes).split()
    given_sizes = {
        "graph_sizes": tuple(map(int, words[1].split(","))),
        "max_graph_size": int(words[3]) if len(words) > 2 else None,
    }
    after = dispatched(shapes, dispatcher_of(EngineConfig(**GPU, graph_mode=mode, **given_sizes)))
    served = [one for one, shape in zip(after, shapes, strict=True) if is_served(shape, mode)]
    assert proposed.total.num_padded == sum(one.num_padded_tokens for one in served)
    assert proposed.total.num_eager == sum(one.mode == "eager" for one in served) == 0


def bucket_recording(path: Path, config: EngineConfig, seed: int = 5) -> Path:
    generator = np.random.default_rng(seed)
    tokens, rows = token_buckets(config), request_buckets(config)
    steps = []
    for index in range(120):
        requests = int(generator.integers(1, 8))
        count, sampled = requests + int(generator.integers(0, 17)), int(generator.integers(0, requests + 1))
        padded = {"num_padded_tokens": tokens.fit(count), "num_padded_requests": rows.fit(sampled) if sampled else 0}
        steps.append(step(index, count, requests, num_sampled=sampled, mode="bucket", key="bucket", **padded))
    keys = [KeyRecord(f"{t} tokens, {r} rows", t, r, "bucket") for t in tokens.sizes for r in rows.sizes]
    return write_recording(path, *steps, keys=keys, config=config)


def test_buckets_have_lists_of_their_own(tmp_path: Path) -> None:
    config = EngineConfig(**TPU, token_buckets=(6, 12), request_buckets=(2,))
    recording = read_recording(bucket_recording(tmp_path / "a.jsonl", config))
    by_tokens, by_rows = size_options(recording)
    assert (by_tokens.name, by_tokens.recorded) == ("--token-buckets", (6, 12, 24))
    assert (by_rows.name, by_rows.recorded) == ("--request-buckets", (2, 7))
    assert mismatches(recording, by_tokens) == mismatches(recording, by_rows) == ()
    steps = list(recording.steps)
    recorded, proposed = compare_lists(by_tokens, None, None, ())[:2]
    assert recorded.total.num_padded == sum(one.num_padded_tokens for one in steps)
    rows = compare_lists(by_rows, None, None, ())[0].total
    assert rows.num_padded == sum(one.num_padded_requests for one in steps)
    assert rows.num_steps == sum(one.num_sampled > 0 for one in steps)
    assert len(proposed.sizes) <= 2
    better = token_buckets(EngineConfig(**TPU, token_buckets=proposed.sizes))
    assert proposed.total.num_padded == sum(better.fit(one.num_tokens) for one in steps)
    assert proposed.total.num_padded <= recorded.total.num_padded


@pytest.mark.parametrize(("seqs", "rows"), [(7, 4), (3, 3)])
def test_sampled_rows_have_a_request_and_a_token_each(tmp_path: Path, seqs: int, rows: int) -> None:
    config = EngineConfig(device="tpu", max_num_seqs=seqs, max_num_batched_tokens=4)
    path = write_recording(tmp_path / "a.jsonl", step(0, 3, 3, mode="bucket"), config=config)
    assert [option.demands[0].always for option in size_options(read_recording(path))] == [4, rows]


def test_a_recording_with_more_requests_than_its_settings_allow(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "a.jsonl", step(0, 3, 3), step(1, 9, 9), config=EngineConfig(**GPU))
    (option,) = size_options(read_recording(path))
    assert compare_lists(option, 1, None, ())[1].sizes == (9,)


def test_a_step_that_was_padded_otherwise_is_named(tmp_path: Path) -> None:
    keys = [KeyRecord("full decode 4 requests", 4, 4, "full"), KeyRecord("piecewise 8 tokens", 8, 0, "piecewise")]
    padded = {"mode": "full", "key": keys[0].key, "num_padded_tokens": 4, "num_padded_requests": 4}
    steps = [step(10, 3, 3, **padded), step(11, 2, 2, reason="too long"), step(12, 5, 2, reason="why"), step(13, 2, 2)]
    path = write_recording(tmp_path / "a.jsonl", *steps, keys=keys, config=EngineConfig(**GPU))
    recording = read_recording(path)
    first, second = mismatches(recording, size_options(recording)[0])
    assert (first.kind, first.num_steps, first.step) == ("full decode", 2, 11)
    assert (first.unpadded, first.recorded, first.replayed, first.reason) == (2, 2, 4, "too long")
    assert (second.kind, second.num_steps, second.step, second.replayed) == ("piecewise", 1, 12, 8)


def made(tmp_path: Path) -> Path:
    steps = [step(index, count, count) for index, count in enumerate((1, 3, 3, 6))]
    return write_recording(tmp_path / "a.jsonl", *steps, step(4, 20, 2), config=EngineConfig(**GPU))


def test_without_graphs_steps_are_those_of_full_and_piecewise(tmp_path: Path) -> None:
    (option,) = size_options(read_recording(made(tmp_path)))
    assert [(one.kind, one.values.tolist()) for one in option.demands] == [
        ("full decode", [1, 3, 3, 6]),
        ("piecewise", [20]),
    ]
    assert option.recorded == ()


def test_the_command_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["padding", str(made(tmp_path)), "--json", "--sizes", "2", "--list", "8,2,2", "--list", "24"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    # 20 must fit; 3 leaves 6 for max_num_seqs, which is 7.
    assert result["proposed"] == "--graph-sizes 3,20"
    lists = {entry["name"]: entry for entry in result["lists"]}
    assert lists["proposed"]["all"]["num_wasted"] == 3
    assert [entry["sizes"] for entry in result["lists"][3:]] == [[2, 8], [24]]
    assert lists["recorded"]["all"]["num_eager"] == 5
    decode, others = result["lists"][3]["kinds"]
    assert (decode["num_padded"], others["num_eager"]) == (2 + 7 + 7 + 7, 1)


@pytest.mark.parametrize(("what", "option"), [("tokens", "--graph-sizes 20"), ("requests", "--graph-sizes 1,3,6")])
def test_one_kind_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, option: str) -> None:
    assert main(["padding", str(made(tmp_path)), "--json", "--what", what]) == 0
    assert json.loads(capsys.readouterr().out)[0]["proposed"] == option


def test_the_command_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["padding", str(made(tmp_path)), "--max", "6", "--sizes", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "To capture the proposed list: --graph-sizes 1,3,6" in lines
    row = next(line.split() for line in lines if line.split()[:2] == ["proposed", "piecewise"])
    assert row[3:] == ["1", "1", "20", "20", "0", "0.00"]
    assert not any("─" in line or line != line.rstrip() for line in lines)


def test_errors_say_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = write_recording(tmp_path / "empty.jsonl")
    assert main(["padding", str(empty)]) == 2
    assert "record a run that answers requests" in capsys.readouterr().err
    assert main(["padding", str(made(tmp_path)), "--list", "4,64"]) == 2
    assert "--list has 64" in capsys.readouterr().err
    for words in (["--sizes", "0"], ["--list", "1,x"], ["--max", "-1"]):
        with pytest.raises(SystemExit):
            main(["padding", str(made(tmp_path)), *words])
        assert "is no whole number of at least 1" in capsys.readouterr().err
