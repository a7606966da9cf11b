"""``compiled-engine graphs`` on real stores: list, explain, verify, clear, and their exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine import cli
from compiled_engine.cli.graphs import _around_difference
from compiled_engine.compile.key import StoreKey
from compiled_engine.compile.store import GraphStore
from compiled_engine.config import EngineConfig, default_store_root
from compiled_engine.models import find_model
from compiled_engine.runners.precompile import lookup
from store_models import COMPONENTS, all_files, make_key, make_model
from tiny_models import write_tiny_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of this test's own."""
    monkeypatch.setenv("COMPILED_ENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def fill(root: Path, *keys: StoreKey) -> GraphStore:
    store = GraphStore(root)
    for seed, key in enumerate(keys):
        store.save(key, make_model(root.parent / "packages" / str(seed), seed))
    return store


def run(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["graphs", *map(str, arguments)])
    shown = capfd.readouterr()
    return code, shown.out, shown.err


def test_list(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capfd, "list")
    assert (code, out) == (0, "")
    assert f"0 stored in {default_store_root()}" in err
    keys = [make_key(), make_key(engine__dtype="bfloat16")]
    fill(default_store_root(), *keys)
    code, out, err = run(capfd, "list")
    assert code == 0
    header, *rows = out.splitlines()
    assert header.split() == ["key", "model", "created", "size", "pieces"]
    assert sorted(row.split()[0] for row in rows) == sorted(key.digest[:16] for key in keys)
    assert all("TinyForCausalLM" in row and row.split()[-1] == "3" for row in rows)
    assert "2 stored" in err
    code, out, _ = run(capfd, "list", "--json")
    entries = [json.loads(line) for line in out.splitlines()]
    assert {entry["key"] for entry in entries} == {key.digest for key in keys}
    assert all(entry["num_bytes"] > 600 and len(entry["packages"]) == 3 for entry in entries)
    assert run(capfd, "list", "--graphs", tmp_path / "none")[1] == ""


def test_explain_a_hit_and_misses(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The key is the one that a start would look for; all of its components are shown."""
    key, _ = lookup(EngineConfig(model=str(model)), find_model(str(model)))
    code, out, _ = run(capfd, "explain", model)
    assert code == 1
    assert "state  miss" in out
    assert "Nothing is stored there" in out
    fill(default_store_root(), key, make_key())
    code, out, _ = run(capfd, "explain", model)
    assert code == 0
    assert key.digest in out
    assert "state  hit" in out
    lines = out.splitlines()
    for name, text in key.components.items():
        (line,) = [line for line in lines if line.split(maxsplit=1)[:1] == [name]]
        assert line.endswith("...") or line.split(maxsplit=1)[1:] == ([" ".join(text.split())] if text else [])
    code, out, _ = run(capfd, "explain", "--model", model, "--dtype", "bfloat16")
    assert code == 1
    after = out.partition(f"The nearest stored key is {key.digest[:16]}. It differs in:\n")[2]
    assert after.splitlines() == ["  engine.dtype", "    stored  float32", "    wanted  bfloat16"]


def test_explain_has_nothing_to_say_about_a_tpu(capfd: pytest.CaptureFixture[str]) -> None:
    """It is told before the model is looked for."""
    code, out, err = run(capfd, "explain", "/nowhere", "--backend", "tpu")
    assert (code, out) == (cli.EXIT_USAGE, "")
    assert "device is 'tpu', and its graphs are never stored" in err


def test_explain_as_json(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    key, _ = lookup(EngineConfig(), find_model(str(model)))
    fill(default_store_root(), key)
    code, out, _ = run(capfd, "explain", model, "--json")
    assert (code, json.loads(out)) == (
        0,
        {
            "key": key.digest,
            "store": str(default_store_root()),
            "hit": True,
            "components": dict(key.components),
            "nearest": None,
            "differences": {},
        },
    )
    code, out, _ = run(capfd, "explain", model, "--json", "--dtype", "float16")
    data = json.loads(out)
    assert (code, data["hit"], data["nearest"]) == (1, False, key.digest)
    assert data["differences"] == {"engine.dtype": ["float32", "float16"]}


def test_explain_a_key(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    key = make_key()
    fill(tmp_path / "bundle", key)
    code, out, _ = run(capfd, "explain", key.digest[:8], "--graphs", tmp_path / "bundle")
    assert code == 0
    assert key.digest in out
    for name, text in COMPONENTS.items():
        assert name in out
        assert text in out
    code, out, _ = run(capfd, "explain", key.digest, "--graphs", tmp_path / "bundle", "--json")
    assert (code, json.loads(out)["components"]) == (0, COMPONENTS)
    code, out, err = run(capfd, "explain", key.digest)
    assert (code, out) == (1, "")
    assert f"no key that begins with {key.digest}" in err


def test_explain_of_a_model_that_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capfd, "explain", "/nowhere")
    assert (code, out) == (cli.EXIT_NO_START, "")
    assert "does not exist" in err
    assert run(capfd, "explain", "a", "--model", "b")[0] == cli.EXIT_USAGE


def test_explain_imports_neither_compiler_nor_transformers(model: Path) -> None:
    program = (
        "import sys; from compiled_engine.cli import main; code = main(sys.argv[1:]); "
        "print([m for m in ('torch._dynamo', 'torch._inductor', 'transformers') if m in sys.modules], file=sys.stderr)"
    )
    command = [sys.executable, "-c", program, "graphs", "explain", str(model)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stderr.splitlines()[-1] == "[]"


def test_verify_names_what_is_damaged(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capfd, "verify")
    assert (code, out) == (0, "")
    store = fill(tmp_path / "bundle", make_key(), make_key(engine__dtype="bfloat16"))
    code, out, err = run(capfd, "verify", "--graphs", store.root)
    assert (code, out) == (0, "")
    assert "2 entries and 6 packages" in err
    for path in all_files(store.root):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        code, out, err = run(capfd, "verify", "--graphs", store.root)
        assert code == 1, f"damage to {path} was not noticed"
        assert path.name in out
        path.write_bytes(content)
    assert run(capfd, "verify", "--graphs", store.root)[0] == 0


def test_a_store_that_others_may_write_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    store = fill(default_store_root(), make_key())
    store.root.chmod(0o777)
    for command in (["list"], ["verify"], ["clear"], ["explain", "abcdef"]):
        code, out, err = run(capfd, *command)
        assert (code, out) == (cli.EXIT_NO_START, "")
        assert "chmod" in err
    assert len(all_files(store.root)) == 6


def test_clear(capfd: pytest.CaptureFixture[str]) -> None:
    keys = [make_key(engine__dtype=name) for name in ("a", "b", "c")]
    store = fill(default_store_root(), *keys)
    code, out, err = run(capfd, "clear", keys[0].digest[:10], keys[0].digest)
    assert (code, out) == (0, "")
    assert "removed 1 entries" in err
    assert {entry.digest for entry in store.entries()} == {key.digest for key in keys[1:]}
    assert run(capfd, "verify")[0] == 0
    assert run(capfd, "clear", "xyz")[0] == cli.EXIT_USAGE
    code, _, err = run(capfd, "clear", "0" * 64)
    assert code == cli.EXIT_NO_START
    assert "0" * 64 in err
    assert len(store.entries()) == 2
    code, _, err = run(capfd, "clear")
    assert code == 0
    assert "removed 2 entries" in err
    assert all_files(store.root) == []
    assert run(capfd, "clear")[0] == 0


def test_an_action_is_needed(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["graphs"])
    assert stopped.value.code == cli.EXIT_USAGE


@given(st.text("ab", max_size=300), st.text("ab", max_size=300))
def test_two_texts_that_differ_are_shown_differently(one: str, other: str) -> None:
    shown = _around_difference(one, other)
    assert all(len(text) <= 96 + 3 for text in shown)
    assert (shown[0] == shown[1]) == (one == other)
