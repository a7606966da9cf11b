"""Greedy tokens of every proven architecture equal transformers', on tiny random models."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from compiled_engine import LLM, SamplingParams
from oracle import TINY_TOLERANCE, TransformersOracle, check_greedy
from tiny_models import ARCHITECTURES, VOCAB_SIZE, write_tiny_model

NEW_TOKENS = 16
QUICK = ("gemma3",)
"""It has all that the others have, but for details; these take part in the full run."""
PROMPT_LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 18, 31, 33, 40, 47, 64, 65, 70, 90, 100, 7, 20)


def make_prompts(lengths: tuple[int, ...] = PROMPT_LENGTHS) -> list[list[int]]:
    generator = random.Random(7)
    return [[generator.randrange(4, VOCAB_SIZE) for _ in range(length)] for length in lengths]


Oracle = Callable[[str], tuple[TransformersOracle, list[list[int]]]]


@pytest.fixture(scope="session")
def tiny_oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """An architecture's model and what transformers writes after each prompt, computed once per session."""
    made: dict[str, tuple[TransformersOracle, list[list[int]]]] = {}

    def make(architecture: str) -> tuple[TransformersOracle, list[list[int]]]:
        if architecture not in made:
            folder: Path = write_tiny_model(tmp_path_factory.mktemp(architecture), architecture)
            oracle = TransformersOracle(folder)
            made[architecture] = oracle, [oracle.greedy(prompt, NEW_TOKENS) for prompt in make_prompts()]
        return made[architecture]

    return make


def generate(folder: Path, **config: object) -> tuple[list[list[int]], int]:
    """Our texts for all prompts as one batch, and how many requests were preempted."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    # Pieces that stay in memory are never stored; with the store, the kernels are built once for all.
    store = config.get("piece_compiler") == "eager"
    with LLM(model=str(folder), dtype="float32", store=store, **config) as llm:
        outputs = llm.generate(make_prompts(), params, use_tqdm=False)
        preemptions = sum(output.num_preemptions for output in outputs)
    if "kv_cache_memory" not in config:
        assert preemptions == 0
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.outputs[0].token_ids for output in outputs], preemptions


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in ARCHITECTURES],
)
def test_greedy_equals_transformers_in_chunks_and_preempted(architecture: str, tiny_oracle: Oracle) -> None:
    """One batch; chunks shorter than most prompts; a cache too small for all requests, so that some are preempted."""
    oracle, expected = tiny_oracle(architecture)
    texts, preemptions = generate(
        oracle.folder,
        piece_compiler="eager",
        block_size=4,
        max_num_batched_tokens=24,
        kv_cache_memory=_block_bytes(oracle, block_size=4) * 48,
    )
    assert preemptions > 0, "the cache was meant to be too small"
    check_greedy(oracle, make_prompts(), texts, expected, TINY_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("piece_compiler", ["inductor", "aoti"])
@pytest.mark.parametrize("architecture", ["gemma3", "gpt2", "qwen2"])
def test_compiled_pieces_write_the_same(architecture: str, piece_compiler: str, tiny_oracle: Oracle) -> None:
    oracle, expected = tiny_oracle(architecture)
    texts, _ = generate(oracle.folder, piece_compiler=piece_compiler, max_num_batched_tokens=48)
    check_greedy(oracle, make_prompts(), texts, expected, TINY_TOLERANCE)


def _block_bytes(oracle: TransformersOracle, block_size: int) -> int:
    """Bytes of one block over all layers, worked out from transformers' config alone."""
    config = oracle.float32.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    owners = config.num_hidden_layers - getattr(config, "num_kv_shared_layers", 0)
    return owners * 2 * heads * head_dim * 4 * block_size
