"""The ledger: times that add up, nesting, failures, and the three ways to read it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from compiled_engine.compile.ledger import Ledger, Phase, format_bytes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The reading of the clock, in a list so that a test can set it."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_phases_nest_and_keep_the_order_in_which_they_began(clock: list[float]) -> None:
    ledger = Ledger(zero=100.0)
    clock[0] = 101
    with ledger.phase("load") as outer:
        clock[0] = 103
        with ledger.phase("weights") as inner:
            inner.num_bytes = 7
            clock[0] = 106
        ledger.add("piece", 2.5, note="miss")
        assert [phase.name for phase in ledger.phases] == ["weights", "piece"]
        outer.note = "hit"
        clock[0] = 110
    ledger.add("first token", 1.0, start=20.0, num_bytes=0)
    assert ledger.phases == (
        Phase("load", 1, 9, None, "hit", 0),
        Phase("weights", 3, 3, 7, None, 1),
        Phase("piece", 3.5, 2.5, None, "miss", 1),
        Phase("first token", 20, 1, 0, None, 0),
    )
    assert ledger.total_seconds == 21


def test_failed_phase_is_kept_and_the_next_one_is_not_inside_it(clock: list[float]) -> None:
    ledger = Ledger(zero=100.0)

    def fail() -> None:
        with ledger.phase("load") as handle:
            handle.note = "miss"
            clock[0] = 102
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    with pytest.raises(KeyboardInterrupt), ledger.phase("run"):
        raise KeyboardInterrupt
    with ledger.phase("later"):
        pass
    assert [(phase.name, phase.seconds, phase.note, phase.depth) for phase in ledger.phases] == [
        ("load", 2, "miss, failed", 0),
        ("run", 0, "failed", 0),
        ("later", 0, None, 0),
    ]


def test_empty_ledger(clock: list[float]) -> None:
    ledger = Ledger(zero=0.0)
    assert (ledger.phases, ledger.total_seconds) == ((), 0)
    assert str(ledger).splitlines()[-1].split() == ["total", "0.000"]
    assert ledger.to_json() == {"total_seconds": 0, "phases": []}


tree = st.recursive(st.just([]), lambda children: st.lists(children, max_size=3), max_leaves=12)


@given(tree, st.data())
def test_inner_phases_lie_within_outer_ones(shape: list, data: st.DataObject) -> None:
    """For any nesting: children inside their parent in time, siblings one after the other, order of beginning."""
    now = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now[0])
        ledger = Ledger(zero=0.0)

        def walk(children: list, depth: int) -> None:
            for child in children:
                now[0] += data.draw(st.integers(0, 3))
                with ledger.phase(f"depth {depth}"):
                    walk(child, depth + 1)
                    now[0] += data.draw(st.integers(0, 3))

        walk(shape, 0)
    ends: list[float] = []  # of the phases that are open, by depth
    for phase in ledger.phases:
        assert phase.name == f"depth {phase.depth}"
        assert phase.depth <= len(ends)
        previous_end = ends[phase.depth] if phase.depth < len(ends) else 0
        assert phase.start >= previous_end
        ends[phase.depth :] = [phase.start + phase.seconds]
        assert all(outer >= ends[-1] for outer in ends)
    assert ledger.total_seconds == (ends[0] if ends else 0)
    assert [phase.start for phase in ledger.phases] == sorted(phase.start for phase in ledger.phases)


def test_json_is_complete_and_plain(clock: list[float]) -> None:
    ledger = Ledger(zero=100.0)
    ledger.add("load", 2.0, start=1.0, num_bytes=5, note="hit")
    data = json.loads(json.dumps(ledger.to_json()))
    assert data == {
        "total_seconds": 3.0,
        "phases": [{"name": "load", "start": 1.0, "seconds": 2.0, "num_bytes": 5, "note": "hit", "depth": 0}],
    }


def test_table_and_text_say_the_same(clock: list[float]) -> None:
    ledger = Ledger(zero=100.0)
    with ledger.phase("compile"):
        ledger.add("piece [a]", 0.25, num_bytes=3 * 2**20, note="1 of 2 [x]")
        clock[0] = 101.5
    output = io.StringIO()
    Console(file=output, width=120).print(ledger.table())
    for text in (output.getvalue(), str(ledger)):
        words = " ".join(text.split())
        for cell in ("compile", "piece [a]", "1.500", "0.250", "3.0 MiB", "1 of 2 [x]", "total"):
            assert cell in words, f"{cell!r} is missing in {text}"
    header, outer, inner, total = str(ledger).splitlines()
    assert header.split() == ["phase", "start", "seconds", "size", "note"]
    assert outer.startswith("compile")
    assert inner.startswith("  piece")
    assert total.split() == ["total", "1.500"]


def test_threads_may_add(clock: list[float]) -> None:
    ledger = Ledger(zero=100.0)
    with ledger.phase("compile"):
        threads = [threading.Thread(target=lambda: [ledger.add("piece", 0.0) for _ in range(200)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [phase.depth for phase in ledger.phases if phase.name == "piece"] == [1] * 800


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (2**52, "4096.0 TiB")],
)
def test_format_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_time_counts_from_the_start_of_the_process() -> None:
    """A process that sleeps before it makes a ledger finds the sleep in it, and no more than its parent waited."""
    program = "import time; time.sleep(0.3); from compiled_engine.compile.ledger import Ledger; print(Ledger().now)"
    begin = time.monotonic()
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    waited = time.monotonic() - begin
    assert 0.3 <= float(result.stdout) <= waited + 0.02  # the kernel counts in hundredths


def test_where_the_system_does_not_tell_time_counts_from_now(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_such_file(*args: object, **kwargs: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", no_such_file)
    before = time.monotonic()
    now = Ledger().now
    assert 0 <= now <= time.monotonic() - before


def test_ledger_imports_nothing_heavy() -> None:
    program = (
        "import sys; from compiled_engine.compile.ledger import Ledger; ledger = Ledger(); str(ledger); "
        "print(*[name for name in ('torch', 'rich', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
