"""Starts side by side: phases are matched by where they are, and both kinds of files are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_recordings import write_recording

from compiled_engine.compile.ledger import Ledger, Phase
from compiled_engine_debug.cli import main
from compiled_engine_debug.recording import RecordingError
from compiled_engine_debug.startup import Start, compare_starts, read_start

COLD = (
    Phase("imports", 0.5, 1.0),
    Phase("graphs", 1.5, 0.25, note="miss"),
    Phase("compile", 2.0, 20.0, note="2 of 2 pieces"),
    Phase("compile piece 12345678", 2.0, 8.0, depth=1),
    Phase("compile piece 9abcdef0", 10.0, 12.0, depth=1),
    Phase("weights", 22.5, 2.0, num_bytes=2048),
)
WARM = (
    Phase("imports", 0.5, 1.5),
    Phase("graphs", 2.0, 0.25, note="hit"),
    Phase("open graphs", 2.5, 0.5),
    Phase("weights", 3.0, 1.0, num_bytes=2048),
)


def start(*phases: Phase) -> Start:
    return Start("x", phases, max(phase.start + phase.seconds for phase in phases))


def names(*starts: Start) -> list[str]:
    return ["  " * row.depth + row.name for row in compare_starts(starts)]


def test_cold_and_warm_side_by_side() -> None:
    rows = compare_starts([start(*COLD), start(*WARM)])
    assert [(row.name, row.depth, row.differences) for row in rows] == [
        ("imports", 0, (0.5,)),
        ("graphs", 0, (0.0,)),
        ("open graphs", 0, (None,)),
        ("compile", 0, (None,)),
        ("compile piece 12345678", 1, (None,)),
        ("compile piece 9abcdef0", 1, (None,)),
        ("weights", 0, (-1.0,)),
    ]
    assert [phase and phase.seconds for phase in rows[2].phases] == [None, 0.5]


def test_totals_and_kinds() -> None:
    cold, warm = start(*COLD), start(*WARM)
    assert (cold.kind, cold.num_hits, cold.num_misses, cold.total_seconds) == ("cold", 0, 1, 24.5)
    assert (warm.kind, warm.num_hits, warm.num_misses, warm.outside_seconds) == ("warm", 1, 0, 0.75)
    # Phases inside others are part of these.
    assert cold.outside_seconds == 24.5 - (1.0 + 0.25 + 20.0 + 2.0)
    assert start(Phase("graphs", 0, 1, note="white")).kind == "plain"
    assert start(Phase("graphs", 0, 1, note="miss, failed")).kind == "cold"


def test_phases_of_one_name_are_counted_and_those_inside_stay_inside() -> None:
    a = start(Phase("A", 0, 1), Phase("x", 0, 1, depth=1), Phase("A", 1, 2), Phase("x", 1, 1, depth=1))
    b = start(
        Phase("A", 0, 5), Phase("A", 1, 7), Phase("x", 1, 6, depth=1), Phase("y", 1, 6, depth=1), Phase("x", 9, 1)
    )
    rows = compare_starts([a, b])
    assert [(row.name, row.depth, row.differences) for row in rows] == [
        ("A", 0, (4.0,)),
        ("x", 1, (None,)),
        ("A", 0, (5.0,)),
        ("x", 1, (5.0,)),
        ("y", 1, (None,)),
        ("x", 0, (None,)),
    ]


def test_three_starts_are_compared_with_the_first() -> None:
    (row,) = compare_starts([start(Phase("A", 0, seconds)) for seconds in (1.0, 4.0, 0.5)])
    assert row.differences == (3.0, -0.5)


@given(st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2)), max_size=9), min_size=1, max_size=3))
def test_every_phase_is_shown_once_and_in_its_order(texts: list[list[tuple[str, int]]]) -> None:
    starts = []
    for phases in texts:
        depth, made = -1, []
        for place, (name, wanted) in enumerate(phases):
            depth = min(wanted, depth + 1)
            made.append(Phase(name, place, 1.0, depth=depth))
        starts.append(Start("x", tuple(made), 0.0))
    rows = compare_starts(starts)
    for place, one in enumerate(starts):
        shown = [(row.phases[place], row.depth) for row in rows if row.phases[place] is not None]
        assert sorted(shown, key=lambda pair: pair[0].start) == [(phase, phase.depth) for phase in one.phases]
    assert names(starts[0]) == ["  " * phase.depth + phase.name for phase in starts[0].phases]


def test_a_recording_and_a_ledger_read_the_same(tmp_path: Path) -> None:
    ledger = Ledger()
    with ledger.phase("outer"), ledger.phase("inner") as phase:
        phase.note = "hit"
    (tmp_path / "ledger.json").write_text(json.dumps(ledger.to_json(), indent=1))
    recording = write_recording(tmp_path / "a.jsonl", *ledger.phases)
    from_ledger, from_recording = read_start(tmp_path / "ledger.json"), read_start(recording)
    assert from_ledger.phases == from_recording.phases == ledger.phases
    assert from_ledger.total_seconds == from_recording.total_seconds == ledger.total_seconds
    assert read_start(write_recording(tmp_path / "b.jsonl")).total_seconds == 0


@pytest.mark.parametrize(
    "text", ['{"phases": [{"name": 3}]}', '{"phases": [7]}', '{"phases": [], "total_seconds": "x"}', "{}", "no", ""]
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(RecordingError, match="file"):
        read_start(tmp_path / "file")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cold = write_recording(tmp_path / "cold.jsonl", *COLD)
    warm = write_recording(tmp_path / "warm.jsonl", *WARM)
    assert main(["startup", str(cold), str(warm)]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = {line.split("  ")[0]: line.split() for line in lines if line}
    assert cells["weights"] == ["weights", "2.000", "1.000", "-1.000"]
    assert cells["graphs"] == ["graphs", "0.250", "0.250", "+0.000", "miss", "hit"]
    assert cells["total"] == ["total", "24.500", "4.000", "-20.500"]
    assert any(line.startswith("  compile piece 12345678") for line in lines)
    assert f"warm.jsonl: warm start, 1 hits, 0 misses, {warm}" in lines
    assert main(["startup", str(cold), str(warm), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [one["kind"] for one in data["starts"]] == ["cold", "warm"]
    assert data["phases"][-1]["differences"] == [-1.0]
    assert main(["startup", str(cold), str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err


def test_files_of_one_name_are_numbered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").mkdir()
    files = [write_recording(folder / "run.jsonl", *WARM) for folder in (tmp_path, tmp_path / "other")]
    assert main(["startup", *map(str, files)]) == 0
    assert "2 run.jsonl: warm start" in capsys.readouterr().out
