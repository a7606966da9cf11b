"""``compiled-engine precompile``: what it is asked for, what it prints, and one real bundle."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import compiled_engine.models
import compiled_engine.runners.precompile
from compiled_engine import cli
from compiled_engine.cli.common import told_on_stderr
from compiled_engine.cli.progress import progress_on_stderr
from compiled_engine.config import EngineConfig
from compiled_engine.errors import CaptureError, ModelError, StoreWriteError
from compiled_engine.runners.base import log_progress
from store_models import make_key
from tiny_models import write_tiny_model

FILES = SimpleNamespace(folder=Path("there"))


class Precompiled:
    """Stands in for the runners' precompile: notes what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[EngineConfig, Any, Path]] = []
        self.error: Exception | None = None

    def __call__(self, config: EngineConfig, files: Any, store: Any, ledger: Any, progress: Any) -> Any:
        self.calls.append((config, files, store.root))
        print("compiler says hello")
        progress("compiling pieces", 0, 2)
        ledger.add("compile", 1.5, note="2 of 2 pieces")
        if self.error is not None:
            raise self.error
        progress("compiling pieces", 2, 2)
        return make_key()


@pytest.fixture
def precompiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Precompiled:
    def find_model(model: str | None) -> Any:
        if model == "nowhere":
            raise ModelError("model 'nowhere' does not exist")
        return FILES

    stand_in = Precompiled()
    monkeypatch.setenv("COMPILED_ENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled_engine.models, "find_model", find_model)
    monkeypatch.setattr(compiled_engine.runners.precompile, "precompile", stand_in)
    return stand_in


def run(*arguments: str) -> int | str | None:
    try:
        return cli.main(arguments)
    except SystemExit as stopped:
        return stopped.code


def test_store_of_this_user(precompiled: Precompiled, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["precompile"]) == cli.EXIT_OK
    shown = capfd.readouterr()
    store = tmp_path / "cache" / "graphs"
    assert shown.out.splitlines() == [str(store), make_key().digest]
    assert precompiled.calls == [(EngineConfig(), FILES, store)]
    assert "compiler says hello" in shown.err
    assert "[compiled-engine] compiling pieces: 0 of 2\n[compiled-engine] compiling pieces: 2 of 2" in shown.err


def test_bundle_and_settings(
    precompiled: Precompiled, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = "some/model --out bundle --dtype bfloat16 --num-threads 3 --backend cpu --no-progress"
    assert cli.main(["precompile", *options.split()]) == cli.EXIT_OK
    shown = capfd.readouterr()
    assert shown.out.splitlines() == [str(tmp_path / "bundle"), make_key().digest]
    config = EngineConfig(model="some/model", dtype="bfloat16", num_threads=3)
    assert precompiled.calls == [(config, FILES, tmp_path / "bundle")]
    assert "compiling pieces" not in shown.err


def test_ledger(precompiled: Precompiled, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ledger.json"
    assert cli.main(["precompile", "--ledger", "--ledger-json", str(file)]) == cli.EXIT_OK
    shown = capfd.readouterr()
    assert len(shown.out.splitlines()) == 2
    names = [phase["name"] for phase in json.loads(file.read_text())["phases"]]
    assert names == ["imports", "config and files", "compile"]
    assert re.search(r"compile .*1\.500.*2 of 2 pieces", shown.err)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere"], cli.EXIT_NO_START, "the graphs could not be compiled: model 'nowhere' does not exist"),
        (["a", "--model", "b"], cli.EXIT_USAGE, "named twice"),
        (["--dtype", "int3"], cli.EXIT_USAGE, "dtype is 'int3'"),
        (["--out", __file__], cli.EXIT_USAGE, "this is a file"),
        (["--ledger-json", "/nowhere/x"], cli.EXIT_USAGE, "--ledger-json"),
        (["--require-precompiled"], cli.EXIT_USAGE, "unrecognized"),
        (["--backend", "abacus"], cli.EXIT_USAGE, "device is 'abacus'"),
        (["nowhere", "--backend", "tpu"], cli.EXIT_USAGE, "device is 'tpu', and its graphs are never stored"),
    ],
)
def test_mistakes(
    precompiled: Precompiled, arguments: list[str], code: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("precompile", *arguments) == code
    shown = capfd.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert precompiled.calls == []


@pytest.mark.parametrize("error", [CaptureError("line 7"), StoreWriteError("the disk is full"), OSError("broken")])
def test_failures(precompiled: Precompiled, error: Exception, capfd: pytest.CaptureFixture[str]) -> None:
    precompiled.error = error
    assert cli.main(["precompile"]) == cli.EXIT_NO_START
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "compiled-engine: the graphs could not be compiled: " in shown.err
    assert str(error) in shown.err


def test_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others write in the meantime stays above the bars; the bars say how much is done."""
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with progress_on_stderr() as progress:
        progress("capturing", 0, 1)
        progress("compiling pieces", 0, 3)
        print("a message", file=sys.stderr)
        progress("compiling pieces", 2, 3)
        progress("compiling pieces", 3, 3)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert "a message\n" in plain
    assert re.search(r"compiling pieces +\S+ +3/3", plain)
    assert re.search(r"capturing +\S+ +0/1", plain)
    assert sys.stderr is terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_in_the_log(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal a bar for what is told in a row, elsewhere lines; other messages are lines on both."""
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with told_on_stderr(True):
        logging.getLogger("compiled_engine.somewhere").info("reading weights")
        for done in range(3):
            log_progress("compiling buckets", done, 2)
        logging.getLogger("compiled_engine.somewhere").info("ready")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert plain.startswith("[compiled-engine] reading weights\n")
    assert plain.endswith("[compiled-engine] ready\n")
    assert bool(re.search(r"compiling buckets +\S+ +2/2", plain)) is is_terminal
    assert ("[compiled-engine] compiling buckets: 2 of 2\n" in plain) is not is_terminal


def test_no_progress_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    with progress_on_stderr(False) as progress:
        progress("compiling pieces", 1, 3)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_bundle_runs_after_it_was_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: no weights while compiling, no store, then a start that may not compile."""
    model = write_tiny_model(tmp_path / "model")
    monkeypatch.setenv("COMPILED_ENGINE_CACHE", str(tmp_path / "cache"))
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    weights.write_bytes(whole[:header] + b"\xff" * (len(whole) - header))  # NaN, should anything read them

    def command(*arguments: str) -> tuple[int, str, str]:
        program = [sys.executable, "-m", "compiled_engine", *arguments]
        result = subprocess.run(program, capture_output=True, text=True)
        return result.returncode, result.stdout, result.stderr

    bundle, moved = tmp_path / "bundle", tmp_path / "elsewhere" / "bundle"
    code, out, err = command("precompile", str(model), "--out", str(bundle))
    assert code == 0, err
    path, key = out.splitlines()
    assert path == str(bundle)
    assert "compiling pieces: 1 of " in err
    weights.write_bytes(whole)
    moved.parent.mkdir()
    bundle.rename(moved)
    code, out, err = command("graphs", "explain", str(model), "--graphs", str(moved))
    assert code == 0, out
    assert key in out
    assert command("graphs", "explain", str(model))[0] == 1
    assert command("graphs", "verify", "--graphs", str(moved))[0] == 0
    answer = [str(model), "--max-tokens", "8", "--kv-cache-memory", "4MiB", "--no-progress"]
    code, out, err = command("generate", "--model", *answer, "--graphs", str(moved), "--require-precompiled", "a b")
    assert code == 0, err
    code, uncompiled, err = command("generate", "--model", *answer, "--piece-compiler", "eager", "--no-store", "a b")
    assert code == 0, err
    assert out == uncompiled
    code, out, err = command("generate", "--model", *answer, "--require-precompiled", "a b")
    assert (code, out) == (cli.EXIT_NO_START, "")
    assert "compiled-engine precompile" in err
