"""Starting from stored graphs: the same tokens as without, nothing compiled, no compiler imported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from compile_watch import watch_compiles
from compiled_engine import LLM, SamplingParams, cli
from compiled_engine.errors import NotPrecompiledError
from tiny_models import VOCAB_SIZE, write_tiny_model

pytestmark = pytest.mark.slow

PROMPTS = [
    [(17 * row + 5 * index) % (VOCAB_SIZE - 4) + 4 for index in range(length)] for row, length in enumerate((1, 9, 40))
]

WARM_START = """
import json, sys
from compiled_engine import LLM, SamplingParams
with LLM(model={model!r}, require_precompiled=True, **{settings!r}) as llm:
    outputs = llm.generate({prompts!r}, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    heavy = [name for name in ("torch._dynamo", "torch._inductor", "transformers") if name in sys.modules]
    print(json.dumps({{"tokens": [output.outputs[0].token_ids for output in outputs], "heavy": heavy,
                      "notes": [phase.note for phase in llm.ledger.phases if phase.name == "graphs"]}}))
"""


def tokens(model: Path, **settings: object) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(model=str(model), dtype="float32", **settings) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def warm_start(model: Path, prompts: object, **settings: object) -> dict[str, object]:
    """A start in a fresh process that may not compile."""
    script = WARM_START.format(model=str(model), prompts=prompts, settings={"dtype": "float32", **settings})
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_cold_warm_bundle_and_eager_write_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One model through every way to a start: empty and filled store, a bundle that was moved, eager pieces, none."""
    monkeypatch.setenv("COMPILED_ENGINE_CACHE", str(tmp_path / "cache"))
    model = write_tiny_model(tmp_path / "model", "gemma3")
    with pytest.raises(NotPrecompiledError, match="it is empty"):
        tokens(model, require_precompiled=True)
    cold = tokens(model)
    with watch_compiles() as log:
        warm = tokens(model)
    assert log.events == []
    fresh = warm_start(model, PROMPTS)
    assert fresh == {"tokens": cold, "heavy": [], "notes": ["hit"]}

    bundle, moved = tmp_path / "bundle", tmp_path / "elsewhere" / "moved"
    assert cli.main(["precompile", str(model), "--out", str(bundle), "--dtype", "float32"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == str(bundle)
    moved.parent.mkdir()
    shutil.move(bundle, moved)
    monkeypatch.setenv("COMPILED_ENGINE_CACHE", str(tmp_path / "another"))
    assert warm_start(model, PROMPTS, graphs=str(moved)) == fresh
    assert warm == cold == tokens(model, piece_compiler="eager")
    before = sorted((tmp_path / "another").rglob("graphs*"))
    assert tokens(model, store=False) == cold
    assert sorted((tmp_path / "another").rglob("graphs*")) == before == []

    other = write_tiny_model(tmp_path / "other", "gemma3", intermediate_size=64)
    with pytest.raises(NotPrecompiledError, match=r"model\."):
        tokens(other, graphs=str(moved))


def test_smollm2_starts_without_compilers(
    smollm2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real model from a filled store, in a fresh process."""
    monkeypatch.setenv("COMPILED_ENGINE_CACHE", str(tmp_path / "cache"))
    assert cli.main(["precompile", str(smollm2_folder), "--dtype", "float32"]) == 0
    question = ["What is the capital of France?"]
    first, second = (warm_start(smollm2_folder, question, max_model_len=512) for _ in range(2))
    assert first == second
    assert (first["heavy"], first["notes"]) == ([], ["hit"])
    options = ["--dtype", "float32", "--require-precompiled", "--chat", "--max-tokens", "32"]
    code = cli.main(["generate", "--model", str(smollm2_folder), *options, *question])
    assert (code, capsys.readouterr().out.splitlines()[-1]) == (0, "The capital of France is Paris.")
