"""Generated code in the report: that of the recorded pieces, out of a store of compiled graphs."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
from report_html import read_page
from report_lines import recording_lines, write_lines

from compiled_engine.compile.plan import GraphPlan
from compiled_engine.compile.store import GraphStore, StoredModel
from compiled_engine.errors import ConfigError
from compiled_engine_debug.cli import EXIT_OK, EXIT_USAGE, main
from compiled_engine_debug.recording import read_recording
from compiled_engine_debug.report.generated import generated_code
from store_models import make_key, make_plan


def save(root: Path, plan: GraphPlan, text: str, **key: str) -> GraphStore:
    """A stored model of ``plan`` whose pieces have ``text`` and their key as code."""
    folder = root.with_name("packages")
    folder.mkdir(exist_ok=True)
    packages = {}
    for piece in plan.pieces:
        packages[piece.key] = folder / f"{piece.key}.pt2"
        with zipfile.ZipFile(packages[piece.key], "w") as archive:
            archive.writestr("p/data/model/x.wrapper.cpp", f"// {text} of {piece.key}")
            archive.writestr("p/data/model/a.kernel.cpp", f"// {text} kernel")
            archive.writestr("p/data/model/x.wrapper.so", b"\xff")
    store = GraphStore(root)
    store.save(make_key(**key), StoredModel(plan, packages, {}, {}, None, "TinyForCausalLM"))
    return store


def test_each_piece_has_its_sources(tmp_path: Path) -> None:
    plan = make_plan()
    save(tmp_path / "store", plan, "this")
    save(tmp_path / "store", make_plan(("other", "head")), "that", model__weights="9" * 64)
    (tmp_path / "store" / "plans" / ("0" * 64)).mkdir(mode=0o700)

    assert generated_code(tmp_path / "store", plan) == {
        piece.key: (("a.kernel.cpp", "// this kernel"), ("x.wrapper.cpp", f"// this of {piece.key}"))
        for piece in plan.pieces
    }


def test_the_newest_of_two_models_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan()
    for seconds, text, weights in ((2_000_000_000, "new", "8"), (1_000_000_000, "old", "7")):
        monkeypatch.setattr("compiled_engine.compile.store.time.time", lambda seconds=seconds: seconds)
        save(tmp_path / "store", plan, text, model__weights=weights * 64)

    for sources in generated_code(tmp_path / "store", plan).values():
        assert sources[0][1] == "// new kernel"


def test_a_store_without_the_pieces_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "store", make_plan(("other", "head")), "that")
    for root in (tmp_path / "store", tmp_path / "absent"):
        with pytest.raises(ConfigError, match="give the store that the run used"):
            generated_code(root, make_plan())


def test_a_damaged_package_is_named(tmp_path: Path) -> None:
    plan = make_plan()
    save(tmp_path / "store", plan, "this")
    package = min((tmp_path / "store" / "pieces").iterdir())
    os.chmod(package, 0o600)
    package.write_bytes(package.read_bytes() + b"0")
    with pytest.raises(ConfigError, match=f"{package.name} cannot be read"):
        generated_code(tmp_path / "store", plan)


def test_the_command_shows_generated_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = write_lines(tmp_path / "run.jsonl", recording_lines(3)), tmp_path / "report.html"
    plan = read_recording(run).plan
    assert plan is not None
    monkeypatch.setenv("COMPILED_ENGINE_CACHE", str(tmp_path / "cache"))
    assert main(["report", str(run), "-o", str(out), "--graphs"]) == EXIT_USAGE
    assert "give the store that the run used" in capsys.readouterr().err

    (tmp_path / "cache").mkdir()
    save(tmp_path / "cache" / "graphs", plan, "</script>")
    assert main(["report", str(run), "-o", str(out), "--graphs"]) == EXIT_OK
    generated = read_page(out.read_text(encoding="utf-8")).data("model-data")["generated"]
    assert set(generated) == {piece.key for piece in plan.pieces}
    assert all(items[1] == ["x.wrapper.cpp", f"// </script> of {key}"] for key, items in generated.items())

    assert main(["report", str(run), "-o", str(out)]) == EXIT_OK
    generated = read_page(out.read_text(encoding="utf-8")).data("model-data")["generated"]
    assert list(generated.values()) == [[] for _ in plan.pieces]
