"""The real model, SmolLM2-135M-Instruct, on torch_xla's CPU device: texts of transformers, in chunks and batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from compiled_engine import LLM, SamplingParams
from compiled_engine.runners.tpu import TpuRunner
from oracle import SMOLLM2_TOLERANCE, TransformersOracle, check_greedy

pytestmark = pytest.mark.slow

NEW_TOKENS = 12
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "def fibonacci(n):",
    "The three primary colours are",
)
EXCERPTS = (1, 2, 15, 16, 17, 33, 64, 65, 100, 150)
SETTINGS = {
    "device": "tpu",
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "token_buckets": (16, 32),
    "request_buckets": (4,),
}


@pytest.fixture(scope="module")
def llm(smollm2_folder: Path) -> Iterator[LLM]:
    with LLM(model=str(smollm2_folder), **SETTINGS) as llm:
        # Shown with -s, or where a test fails.
        print(llm.ledger)
        yield llm


def test_known_answer(llm: LLM) -> None:
    question = [{"role": "user", "content": QUESTIONS[0]}]
    (output,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"


def test_greedy_equals_transformers_in_one_batch(llm: LLM, smollm2_expanded: Path) -> None:
    """Prompts longer than a step, more requests than rows, and steps of all sizes; nothing is compiled meanwhile."""
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode(TEXT)
    prompts = [tokenizer.encode(question) for question in QUESTIONS]
    prompts += [ids[length : 2 * length] for length in EXCERPTS]
    runner = llm._engine.runner
    assert isinstance(runner, TpuRunner)
    before = runner.platform.counts()
    outputs = llm.generate(
        prompts, SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True), use_tqdm=False
    )
    assert [output.error for output in outputs] == [None] * len(prompts)
    assert runner.platform.counts() == before
    assert runner.sentinel.stray_executions == 0
    oracle = TransformersOracle(smollm2_expanded, attention="sdpa")
    expected = [oracle.greedy(prompt, NEW_TOKENS) for prompt in prompts]
    check_greedy(oracle, prompts, [output.outputs[0].token_ids for output in outputs], expected, SMOLLM2_TOLERANCE)


def test_every_bucket_has_a_line_in_the_ledger(llm: LLM) -> None:
    names = [phase["name"] for phase in llm.ledger.to_json()["phases"]]
    bodies = [f"body, {size} tokens" for size in (16, 32, 64)]
    heads = [f"head and sampling, {size} rows" for size in (4, 8)]
    assert [name for name in names if name.startswith(("body", "head"))] == bodies + heads
