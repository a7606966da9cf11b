"""Differences of two starts: each is named, nothing else is, and the key of stored graphs agrees with the engine's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_recordings import MODEL, VERSIONS, binding, cache, graph, weight, write_recording

from compiled_engine.compile.key import build_store_key
from compiled_engine.compile.ledger import Phase
from compiled_engine.compile.plan import AttentionStep, GraphPlan, PieceSpec, PieceStep, TensorSpec
from compiled_engine.compile.records import KeyRecord
from compiled_engine.compile.weights import WeightRecipe
from compiled_engine.config import EngineConfig
from compiled_engine.ops.attention import AttentionSpec
from compiled_engine_debug.cli import main
from compiled_engine_debug.diff import Comparison, compare
from compiled_engine_debug.diff_facts import read_contents
from compiled_engine_debug.recording import RecordingError

FULL, PIECEWISE = "full decode 2 requests", "piecewise 4 tokens"
OTHER_SETTINGS: dict[str, Any] = {
    "model": "elsewhere",
    "device": "cuda",
    "dtype": "bfloat16",
    "quantization": "int8",
    "max_model_len": 77,
    "graph_mode": "full",
    "graph_sizes": (1, 2),
    "max_graph_size": 5,
    "token_buckets": (4,),
    "request_buckets": (4,),
    "piece_compiler": "inductor",
    "graphs": "bundle",
    "on_compile": "warn",
    "record": "other.jsonl",
    "num_threads": 3,
    "kv_cache_memory": 4096,
    "gpu_memory_fraction": 0.5,
}


def plan(first: str = "a" * 40, head: str = "c" * 40, passes: int = 3, scale: float = 0.5) -> GraphPlan:
    """Pieces around two attentions; ``first``: key of the first of them, ``head``: of the last."""
    spec = TensorSpec(("s0", 4), (4, 1), torch.float32)
    pieces = tuple(PieceSpec(key, (spec,), (spec,), "code") for key in dict.fromkeys((first, "b" * 40, head)))
    steps: list[PieceStep | AttentionStep] = []
    for layer in range(2):
        steps.append(PieceStep(first if layer == 0 else "b" * 40, ("value:input_ids",), ("q",)))
        steps.append(AttentionStep(f"layer {layer}", "q", "q", "q", "out"))
    steps.append(PieceStep("b" * 40, ("value:out",), ("hidden",)))
    return GraphPlan(
        layers=tuple(AttentionSpec(f"layer {layer}", 4, 2, 8, scale) for layer in range(2)),
        weights=(WeightRecipe(("w",), (1, 16), torch.float32),),
        pieces=pieces,
        steps=tuple(steps),
        head=PieceStep(head, ("value:hidden",), ("logits",)),
        hidden="hidden",
        vocab_size=128,
        passes={"fuse": passes},
    )


def records(moved: int = 0, read_from: str = "layer 1", size: int = 0) -> list[Any]:
    """A start's records, all addresses ``moved``. ``read_from``: the layer whose cache the full graph reads as 1's."""
    at = {"layer 0": 10_000 + moved, "layer 1": 20_000 + moved}
    used = [
        binding("input", "ids", 400 + moved),
        binding("weight", "w", 1000 + moved),
        binding("KV cache of layer", "layer 0", at["layer 0"], 1024),
        binding("KV cache of layer", "layer 1", at[read_from], 1024),
    ]
    return [
        cache("layer 0", at["layer 0"]),
        cache("layer 1", at["layer 1"]),
        cache("a sharer", at["layer 1"], shares_with="layer 1"),
        weight("w", 1000 + moved),
        graph(FULL, *used),
        graph(PIECEWISE, binding("input", "ids", 400 + moved + size)),
        graph(PIECEWISE, part=2),
    ]


KEYS = (KeyRecord(FULL, 2, 2, "full"), KeyRecord(PIECEWISE, 4, 0, "piecewise"))


class Pair:
    """Writes and compares two starts; each method changes the second one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, name: str, made: list[Any] | None = None, **changes: Any) -> Path:
        usual: dict[str, Any] = {"keys": KEYS, "plan": json.loads(plan().to_json())}
        return write_recording(self._folder / name, *(records() if made is None else made), **{**usual, **changes})

    def compare(self, made: list[Any] | None = None, **changes: Any) -> Comparison:
        a, b = self.write("a.jsonl"), self.write("b.jsonl", made, **changes)
        return compare(read_contents(a), read_contents(b))


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def told(comparison: Comparison) -> list[tuple[str, str, Any, Any]]:
    return [(item.section, item.item, item.a, item.b) for item in comparison.differences]


def test_the_same_start_elsewhere_in_memory_and_at_another_time(pair: Pair) -> None:
    moved = [*records(moved=64_000), Phase("weights", 0.5, 1.0)]
    assert told(pair.compare(moved)) == []


def test_a_graph_that_reads_the_cache_of_another_layer_is_named(pair: Pair) -> None:
    comparison = pair.compare(records(moved=512, read_from="layer 0"))
    assert told(comparison) == [
        ("bindings", "KV cache of layer layer 1: place", "the cache of layer 1", "the cache of layer 0")
    ]
    assert comparison.differences[0].note == f"in {FULL}, part 0"


@pytest.mark.parametrize(
    ("offset", "place"),
    [(64, "the cache of layer 1, 64 bytes from its beginning"), (1 << 30, "outside of all caches")],
)
def test_a_cache_that_is_read_elsewhere(pair: Pair, offset: int, place: str) -> None:
    made = records()
    full = made[4]
    stale = dataclasses.replace(full.bindings[3], address=full.bindings[3].address + offset)
    made[4] = dataclasses.replace(full, bindings=(*full.bindings[:3], stale))
    assert told(pair.compare(made)) == [("bindings", "KV cache of layer layer 1: place", "the cache of layer 1", place)]


def test_a_buffer_that_is_elsewhere_in_one_graph(pair: Pair) -> None:
    lowest = "its lowest address in any graph"
    comparison = pair.compare(records(moved=4096, size=256))
    assert told(comparison) == [
        ("bindings", "input ids: place", lowest, "256 bytes from its lowest address in any graph")
    ]


def test_what_differs_in_several_graphs_is_told_once(pair: Pair) -> None:
    made = records()
    for place in (4, 5):
        ids, *others = made[place].bindings
        ids = dataclasses.replace(ids, dtype="int32")
        made[place] = dataclasses.replace(made[place], bindings=(ids, *others))
    comparison = pair.compare(made)
    assert told(comparison) == [("bindings", "input ids: dtype", "float32", "int32")]
    assert comparison.differences[0].note == f"in {FULL}, part 0 and 1 more graphs"


def changed_caches() -> list[Any]:
    first, second, third, *others = records()
    second = dataclasses.replace(second, group=3, dtype="bfloat16")
    return [first, second, dataclasses.replace(third, shares_with="layer 0"), *others]


CASES: dict[str, tuple[Callable[[], dict[str, Any]], list[tuple[str, str, Any, Any]]]] = {
    "cache": (
        lambda: {"made": changed_caches()},
        [
            ("caches", "layer 1: group", 0, 3),
            ("caches", "layer 1: dtype", "float32", "bfloat16"),
            ("caches", "a sharer: shares_with", "layer 1", "layer 0"),
        ],
    ),
    "passes": (
        lambda: {"plan": json.loads(plan(passes=2).to_json())},
        [("passes", "fuse: fired", 3, 2)],
    ),
    "attention": (
        lambda: {"plan": json.loads(plan(scale=0.25).to_json())},
        [
            ("attention layers", "layer 0: scale", 0.5, 0.25),
            ("attention layers", "layer 1: scale", 0.5, 0.25),
        ],
    ),
    "piece": (
        lambda: {"plan": json.loads(plan(first="d" * 40).to_json())},
        [
            (
                "pieces",
                "first to differ, 0 in order",
                f"piece {'a' * 16} before attention of layer 0",
                f"piece {'d' * 16} before attention of layer 0",
            ),
            ("pieces", f"piece {'a' * 16}: places", 1, None),
            ("pieces", f"piece {'d' * 16}: places", None, 1),
        ],
    ),
    "head": (
        lambda: {"plan": json.loads(plan(head="e" * 40).to_json())},
        [
            ("pieces", "first to differ, 3 in order", f"piece {'c' * 16} the head", f"piece {'e' * 16} the head"),
            ("pieces", f"piece {'c' * 16}: places", 1, None),
            ("pieces", f"piece {'e' * 16}: places", None, 1),
        ],
    ),
    "count of a piece": (
        lambda: {"plan": json.loads(plan(first="b" * 40).to_json())},
        [
            (
                "pieces",
                "first to differ, 0 in order",
                f"piece {'a' * 16} before attention of layer 0",
                f"piece {'b' * 16} before attention of layer 0",
            ),
            ("pieces", f"piece {'a' * 16}: places", 1, None),
            ("pieces", f"piece {'b' * 16}: places", 2, 3),
        ],
    ),
    "declared": (
        lambda: {"keys": KEYS[:1]},
        [("declared graphs", PIECEWISE, "piecewise", None)],
    ),
    "captured": (
        lambda: {"made": records()[:-1]},
        [
            ("captured graphs", f"{PIECEWISE}: graphs", 2, 1),
            ("captured graphs", f"{PIECEWISE}: launches", 4, 2),
        ],
    ),
    "launches": (
        lambda: {"made": [*records()[:-1], graph(PIECEWISE, part=2, launches=("piece a", "piece z"))]},
        [("captured graphs", "launch 1", "piece b", "piece z")],
    ),
    "weight": (
        lambda: {"made": [item if item != weight("w", 1000) else weight("w", 1000, 32) for item in records()]},
        [("weights", "w: shape", (1, 16), (1, 8)), ("weights", "w: num_bytes", 64, 32)],
    ),
    "versions": (
        lambda: {"versions": {**VERSIONS, "torch": "2.14.0", "python": "3.13.0"}},
        [("versions", "python", "3.12.1", "3.13.0"), ("versions", "torch", "2.13.0", "2.14.0")],
    ),
    "model": (
        lambda: {"model": dataclasses.replace(MODEL, dtype="float16")},
        [("model", "dtype", "float32", "float16")],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_difference(pair: Pair, name: str) -> None:
    changes, expected = CASES[name]
    assert told(pair.compare(**changes())) == expected


def test_components_of_versions_and_model(pair: Pair) -> None:
    changes = {**CASES["versions"][0](), **CASES["model"][0]()}
    assert pair.compare(**changes).components == ("engine.dtype", "torch.version")


def another_value(name: str, default: Any) -> Any:
    if name in OTHER_SETTINGS:
        return OTHER_SETTINGS[name]
    return not default if isinstance(default, bool) else default + 1


@pytest.mark.parametrize("name", [item.name for item in dataclasses.fields(EngineConfig)])
def test_a_setting_has_the_component_that_the_engine_gives_it(pair: Pair, name: str) -> None:
    usual = EngineConfig()
    other = dataclasses.replace(usual, **{name: another_value(name, getattr(usual, name))})
    comparison = pair.compare(config=other)
    keys = [build_store_key(config, torch.float32, {}, environment={}) for config in (usual, other)]
    differing = {item.name for item in keys[0].differences(keys[1].components) if not item.name.startswith("gpu.")}
    assert set(comparison.components) == differing
    # Where a recording goes is no difference of what it tells.
    assert [item.item for item in comparison.differences] == ([] if name == "record" else [name])


def test_another_gpu_of_the_same_kind_changes_no_key(tmp_path: Path) -> None:
    sides = [
        read_contents(write_recording(tmp_path / name, config=EngineConfig(device=name)))
        for name in ("cuda:0", "cuda:1")
    ]
    comparison = compare(*sides)
    assert (len(comparison.differences), comparison.components) == (1, ())


def test_what_only_one_file_tells_is_left_out(pair: Pair) -> None:
    comparison = pair.compare(plan=None)
    assert told(comparison) == []
    assert comparison.left_out == ("attention layers", "passes", "pieces")
    assert compare(comparison.b, comparison.a).left_out == comparison.left_out


def test_plans_and_keys_are_compared_too(tmp_path: Path, pair: Pair) -> None:
    (tmp_path / "plan.json").write_text(plan(passes=9).to_json())
    mixed = compare(read_contents(pair.write("a.jsonl")), read_contents(tmp_path / "plan.json"))
    assert told(mixed) == [("passes", "fuse: fired", 3, 9)]
    for name, value in (("x.json", "1"), ("y.json", "2")):
        (tmp_path / name).write_text(
            json.dumps({"key": value, "components": {"cpu.flags": value, "same": "s"}}, indent=1)
        )
    keys = compare(read_contents(tmp_path / "x.json"), read_contents(tmp_path / "y.json"))
    assert told(keys) == [("components of the store key", "cpu.flags", "1", "2")]
    assert keys.components == ("cpu.flags",)


@pytest.mark.parametrize("text", ["{}", "[1]", "hello", '{"version": 99}', '{"kind": "header"}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(RecordingError, match="file"):
        read_contents(tmp_path / "file")


def test_the_command_and_its_exit_codes(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    a, same = str(pair.write("a.jsonl")), str(pair.write("same.jsonl", records(moved=128)))
    b = str(pair.write("b.jsonl", **CASES["versions"][0]()))
    assert main(["diff", a, same]) == 0
    assert capsys.readouterr().out == "no differences\n"
    assert main(["diff", a, b]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["Versions"],
        ["item", "A", "B", "store", "key"],
        ["python", "3.12.1", "3.13.0"],
        ["torch", "2.13.0", "2.14.0", "torch.version"],
    ]
    assert lines[-1] == "the keys of stored graphs differ in: torch.version"
    assert main(["diff", a, b, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["key_components"] == ["torch.version"]
    assert data["differences"][0]["item"] == "python"
    assert main(["diff", a, b, "--limit", "1"]) == 1
    assert "2.14.0" not in capsys.readouterr().out
    assert main(["diff", a, a + "?"]) == 2
    assert "a.jsonl?" in capsys.readouterr().err


def test_the_command_says_why_a_start_missed(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    a = pair.write("a.jsonl", [*records(), Phase("graphs", 0.5, 1.0, note="hit")])
    b = pair.write("b.jsonl", [*records(), Phase("graphs", 0.5, 1.0, note="miss")])
    assert main(["diff", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert "A looked for stored graphs: hit\nB looked for stored graphs: miss\nnothing here changes the key" in out


def test_long_values_are_cut_where_they_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, end in (("x.json", "left"), ("y.json", "right")):
        (tmp_path / name).write_text(json.dumps({"components": {"cpu.flags": "same " * 200 + end}}, indent=1))
    assert main(["diff", str(tmp_path / "x.json"), str(tmp_path / "y.json")]) == 1
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("cpu.flags"))
    assert "same left" in row
    assert "same right" in row
    assert len(row) < 300
