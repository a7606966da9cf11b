"""Memory: sums agree with what they are sums of, and nothing is counted twice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_recordings import binding, cache, graph, weight, write_recording

from compiled_engine.compile.records import MemoryRecord
from compiled_engine_debug.cli import main
from compiled_engine_debug.memory import Block, MemoryReport, cache_groups, own_bytes, report_memory
from compiled_engine_debug.recording import read_recording

MEMORY = MemoryRecord(
    weights=164,
    kv_cache=2560,
    graphs=160,
    workspaces=500,
    estimated_working=10_000,
    resident=9000,
    device_allocated=None,
)
RECORDS = (
    weight("embed", 1000, 100),
    weight("head", 1000, 100),
    weight("norm", 2000, 64),
    cache("a", 10_000, 1024),
    cache("b", 20_000, 1024),
    cache("c", 20_000, 1024, shares_with="b"),
    cache("w", 30_000, 512, group=1),
    graph(
        "full decode 2 requests",
        binding("input", "ids", 500, 32),
        binding("workspace", "scores", 5000, 256),
        binding("weight", "embed", 1000, 100),
        binding("KV cache of layer", "a", 10_000, 1024),
        num_bytes=100,
    ),
    graph("piecewise 1 token", binding("input", "ids", 500, 16), num_bytes=20, seconds=0.25),
    graph("piecewise 1 token", part=2, num_bytes=40, seconds=0.5),
)


@pytest.fixture
def report(tmp_path: Path) -> MemoryReport:
    return report_memory(read_recording(write_recording(tmp_path / "a.jsonl", *RECORDS, MEMORY)))


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=10))
def test_own_bytes_add_up_to_the_bytes_that_are_covered(blocks: list[tuple[int, int]]) -> None:
    own = own_bytes([Block(*block) for block in blocks])
    covered = {place for begin, size in blocks for place in range(begin, begin + size)}
    assert sum(own) == len(covered)
    assert all(0 <= counted <= size for counted, (_, size) in zip(own, blocks, strict=True))


def test_blocks_without_an_address_count_in_full() -> None:
    assert own_bytes([Block(None, 5), Block(0, 4), Block(None, 5), Block(0, 4)]) == (5, 4, 5, 0)


def test_parts_against_the_engines_own_sums(report: MemoryReport) -> None:
    assert [(part.name, part.recorded, part.counted, part.difference) for part in report.parts] == [
        ("weights", 164, 164, 0),
        ("KV cache", 2560, 2560, 0),
        ("graphs", 160, 160, 0),
        ("workspaces", 500, 288, -212),
    ]
    assert (report.total.recorded, report.total.counted) == (3384, 3172)


def test_sums_of_tables_are_the_parts(report: MemoryReport) -> None:
    weights, caches, graphs, workspaces = (part.counted for part in report.parts)
    assert sum(item.own_bytes for item in report.weights) == weights
    assert sum(group.num_bytes for group in report.groups) == caches
    assert sum(key.num_bytes for key in report.keys) == graphs
    assert sum(item.own_bytes for item in report.buffers) == workspaces


def test_tied_weights_count_once_and_the_largest_come_first(report: MemoryReport) -> None:
    assert [(item.name, item.num_bytes, item.own_bytes) for item in report.weights] == [
        ("embed", 100, 100),
        ("head", 100, 0),
        ("norm", 64, 64),
    ]


def test_groups(report: MemoryReport) -> None:
    first, second = report.groups
    assert (first.group, first.num_layers, first.num_bytes, first.shared) == (0, 3, 2048, (("c", "b"),))
    assert (second.group, second.num_layers, second.num_bytes, second.shared) == (1, 1, 512, ())


def test_caches_of_other_shapes_are_groups_of_their_own() -> None:
    wide = replace(cache("b", 8192, 2048, group=1), shape=(2, 2, 2))
    groups = cache_groups([cache("a", 4096, 1024, group=1), wide, cache("c", None, 64, group=0)])
    assert [(group.group, group.num_layers, group.shape, group.num_bytes) for group in groups] == [
        (0, 1, cache("c", None, 64).shape, 64),
        (1, 1, cache("a", None).shape, 1024),
        (1, 1, (2, 2, 2), 2048),
    ]


def test_graphs_by_key_and_buffers(report: MemoryReport) -> None:
    assert [(key.key, key.num_graphs, key.num_launches, key.num_bytes, key.seconds) for key in report.keys] == [
        ("full decode 2 requests", 1, 2, 100, 0.5),
        ("piecewise 1 token", 2, 4, 60, 0.75),
    ]
    assert [(item.name, item.num_bytes) for item in report.buffers] == [("workspace scores", 256), ("input ids", 32)]


def test_shared_caches_without_addresses_count_once(tmp_path: Path) -> None:
    caches = [cache("a", None), cache("b", None, shares_with="a"), cache("c", None)]
    report = report_memory(read_recording(write_recording(tmp_path / "a.jsonl", *caches)))
    assert report.groups[0].num_bytes == 2048
    assert report.total.recorded is None
    assert report.expectations == ()


def test_expectations(tmp_path: Path, report: MemoryReport) -> None:
    assert [(item.expected, item.actual, item.difference) for item in report.expectations] == [
        (10_000, 160, -9840),
        (3384, 9000, 5616),
    ]
    on_device = replace(MEMORY, device_allocated=4000, resident=None, estimated_working=None)
    other = report_memory(read_recording(write_recording(tmp_path / "b.jsonl", on_device)))
    assert [(item.expected, item.actual, item.difference) for item in other.expectations] == [
        (3384, 4000, 616),
        (3384, None, None),
    ]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_recording(tmp_path / "a.jsonl", *RECORDS, MEMORY))
    assert main(["memory", path, "--top", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    totals = [line.split() for line in lines if line.startswith("total")]
    assert totals == [["total", "3.3", "KiB", "3.1", "KiB", "-212", "B"]]
    assert [line.split() for line in lines if line.startswith("and ")] == [
        ["and", "1", "more", "2", "4", "60", "B", "0.750"],
        ["and", "2", "more", "164", "B", "64", "B"],
        ["and", "1", "more", "32", "B", "32", "B"],
    ]
    assert any("c -> b" in line for line in lines)
    assert any(line.endswith("  9.8 KiB    160 B    -9.6 KiB") for line in lines)
    assert [line.rstrip() for line in lines] == lines
    assert main(["memory", path, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["parts"][-1] == {"name": "total", "recorded": 3384, "counted": 3172, "difference": -212}
    assert [item["name"] for item in data["weights"]] == ["embed", "head", "norm"]
    assert main(["memory", path, "--top", "0"]) == 0
    assert "embed" not in capsys.readouterr().out
