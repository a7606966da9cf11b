"""A tiny Llama through plan, pieces and paged caches gives transformers' own logits, whatever the batches are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import Running, TinyLlama, chunk

VOCAB_SIZE, MAX_LENGTH = 128, 30


@cache
def transformers_model(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)


def transformers_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Logits [num_tokens, vocab_size] of one sequence in one forward pass, without a cache."""
    with torch.inference_mode():
        return transformers_model(folder)(torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.fixture(scope="session", params=["eager", "inductor", pytest.param("aoti", marks=pytest.mark.slow)])
def llama(request: pytest.FixtureRequest, tiny_llama: TinyLlama) -> Iterator[Running]:
    running = tiny_llama.running(request.param)
    with running.model.verified():
        yield running


def tokens_of(row: int, length: int) -> list[int]:
    return [(31 * row + 7 * index + index * index) % VOCAB_SIZE for index in range(length)]


def check(running: Running, folder: Path, steps: list[list[tuple[int, int, int]]]) -> None:
    """Run ``steps``, each a batch of (row, first token, last token), and compare every row that samples."""
    rows = {row for step in steps for row, _, _ in step}
    expected = {row: transformers_logits(folder, tokens_of(row, MAX_LENGTH)) for row in rows}
    for step in steps:
        logits = running.run([chunk(row, tokens_of(row, MAX_LENGTH), first, last) for row, first, last in step])
        wanted = torch.stack([expected[row][last - 1] for row, _, last in step])
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


def test_prompts_then_chunks_then_decodes(llama: Running, tiny_llama: TinyLlama) -> None:
    check(
        llama,
        tiny_llama.folder,
        [
            [(0, 0, 1)],
            [(0, 1, 2), (1, 0, 16), (2, 0, 7)],
            [(2, 7, 8), (1, 16, 29), (0, 2, 3), (3, 0, 4)],
            [(0, 3, 4), (1, 29, 30), (2, 8, 9), (3, 4, 5)],
        ],
    )


@st.composite
def schedules(draw: st.DrawFn) -> list[list[tuple[int, int, int]]]:
    """Any order of prompts, chunks and decodes of up to four sequences."""
    done = [0, 0, 0, 0]
    steps = []
    for _ in range(draw(st.integers(1, 5))):
        step = []
        for row in draw(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True)):
            length = draw(st.one_of(st.just(1), st.integers(1, 12)))
            if done[row] + length <= MAX_LENGTH:
                step.append((row, done[row], done[row] + length))
                done[row] += length
        if step:
            steps.append(step)
    return steps


@settings(max_examples=20)
@given(steps=schedules())
def test_any_schedule(llama: Running, tiny_llama: TinyLlama, steps: list[list[tuple[int, int, int]]]) -> None:
    for cache_of_a_layer in llama.caches.values():
        cache_of_a_layer.fill_(float("nan"))
    check(llama, tiny_llama.folder, steps)
