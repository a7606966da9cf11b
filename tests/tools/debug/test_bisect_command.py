"""``compiled-engine-debug bisect``: exit codes, the table, the JSON file and mistakes in usage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compiled_engine_debug.cli import main
from tiny_models import write_tiny_model

QUICK = [
    "--rungs",
    "eager,graphs",
    "--max-tokens",
    "2",
    "--block-size",
    "4",
    "--dtype",
    "float32",
    "--num-threads",
    "1",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2)


def test_clean_ladder(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ladder.json"
    assert main(["bisect", str(folder), *QUICK, "--prompt", "Hello", "--prompt", "a b c", "--json", str(file)]) == 0
    output = capsys.readouterr()
    lines = [line.split() for line in output.out.splitlines()]
    assert ["eager", "agrees", "transformers"] in [line[:3] for line in lines]
    assert ["graphs", "agrees", "eager"] in [line[:3] for line in lines]
    assert "[bisect] rung graphs: 2 of 2" in output.err
    report = json.loads(file.read_text())
    assert [item["rung"] for item in report["rungs"]] == ["eager", "graphs"]
    assert [item["result"] for item in report["rungs"]] == ["clean", "clean"]
    assert report["rungs"][0]["from_transformers"]["relative"] < report["tolerance"] == 5e-4
    assert report["rungs"][1]["findings"] == []


def test_divergence_is_told_and_exits_with_one(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With no tolerance at all, two ways to compute the same are not the same."""
    file = tmp_path / "ladder.json"
    assert main(["bisect", str(folder), *QUICK, "--tolerance", "0", "--json", str(file)]) == 1
    report = json.loads(file.read_text())
    assert [item["result"] for item in report["rungs"]] == ["diverges", "inherits"]
    (finding,) = report["rungs"][0]["findings"]
    assert finding["detector"] == "bisect"
    assert finding["layer"].startswith("model.layers.")
    assert f"bisect: {finding['message']}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rungs", "eager,nothing"], "no rung 'nothing'"),
        (["--rungs", "padding"], "compiles pieces"),
        (["--json", "no/such/folder/file"], "--json no/such/folder/file"),
        (["--max-model-len", "12"], "max_model_len is 12"),
        (["--backend", "tpu"], "'tpu'"),
        (["--prompt", ""], "--prompt is empty"),
    ],
)
def test_usage_that_cannot_work(
    folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bisect", str(folder), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--tolerance", "nan"], ["--tolerance", "-1"], ["--max-tokens", "0"]])
def test_numbers_that_cannot_be(folder: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bisect", str(folder), *arguments])
    assert stopped.value.code == 2
    assert "is no" in capsys.readouterr().err


def test_model_that_is_not_there_cannot_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bisect", str(tmp_path / "nothing")]) == 3
    assert "could not be run" in capsys.readouterr().err


def test_prompt_without_a_tokenizer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_model(tmp_path, "llama", num_hidden_layers=1)
    (folder / "tokenizer.json").unlink()
    assert main(["bisect", str(folder), "--prompt", "x"]) == 2
    assert "tokenizer.json" in capsys.readouterr().err


def test_ladder_that_judges_nothing_is_no_success(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["bisect", str(folder), "--rungs", "inductor,graphs", *QUICK[2:]]) == 3
    output = capsys.readouterr()
    assert "no rung could be judged" in output.err
    assert "no-such-compiler" in output.out


def test_quantised_rung_alone_is_no_success(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There is nothing that its numbers could be compared with."""
    assert main(["bisect", str(folder), "--rungs", "eager", *QUICK[2:], "--quantization", "int8"]) == 3
    assert "no rung could be judged" in capsys.readouterr().err


def test_skipped_rung_beside_others_that_agree_is_success(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine's own kernels are there: they are built once."""
    assert main(["bisect", str(folder), "--rungs", "eager", *QUICK[2:]]) == 0
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["bisect", str(folder), "--rungs", "eager,inductor", *QUICK[2:]]) == 0
    assert "skipped" in capsys.readouterr().out
