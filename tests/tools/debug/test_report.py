"""The report's numbers, worked out again from the lines; what it finds; and that nothing in a recording breaks it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_html import Page, read_page
from report_lines import (
    DECODE_SIZES,
    Line,
    decode_key,
    layer_names,
    piecewise_key,
    recording_lines,
    steps,
    write_lines,
)

from compiled_engine import LLM
from compiled_engine.compile.ledger import format_bytes
from compiled_engine_debug.bundle import write_bundle
from compiled_engine_debug.cli import EXIT_OK, EXIT_USAGE, main
from compiled_engine_debug.findings import Finding
from compiled_engine_debug.recording import read_recording
from compiled_engine_debug.report import render_report
from graph_runners import GREEDY, SETTINGS
from tiny_models import write_tiny_model

SECTIONS = ("findings", "start-up", "model", "bindings", "steps", "keys", "compiles", "memory")
NASTY = "</script></style>--><img src=x onerror=alert(1)>\"'&amp;\u2028{{ 7 * 7 }}"


def kind(lines: list[Line], name: str) -> list[Line]:
    return [line for line in lines if line["kind"] == name]


def page_of(tmp_path: Path, lines: list[Line], **others: Any) -> Page:
    return read_page(render_report(read_recording(write_lines(tmp_path / "run.jsonl", lines)), **others))


def detectors(page: Page) -> list[str]:
    return [item.attributes["data-detector"] for item in page.with_attribute("data-detector")]


def finding(page: Page, detector: str) -> str:
    (element,) = page.with_attribute("data-detector", detector)
    return " ".join(element.text.split())


def test_numbers_at_the_top_are_those_of_the_lines(tmp_path: Path) -> None:
    lines = recording_lines(700, with_faults=True)
    page = page_of(tmp_path, lines)
    ran = kind(lines, "step")
    assert page.number("data-figure", "num_steps") == 700
    assert page.number("data-figure", "num_tokens") == sum(line["num_tokens"] for line in ran)
    wasted = sum(line["num_padded_tokens"] - line["num_tokens"] for line in ran)
    assert page.number("data-figure", "num_wasted_tokens") == wasted > 0
    assert page.number("data-figure", "num_eager_steps") == sum(line["mode"] == "eager" for line in ran) > 0
    assert page.number("data-figure", "num_captured_keys") == 6
    assert page.number("data-figure", "num_layers") == 4
    assert page.number("data-figure", "num_late_compiles") == 1
    ready = max(line["start"] + line["seconds"] for line in kind(lines, "phase"))
    assert page.number("data-figure", "ready_seconds") == ready
    for mode, count in Counter(line["mode"] for line in ran).items():
        assert page.number("data-mode", mode) == count


def test_keys_add_up_to_what_their_steps_had(tmp_path: Path) -> None:
    lines = recording_lines(700)
    page = page_of(tmp_path, lines)
    ran = kind(lines, "step")
    rows = page.with_attribute("data-key")
    assert sorted(row.attributes["data-key"] for row in rows) == sorted(
        item["key"] for item in kind(lines, "keys")[0]["keys"]
    )
    for row in rows:
        own = [line for line in ran if line["key"] == row.attributes["data-key"]]
        assert int(row.attributes["data-steps"]) == len(own)
        assert int(row.attributes["data-tokens"]) == sum(line["num_tokens"] for line in own)
        assert int(row.attributes["data-padded"]) == sum(line["num_padded_tokens"] for line in own)


def test_phases_and_memory_are_those_of_the_lines(tmp_path: Path) -> None:
    lines = recording_lines(20)
    page = page_of(tmp_path, lines)
    shown = [
        (item.attributes["data-phase"], float(item.attributes["data-value"]))
        for item in page.with_attribute("data-phase")
    ]
    assert shown == [(line["name"], line["seconds"]) for line in kind(lines, "phase")]
    (memory,) = kind(lines, "memory")
    amounts = {
        item.attributes["data-memory"]: float(item.attributes["data-value"])
        for item in page.with_attribute("data-memory")
    }
    assert amounts == {name: value for name, value in memory.items() if name != "kind" and value is not None}
    parts = sum(memory[name] for name in ("weights", "kv_cache", "graphs", "workspaces"))
    assert page.number("data-figure", "memory_total") == parts


def test_cold_and_warm_starts_stand_side_by_side(tmp_path: Path) -> None:
    cold, warm = recording_lines(5), recording_lines(5, compiling=0.2)
    other = read_recording(write_lines(tmp_path / "warm.jsonl", warm))
    page = page_of(tmp_path, cold, warm=other)
    for style, lines in (("cold", cold), ("warm", warm)):
        shown = {item.attributes["data-phase"]: item for item in page.with_attribute("data-start", style)}
        assert {name: float(item.attributes["data-value"]) for name, item in shown.items()} == {
            line["name"]: line["seconds"] for line in kind(lines, "phase")
        }
        end = max(line["start"] + line["seconds"] for line in kind(lines, "phase"))
        assert page.number("data-figure", f"total_{style}") == end


def test_the_strip_names_what_every_step_of_the_plan_uses(tmp_path: Path) -> None:
    lines = recording_lines(5, num_layers=5)
    page = page_of(tmp_path, lines)
    plan = kind(lines, "plan")[0]["plan"]
    counts = Counter(step["piece"] for step in [*plan["steps"], plan["head"]] if "piece" in step)
    assert [page.number("data-kind", letter) for letter in "ABCD"] == list(counts.values()) == [1, 4, 1, 1]
    model = page.data("model-data")
    blocks = page.with_attribute("aria-controls", "panel")
    assert len(blocks) == len(model["steps"]) == len(plan["steps"]) + 1
    caches = {line["layer"]: line for line in kind(lines, "cache")}
    pieces = {piece["key"]: piece for piece in plan["pieces"]}
    for block, shown, step in zip(blocks, model["steps"], [*plan["steps"], plan["head"]], strict=True):
        if "layer_name" in step:
            cache = caches[step["layer_name"]]
            binding = dict(shown["binding"])
            assert binding["layer"] == step["layer_name"]
            assert step["layer_name"] in block.attributes["title"]
            assert binding["address"] == hex(cache["address"])
            assert binding["group"] == str(cache["group"])
            assert (binding["shape"], binding["dtype"]) == (str(cache["shape"]), cache["dtype"])
            assert binding["graphs"].startswith(f"{len(DECODE_SIZES)} bind this address, 0 ")
        else:
            assert block.attributes["data-piece"] == step["piece"]
            assert model["code"][shown["code"]] == pieces[step["piece"]]["code"]
            weights = [name.removeprefix("weight:") for name in step["inputs"] if name.startswith("weight:")]
            assert [row[0] for row in shown["weights"]["rows"]] == weights != []
            assert [row[0] for row in shown["values"][1]["rows"]] == step["outputs"]
            shapes = [f"[{', '.join(map(str, spec['shape']))}]" for spec in pieces[step["piece"]]["outputs"]]
            assert [row[1] for row in shown["values"][1]["rows"]] == shapes


def test_graphs_that_bind_alike_share_a_row_and_a_moved_cache_is_told_apart(tmp_path: Path) -> None:
    lines = recording_lines(5, with_faults=True)
    page = page_of(tmp_path, lines)
    assert sorted(int(row.attributes["data-graphs"]) for row in page.with_attribute("data-graphs")) == [1, 3, 10]
    others = [
        item for item in page.elements if item.attributes.get("class") == "cell other" and "title" in item.attributes
    ]
    layer, address = layer_names(4)[1], kind(lines, "cache")[1]["address"]
    assert [item.attributes["title"] for item in others] == [
        f"{layer}: captured at {address + 0x10000:#x}, now at {address:#x}"
    ]
    assert f"'{layer}' is at {address + 0x10000:#x}, while the engine has it at {address:#x}" in finding(
        page, "stale address"
    )
    assert page_of(tmp_path, recording_lines(5)).with_attribute("data-detector", "stale address") == []


def test_a_rebinding_of_all_caches_is_one_finding(tmp_path: Path) -> None:
    lines = [
        {**line, "address": line["address"] + 0x1000} if line["kind"] == "cache" else line
        for line in recording_lines(5, num_layers=9)
    ]
    text = finding(page_of(tmp_path, lines), "stale address")
    first = next(line for line in lines if line["kind"] == "cache")
    assert text.startswith("Problem: stale address In 4 captured graphs the KV cache of layer")
    assert (
        f"'{first['layer']}' is at {first['address'] - 0x1000:#x}, while the engine has it at {first['address']:#x}"
        in text
    )
    assert "and 3 more" in text
    assert "layer model" not in text.rpartition("The graphs")[2]


def test_eager_steps_are_one_finding_for_reasons_that_differ_in_numbers(tmp_path: Path) -> None:
    lines = recording_lines(700)
    eager = [line for line in kind(lines, "step") if line["mode"] == "eager"]
    assert len({line["reason"] for line in eager}) > 2
    text = finding(page_of(tmp_path, lines), "fallback to eager")
    assert f"{len(eager)} steps of 700 ran eagerly" in text
    assert eager[0]["reason"] in text
    assert f"step {eager[0]['index']}" in text


def test_each_fault_in_a_recording_is_found_and_is_not_found_without_it(tmp_path: Path) -> None:
    clean = recording_lines(12)
    assert "compile after warm-up" not in detectors(page_of(tmp_path, clean))
    used = {line["key"] for line in kind(clean, "step")}
    unused = [item["key"] for item in kind(clean, "keys")[0]["keys"] if item["key"] not in used]
    text = finding(page_of(tmp_path, clean), "key never used")
    assert f"{len(unused)} declared keys of 6" in text
    assert unused[0] in text

    late = page_of(tmp_path, recording_lines(12, with_faults=True))
    assert "sample_rows" in finding(late, "compile after warm-up")
    assert "size mismatch" in finding(late, "compile after warm-up")
    assert "truncated file" in detectors(page_of(tmp_path, clean[:-1]))
    assert "truncated file" not in detectors(page_of(tmp_path, clean))

    without = [line for line in clean if line.get("key") != decode_key(2) or line["kind"] != "graph"]
    assert decode_key(2) in finding(page_of(tmp_path, without), "key not captured")
    failed = [{**line, "note": "miss, failed"} if line.get("name") == "trace" else line for line in clean]
    assert "'trace'" in finding(page_of(tmp_path, failed), "failed phase")


@pytest.mark.parametrize(("num_tokens", "is_wasteful"), [(7, True), (8, True), (9, False)])
def test_a_key_is_wasteful_from_half_padding_on(tmp_path: Path, num_tokens: int, is_wasteful: bool) -> None:
    lines = [line for line in recording_lines(1) if line["kind"] not in ("step", "end")]
    (first,) = steps(1)
    step = {**first, "num_tokens": num_tokens, "num_padded_tokens": 16, "mode": "piecewise", "key": piecewise_key(16)}
    page = page_of(tmp_path, [*lines, step, {"kind": "end", "num_steps": 1}])
    assert ("wasteful key" in detectors(page)) is is_wasteful


def test_a_wasteful_key_that_hardly_ran_is_no_finding(tmp_path: Path) -> None:
    lines = [line for line in recording_lines(1) if line["kind"] not in ("step", "end")]
    (first,) = steps(1)
    wasteful = {**first, "num_tokens": 1, "num_padded_tokens": 16, "mode": "piecewise", "key": piecewise_key(16)}
    sound = {**first, "num_tokens": 32, "num_padded_tokens": 32, "mode": "piecewise", "key": piecewise_key(32)}
    many = [{**sound, "index": index} for index in range(1, 20)]
    assert "wasteful key" not in detectors(
        page_of(tmp_path, [*lines, wasteful, *many, {"kind": "end", "num_steps": 20}])
    )


SLOT_FINDING = Finding("slot-mapping", "Slot 57 is another's.", 12, "model.layers.3", "r1", 57)


def test_given_findings_come_first(tmp_path: Path) -> None:
    page = page_of(tmp_path, recording_lines(12, with_faults=True), found=(SLOT_FINDING,))
    assert detectors(page)[0] == "slot-mapping"
    assert finding(page, "slot-mapping").endswith("step 12 layer model.layers.3 request r1 slot 57")


def test_nothing_in_a_recording_becomes_markup(tmp_path: Path) -> None:
    lines = recording_lines(30, model=NASTY, prefix=NASTY, code=NASTY, with_faults=True)
    for line in lines:
        for name in ("note", "what", "reason", "inputs"):
            if line.get(name):
                line[name] = NASTY
        for share in line.get("requests", ()):
            share[0] = NASTY
    plain = page_of(tmp_path, recording_lines(30, with_faults=True))
    page = page_of(tmp_path, lines)
    assert [item.tag for item in page.elements if item.tag in ("script", "style", "img")] == [
        item.tag for item in plain.elements if item.tag in ("script", "style", "img")
    ]
    assert next(item for item in page.elements if item.tag == "h1").text == NASTY
    assert set(page.data("model-data")["code"].values()) == {NASTY}
    assert page.data("steps-data")["shown"][0]["requests"][0][0] == NASTY
    assert NASTY in finding(page, "compile after warm-up").replace(" {{", "\u2028{{")


@pytest.mark.parametrize(
    "drop",
    [
        lambda line: line["kind"] == "plan",
        lambda line: line["kind"] == "graph",
        lambda line: line["kind"] in ("graph", "keys"),
        lambda line: line["kind"] in ("step", "end"),
        lambda line: line["kind"] != "header",
        lambda line: line["kind"] in ("weight", "cache", "memory", "phase", "compile"),
    ],
)
def test_whatever_is_missing_every_section_is_there(tmp_path: Path, drop: Callable[[Line], bool]) -> None:
    page = page_of(tmp_path, [line for line in recording_lines(30) if not drop(line)])
    assert [item.attributes["id"] for item in page.elements if item.tag == "section"] == list(SECTIONS)


def test_a_start_that_failed_is_the_first_finding(tmp_path: Path) -> None:
    lines = [line for line in recording_lines(1) if line["kind"] in ("header", "phase")]
    lines[0]["model"] = None
    assert detectors(page_of(tmp_path, lines))[0] == "start"


def test_without_a_plan_the_layers_are_listed(tmp_path: Path) -> None:
    page = page_of(tmp_path, recording_lines(5, with_plan=False))
    (section,) = page.with_attribute("id", "model")
    assert all(name in section.text for name in layer_names(4))


def test_the_page_asks_for_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = page_of(tmp_path, recording_lines(30))
    assert page.with_attribute("src") == []
    assert all(item.attributes["href"].startswith(("#", "data:")) for item in page.with_attribute("href"))
    (style,) = (item for item in page.elements if item.tag == "style")
    assert re.search(r"@import|url\(", style.text) is None
    (policy,) = page.with_attribute("http-equiv")
    assert policy.attributes["content"].startswith("default-src 'none'")


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, warm = (write_lines(tmp_path / f"{name}.jsonl", recording_lines(20)) for name in ("run", "warm"))
    found, out = tmp_path / "findings.json", tmp_path / "report.html"
    found.write_text(json.dumps({"rungs": [{"findings": [SLOT_FINDING.to_json()]}]}))
    assert main(["report", str(run), "--warm", str(warm), "--findings", str(found), "-o", str(out)]) == EXIT_OK
    assert "report.html" in capsys.readouterr().err
    page = read_page(out.read_text(encoding="utf-8"))
    assert page.number("data-figure", "num_steps") == 20
    assert len(page.with_attribute("data-start", "warm")) == len(page.with_attribute("data-start", "cold"))
    assert "slot-mapping" in detectors(page)


def test_the_command_shows_a_bundle_with_its_findings(tmp_path: Path) -> None:
    recording = read_recording(write_lines(tmp_path / "run.jsonl", recording_lines(20)))
    bundle, out = tmp_path / "b.zip", tmp_path / "report.html"
    write_bundle(bundle, recording, findings=[SLOT_FINDING])
    (tmp_path / "none.json").write_text("[]")

    assert main(["report", str(bundle), "--warm", str(bundle), "-o", str(out)]) == EXIT_OK
    page = read_page(out.read_text(encoding="utf-8"))
    assert page.number("data-figure", "num_steps") == 20
    assert "slot-mapping" in detectors(page)
    assert main(["report", str(bundle), "--findings", str(tmp_path / "none.json"), "-o", str(out)]) == EXIT_OK
    assert "slot-mapping" not in detectors(read_page(out.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["missing.jsonl", "-o", "out.html"], "missing.jsonl"),
        (["run.jsonl", "-o", "no/such/folder.html"], "folder.html"),
        (["run.jsonl", "-o", "out.html", "--findings", "gone.json"], "gone.json"),
        (["run.jsonl", "-o", "out.html", "--warm", "cold.jsonl"], "cold.jsonl"),
    ],
)
def test_the_command_refuses_files_that_are_not_there(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    culprit: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "run.jsonl", recording_lines(3))
    assert main(["report", *arguments]) == EXIT_USAGE
    assert culprit in capsys.readouterr().err


def test_a_run_of_the_engine_is_shown_as_it_was_recorded(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", "gemma3")
    run, out = tmp_path / "run.jsonl", tmp_path / "report.html"
    settings = {**SETTINGS, "graph_mode": "full_and_piecewise", "record": str(run)}
    with LLM(str(tmp_path / "model"), **settings) as llm:
        llm.generate(["abcdefg" * (index % 5 + 1) for index in range(9)], GREEDY)
    lines = [json.loads(line) for line in run.read_text().splitlines()]
    assert main(["report", str(run), "-o", str(out)]) == EXIT_OK
    page = read_page(out.read_text(encoding="utf-8"))
    ran, captured = kind(lines, "step"), kind(lines, "graph")
    assert page.number("data-figure", "num_steps") == len(ran) > 0
    assert page.number("data-figure", "num_tokens") == sum(line["num_tokens"] for line in ran)
    assert page.number("data-figure", "num_captured_keys") == len({line["key"] for line in captured}) > 0
    assert sum(int(row.attributes["data-graphs"]) for row in page.with_attribute("data-graphs")) == len(captured)
    assert not {"stale address", "compile after warm-up", "truncated file", "key not captured"} & set(detectors(page))
    pieces = [step for step in page.data("model-data")["steps"] if "weights" in step]
    weights = {row[0]: row[3] for step in pieces for row in step["weights"]["rows"]}
    assert weights == {line["name"]: format_bytes(line["num_bytes"]) for line in kind(lines, "weight")}


@pytest.mark.slow
def test_a_hundred_thousand_steps_take_less_than_a_gigabyte(tmp_path: Path) -> None:
    run = write_lines(tmp_path / "run.jsonl", recording_lines(100_000, num_layers=30))
    # Not getrusage, whose maximum a process has from the one that started it.
    program = (
        "import re, sys; from compiled_engine_debug.cli import main; code = main(sys.argv[1:]); "
        "print(code, re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1])"
    )
    out = tmp_path / "report.html"
    command = [sys.executable, "-c", program, "report", str(run), "-o", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    code, kibibytes = result.stdout.split()
    assert int(code) == EXIT_OK
    assert int(kibibytes) < 1_000_000
    assert out.stat().st_size < 3_000_000
    page = read_page(out.read_text(encoding="utf-8"))
    assert page.number("data-figure", "num_steps") == 100_000
    assert len(page.data("steps-data")["first"]) <= 1500
