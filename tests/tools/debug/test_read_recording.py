"""Reading recordings: everything comes back, damage is told with its line, and large files are read quickly."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compiled_engine.compile.recorder import Recorder
from compiled_engine.compile.records import RECORDING_VERSION, ScheduledShare, StepRecord
from compiled_engine_debug.recording import RecordingError, read_recording
from recordings import RUNNER, lines_of, make_step, new_recorder, write_recording


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_recording(tmp_path_factory.mktemp("recording") / "r.jsonl").read_bytes()


def rewrite(file: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A recording with every line changed by ``change``."""
    lines = lines_of(write_recording(file))
    for line in lines:
        change(line)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_everything_comes_back(tmp_path: Path) -> None:
    recording = read_recording(write_recording(tmp_path / "r.jsonl"))
    assert recording.path == tmp_path / "r.jsonl"
    assert recording.header.version == RECORDING_VERSION
    assert recording.header.model == RUNNER.model
    assert recording.header.config["max_num_seqs"] == 64
    assert [(phase.name, phase.seconds, phase.num_bytes) for phase in recording.phases] == [("weights", 0.5, 80)]
    assert (recording.caches, recording.weights, recording.graphs) == (RUNNER.caches, RUNNER.weights, RUNNER.graphs)
    assert (recording.keys, recording.memory, recording.plan) == (RUNNER.keys, RUNNER.memory, None)
    assert list(recording.steps) == [make_step(index) for index in range(3)]
    assert not recording.truncated


SHARES = st.tuples(st.text(max_size=5), st.integers(0, 2**31 - 1), st.integers(1, 2**31 - 1), st.booleans())
COUNTS = st.integers(0, 2**40)
STEPS = st.builds(
    StepRecord,
    index=COUNTS,
    start=st.floats(0, 1e6),
    seconds=st.floats(0, 1e6),
    num_tokens=COUNTS,
    num_padded_tokens=COUNTS,
    num_requests=COUNTS,
    num_padded_requests=COUNTS,
    num_sampled=COUNTS,
    mode=st.sampled_from(["eager", "piecewise", "full", "bucket"]),
    key=st.none() | st.text(max_size=5),
    reason=st.none() | st.text(max_size=5),
    epoch=COUNTS,
    requests=st.lists(SHARES.map(lambda share: ScheduledShare(*share)), max_size=4).map(tuple),
)


@given(steps=st.lists(STEPS, max_size=6))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_steps_come_back_exactly(steps: list[StepRecord], tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path / "r.jsonl")
    for step in steps:
        recorder.add_step(step)
    recorder.start(RUNNER)
    recorder.save(tmp_path / "saved.jsonl")
    recorder.close()
    read = read_recording(tmp_path / "saved.jsonl").steps
    assert list(read) == steps
    assert read[1:3] == steps[1:3]
    assert read[:] == [read[position - len(steps)] for position in range(len(steps))]
    assert [read.requests(position) for position in range(len(read))] == [step.requests for step in steps]


def test_columns_are_arrays(tmp_path: Path) -> None:
    steps = read_recording(write_recording(tmp_path / "r.jsonl", num_steps=5)).steps
    assert steps.num_padded_tokens.dtype == np.int64
    assert (steps.num_padded_tokens - steps.num_tokens).sum() == 25
    assert steps.seconds.tolist() == [0.0078125] * 5
    assert steps.mode.tolist() == ["piecewise"] * 5
    assert steps.reason.tolist() == [None] * 5
    assert steps.shares.offsets.tolist() == [0, 2, 4, 6, 8, 10]
    assert steps.shares.request_ids == ("0", "é0", "é1", "é2", "é3", "é4")
    with pytest.raises(IndexError):
        steps[5]
    with pytest.raises(IndexError):
        steps.requests(5)


@given(cut=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_that_was_cut_anywhere_says_so(cut: st.DataObject, whole: bytes, tmp_path: Path) -> None:
    check_cut(whole, cut.draw(st.integers(0, len(whole) - 1)), tmp_path / "cut.jsonl")


def test_a_file_that_was_cut_at_every_byte_around_a_line_says_so(whole: bytes, tmp_path: Path) -> None:
    ends = [position for position, byte in enumerate(whole) if byte == ord("\n")]
    for position in sorted({max(0, end + offset) for end in ends for offset in range(-2, 3)}):
        if position < len(whole):
            check_cut(whole, position, tmp_path / "cut.jsonl")


def check_cut(whole: bytes, size: int, file: Path) -> None:
    file.write_bytes(whole[:size])
    if b"\n" not in whole[:size]:
        with pytest.raises(RecordingError, match=r"cut\.jsonl, line 1: this is no header of a recording"):
            read_recording(file)
        return
    recording = read_recording(file)
    assert recording.truncated
    kinds = [json.loads(line)["kind"] for line in whole[:size].split(b"\n")[:-1]]
    assert len(recording.steps) == kinds.count("step")
    assert len(recording.caches) == kinds.count("cache")
    assert (recording.memory is not None) == ("memory" in kinds)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"{}\n",
        b'[{"kind": "header"}]\n',
        b'"header"\n',
        b"null\n",
        b'{"prompt": "Hello", "text": "there"}\n{"prompt": "a", "text": "b"}\n',
        b'{"kind": "step", "index": 0}\n',
        b'{"kind": "header", "version": 1}\n',
        b'{"kind": "header"',
        b"\x7fELF\x02\x01\x01\x00\xff\xfe\n\x00",
        bytes(range(256)) * 8000,
        b"plain text\nof two lines\n",
        b"[" * 100_000 + b"\n",
    ],
    ids=lambda content: repr(content[:20]),
)
def test_foreign_files_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "foreign").write_bytes(content)
    with pytest.raises(RecordingError, match=r"foreign, line 1: this is no header .*: give a file that") as caught:
        read_recording(tmp_path / "foreign")
    assert caught.value.line == 1


def test_a_path_without_a_file_is_told(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RecordingError, match="give a file that record=FILE wrote") as caught:
            read_recording(str(path))
        assert str(path) in str(caught.value)


DAMAGES: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"{nonsense}\n", "JSONDecodeError"),
    "no object": (b"[1]\n", "TypeError"),
    "no kind": (b'{"index": 1}\n', "KeyError: 'kind'"),
    "a list as kind": (b'{"kind": []}\n', "TypeError"),
    "a binary line": (b"\xff\xfe\n", "UnicodeDecodeError"),
    "a step without fields": (b'{"kind":"step","index":1}\n', "KeyError: 'num_tokens'"),
    "a cache without fields": (b'{"kind":"cache","layer":"x"}\n', "TypeError"),
    "a plan of nothing": (b'{"kind":"plan","plan":{}}\n', "PlanError"),
    "nesting without end": (b"[" * 100_000 + b"\n", "RecursionError"),
}


@pytest.mark.parametrize(("line", "problem"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_line_is_named(line: bytes, problem: str, whole: bytes, tmp_path: Path) -> None:
    lines = whole.splitlines(keepends=True)
    (tmp_path / "r.jsonl").write_bytes(b"".join([*lines[:4], line, *lines[4:]]))
    with pytest.raises(RecordingError, match=r"r\.jsonl, line 5: .*; record again") as caught:
        read_recording(tmp_path / "r.jsonl")
    assert problem in str(caught.value)
    assert caught.value.line == 5


@pytest.mark.parametrize("value", ["1", 1.5, None, [], 2**70])
@pytest.mark.parametrize("name", ["num_tokens", "epoch"])
def test_a_count_that_is_none_is_named(value: object, name: str, tmp_path: Path) -> None:
    file = rewrite(tmp_path / "r.jsonl", lambda line: line.update({name: value}) if line["kind"] == "step" else None)
    with pytest.raises(RecordingError, match="line 10: "):
        read_recording(file)


@pytest.mark.parametrize("name", ["mode", "key", "reason"])
def test_a_text_that_is_none_is_named(name: str, tmp_path: Path) -> None:
    file = rewrite(tmp_path / "r.jsonl", lambda line: line.update({name: 3}) if line["kind"] == "step" else None)
    with pytest.raises(RecordingError, match="line 10: TypeError: 3 is no text"):
        read_recording(file)


def test_lost_lines_are_noticed(whole: bytes, tmp_path: Path) -> None:
    lines = whole.splitlines(keepends=True)
    (tmp_path / "r.jsonl").write_bytes(b"".join([*lines[:-2], lines[-1]]))
    with pytest.raises(RecordingError, match="its end tells of 3 steps, and 2 are there"):
        read_recording(tmp_path / "r.jsonl")


def test_nothing_follows_the_end(whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_bytes(whole + whole)
    with pytest.raises(RecordingError, match="this follows the line that ends the recording") as caught:
        read_recording(tmp_path / "r.jsonl")
    assert caught.value.line == len(whole.splitlines()) + 1


def test_unknown_lines_matter_only_in_a_newer_version(tmp_path: Path) -> None:
    def with_unknown_line(version: int) -> Path:
        lines = lines_of(write_recording(tmp_path / "r.jsonl"))
        lines[0]["version"] = version
        lines.insert(2, {"kind": "weather", "sun": True})
        (tmp_path / "r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return tmp_path / "r.jsonl"

    assert len(read_recording(with_unknown_line(RECORDING_VERSION)).steps) == 3
    hint = f"it has version {RECORDING_VERSION + 1}, this tool reads {RECORDING_VERSION}: use the version that wrote it"
    with pytest.raises(RecordingError, match=rf"line 3: .*'weather' are not known here; {hint}"):
        read_recording(with_unknown_line(RECORDING_VERSION + 1))


def test_a_newer_version_of_known_lines_is_read_and_blamed_for_others(tmp_path: Path) -> None:
    def newer(line: dict[str, Any]) -> None:
        if line["kind"] == "header":
            line["version"] = RECORDING_VERSION + 1

    assert len(read_recording(rewrite(tmp_path / "r.jsonl", newer)).steps) == 3

    def newer_step(line: dict[str, Any]) -> None:
        newer(line)
        if line["kind"] == "step":
            del line["epoch"]

    with pytest.raises(RecordingError, match="line 10: KeyError: 'epoch'; it has version 2"):
        read_recording(rewrite(tmp_path / "r.jsonl", newer_step))


def test_a_long_recording_is_read_quickly(tmp_path: Path) -> None:
    """100,000 steps of eight requests; the bound is far above what it takes, and far below what a slow way takes."""
    recorder: Recorder = new_recorder(tmp_path / "r.jsonl")
    recorder.start(RUNNER)
    requests = tuple(ScheduledShare(str(number), 100, 1, True) for number in range(8))
    for index in range(100_000):
        recorder.add_step(make_step(index, num_tokens=8, requests=requests))
    recorder.close()
    begin = time.process_time()
    recording = read_recording(tmp_path / "r.jsonl")
    print(f"read in {time.process_time() - begin:.2f} s")
    assert len(recording.steps) == 100_000
    assert recording.steps.num_tokens.sum() == 800_000
    assert recording.steps[-1].requests == requests
    columns = [value for value in vars(recording.steps).values() if isinstance(value, np.ndarray)]
    columns += [value for value in vars(recording.steps.shares).values() if isinstance(value, np.ndarray)]
    assert sum(column.nbytes for column in columns) < 30e6
