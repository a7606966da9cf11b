"""The real model with captured graphs, emulated on the CPU: every mode writes what eager steps write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from compiled_engine import LLM, SamplingParams
from compiled_engine.runners.gpu import GpuRunner
from graph_runners import MODES

pytestmark = pytest.mark.slow

TEXT = (Path(__file__).parent.parent / "LICENSE").read_text()
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SETTINGS = {
    "dtype": "float32",
    "max_num_seqs": 5,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "kv_cache_memory": "64MiB",
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A store that all tests here share, so that the pieces are compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPILED_ENGINE_CACHE", str(tmp_path_factory.mktemp("graphs_store")))
        yield


def prompts(llm: LLM, count: int) -> list[list[int]]:
    ids = llm.get_tokenizer().encode(TEXT)
    return [ids[100 * count + 50 * row :][: 3 + 29 * row] for row in range(count)]


def texts(llm: LLM) -> dict[int, list[list[int]]]:
    """What is written after 1 to 5 prompts at once, of up to 119 tokens; batches of 3 lie between the sizes."""
    written = {}
    for count in (5, 1, 4, 2, 3):
        outputs = llm.generate(prompts(llm, count), PARAMS, use_tqdm=False)
        assert [output.error for output in outputs] == [None] * count
        written[count] = [output.outputs[0].token_ids for output in outputs]
    return written


@pytest.fixture(scope="module")
def eager(store: None, smollm2_folder: Path) -> dict[int, list[list[int]]]:
    with LLM(model=str(smollm2_folder), **SETTINGS) as llm:
        return texts(llm)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "none"])
def test_every_mode_writes_what_eager_steps_write(
    mode: str, smollm2_folder: Path, eager: dict[int, list[list[int]]]
) -> None:
    settings = {**SETTINGS, "graph_mode": mode, "graph_sizes": (1, 2, 4, 16, 40)}
    with LLM(model=str(smollm2_folder), **settings) as llm:
        runner = llm._engine.runner
        assert isinstance(runner, GpuRunner)
        assert runner.graph_records
        # Padding reads nothing that a real row may read.
        for layer in runner.static_context.values():
            layer.kv_cache.fill_(float("nan"))
        weights = runner.graphed.model.weights
        embedding = next(weight for name, weight in weights.items() if name.endswith("embed_tokens.weight"))
        embedding[0] = float("nan")
        assert texts(llm) == eager
