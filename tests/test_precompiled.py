"""Starting from stored graphs: the same tokens as without, nothing compiled, no compiler imported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
    assert len(list((bundle / "kernels").glob("*.so"))) == 1, "a bundle brings its kernels along"
    moved.parent.mkdir()
    shutil.move(bundle, moved)
    monkeypatch.setenv("COMPILED_ENGINE_CACHE", str(tmp_path / "another"))
    assert warm_start(model, PROMPTS, graphs=str(moved)) == fresh
    assert warm == cold == tokens(model, piece_compiler="eager", store=False)
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


def test_a_7b_model_is_precompiled_without_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of 27 GB that is one hole in the disk: only its header exists. All processes stay under 4 GB."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder = tmp_path / "llama-7b"
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32000,
        max_position_embeddings=4096,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    header, end = {}, 0
    for name, tensor in state.items():
        start, end = end, end + 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    assert end > 26e9
    # VmHWM, because ru_maxrss begins with the memory of the process that started this one.
    code = (
        "import resource, sys\n"
        "from compiled_engine import cli\n"
        f"code = cli.main(['precompile', {str(folder)!r}, '--dtype', 'float32', '--no-progress'])\n"
        "own = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "print(own.split()[1], resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
        "sys.exit(code)\n"
    )
    monkeypatch.setenv("COMPILED_ENGINE_CACHE", str(tmp_path / "cache"))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    own, largest_child = (int(number) * 1024 for number in result.stdout.splitlines()[-1].split())
    print(f"peak memory: {own / 1e9:.2f} GB, largest child {largest_child / 1e9:.2f} GB")
    # Two compilers at most run beside the parent on two cores; more cores, more compilers.
    assert own + 2 * largest_child < 4e9
