"""``compiled-engine-debug bundle``: what it puts in, and what it says where it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_recordings import step, write_recording

from compiled_engine_debug.bundle import read_bundle
from compiled_engine_debug.cli import main
from compiled_engine_debug.findings import Finding
from tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 128 tokens."""
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def llama_run(tmp_path: Path) -> Path:
    """A recording of a model like ``tiny_model``."""
    recording = write_recording(tmp_path / "run.jsonl", step(0))
    text = recording.read_text().replace("TinyForCausalLM", "LlamaForCausalLM")
    recording.write_text(text)
    return recording


def test_the_command_makes_a_bundle(llama_run: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = llama_run.parent
    finding = Finding("address-changed", "it moved", layer="model.layers.0.self_attn")
    (folder / "audit.json").write_text(json.dumps({"findings": [finding.to_json()]}))
    (folder / "prompts").write_text("Once", encoding="utf-8")
    arguments = ["bundle", str(llama_run), "-o", str(folder / "b.zip"), "--findings", str(folder / "audit.json")]
    more = ["--model", str(tiny_model), "--with-weights", "--with-prompts", str(folder / "prompts")]

    assert main([*arguments, *more]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{folder / 'b.zip'}: 1 steps, ")
    bundle = read_bundle(folder / "b.zip")
    assert bundle.findings == (finding,)
    assert bundle.prompts == "Once"
    assert bundle.num_weight_files == 1
    assert bundle.model_config is not None
    assert bundle.model_config["hidden_size"] == 64

    assert main(arguments) == 0
    assert "without --model, `replay` cannot run it" in capsys.readouterr().err
    assert read_bundle(folder / "b.zip").model_config is None


def test_the_command_says_what_is_wrong(llama_run: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["-o", str(llama_run.with_name("b.zip"))]
    other = llama_run.with_name("other.jsonl")
    other.write_text(llama_run.read_text().replace('"vocab_size": 128', '"vocab_size": 129'))

    assert main(["bundle", str(llama_run), *out, "--with-weights"]) == 2
    assert "give --model too" in capsys.readouterr().err
    assert main(["bundle", str(other), *out, "--model", str(tiny_model)]) == 2
    assert "give the model that was recorded" in capsys.readouterr().err
    assert main(["bundle", str(llama_run), *out, "--with-prompts", str(tiny_model)]) == 2
    assert "--with-prompts" in capsys.readouterr().err
    assert main(["bundle", str(tiny_model / "config.json"), *out]) == 2
    capsys.readouterr()
    wrong = llama_run.with_name("wrong.json")
    wrong.write_text('[{"detector": "x", "message": 5}]')
    assert main(["bundle", str(llama_run), *out, "--findings", str(wrong)]) == 2
    assert "the field 'message' of a finding is 5" in capsys.readouterr().err
    assert not llama_run.with_name("b.zip").exists()
