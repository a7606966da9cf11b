"""A real model with sliding windows: Gemma 3 270M, past several times its window's length."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from compiled_engine import LLM, SamplingParams
from oracle import SMOLLM2_TOLERANCE, TransformersOracle, check_greedy

pytestmark = pytest.mark.slow

WINDOW = 512
NEW_TOKENS = 16
LENGTHS = (20, 23, 30, 33, 41, 48, 50, 64, 77, 90, 120, 150, 200, 300, 400, 511, 512, 530, 1025, 1500)
TEXT = (Path(__file__).parent.parent / "LICENSE").read_text()


def test_greedy_equals_transformers_past_the_window(gemma3_folder: Path, gemma3_expanded: Path) -> None:
    """Chunked prefill; sliding groups whose pool is far smaller than the longest prompts, so that blocks behind the
    window must be freed and reused while the prompt is computed."""
    oracle = TransformersOracle(gemma3_expanded, attention="sdpa")
    with LLM(
        model=str(gemma3_folder),
        dtype="float32",
        piece_compiler="inductor",
        max_model_len=2048,
        max_num_batched_tokens=256,
        max_num_seqs=8,
        kv_cache_memory="160MiB",
    ) as llm:
        ids = llm.get_tokenizer().encode(TEXT)
        starts = random.Random(5)
        prompts = [ids[start : start + length] for length in LENGTHS for start in [starts.randrange(len(ids) - length)]]
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        runner = llm._engine.runner
    assert [output.error for output in outputs] == [None] * len(outputs)
    windows = {group.sliding_window: group.num_blocks for group in runner.limits.cache_groups}
    assert set(windows) == {None, WINDOW}
    assert windows[WINDOW] * 16 < sum(LENGTHS), "the sliding pool was meant to be too small to keep everything"
    expected = [oracle.greedy(prompt, NEW_TOKENS) for prompt in prompts]
    check_greedy(oracle, prompts, [output.outputs[0].token_ids for output in outputs], expected, SMOLLM2_TOLERANCE)
