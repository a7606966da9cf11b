"""The real model, SmolLM2-135M-Instruct, through AOTInductor pieces."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_watch import watch_compiles
from compiled_engine import LLM, SamplingParams
from compiled_engine.runners.cpu import CpuRunner
from oracle import SMOLLM2_TOLERANCE, TransformersOracle, check_greedy

pytestmark = pytest.mark.slow

NEW_TOKENS = 48
TEXT = (Path(__file__).parent.parent / "LICENSE").read_text()
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List three uses of a paper clip.",
    "How do plants make sugar from light?",
    "Explain recursion to a child.",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "Tell me a story about a lighthouse keeper and her dog.",
    "def fibonacci(n):",
    "The three primary colours are",
)
EXCERPTS = (1, 2, 3, 5, 17, 40, 64, 100, 129, 200, 256, 300, 350, 400)
CHUNK = 192


@pytest.fixture(scope="module")
def llm(smollm2_folder: Path) -> Iterator[LLM]:
    # Without the store, so that what is counted is compiled here.
    settings = {"dtype": "float32", "max_num_batched_tokens": CHUNK, "max_model_len": 1024, "store": False}
    with LLM(model=str(smollm2_folder), **settings) as llm:
        yield llm


@pytest.fixture(scope="module")
def runner(llm: LLM) -> CpuRunner:
    runner = llm._engine.runner
    assert isinstance(runner, CpuRunner)
    return runner


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    """24 prompts of 1 to 400 tokens: questions, and excerpts of exact lengths."""
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode(TEXT)
    starts = random.Random(3)
    excerpts = []
    for length in EXCERPTS:
        start = starts.randrange(len(ids) - length)
        excerpts.append(ids[start : start + length])
    return [tokenizer.encode(question) for question in QUESTIONS] + excerpts


@pytest.fixture(scope="module")
def oracle(smollm2_expanded: Path) -> TransformersOracle:
    return TransformersOracle(smollm2_expanded, attention="sdpa")


@pytest.fixture(scope="module")
def expected(oracle: TransformersOracle, prompts: list[list[int]]) -> list[list[int]]:
    return [oracle.greedy(prompt, NEW_TOKENS) for prompt in prompts]


def greedy(llm: LLM, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(prompts)
    return [output.outputs[0].token_ids for output in outputs], sum(output.num_preemptions for output in outputs)


def test_known_answer(llm: LLM) -> None:
    question = [{"role": "user", "content": QUESTIONS[0]}]
    (output,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"


def test_pieces_are_compiled_once(runner: CpuRunner) -> None:
    """30 layers make 31 pieces; the first, the last and one for all between are compiled."""
    counters = runner.counters
    assert (counters.captures, counters.pieces, counters.pieces_compiled) == (1, 31, 3)
    assert (counters.heads, counters.heads_compiled, counters.attention_layers) == (1, 1, 30)
    assert counters.passes == {
        "merge_linears": 90,
        "use_packed_linear": 121,
        "fuse_gated_activations": 30,
        "fuse_activations": 0,
        "fuse_residuals": 60,
    }


def test_greedy_equals_transformers_in_one_batch(
    llm: LLM, oracle: TransformersOracle, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """One batch whose longest prompts are computed in several chunks."""
    assert max(map(len, prompts)) > CHUNK
    texts, preemptions = greedy(llm, prompts)
    assert preemptions == 0
    check_greedy(oracle, prompts, texts, expected, SMOLLM2_TOLERANCE)


def test_greedy_equals_transformers_under_preemption(
    smollm2_folder: Path, oracle: TransformersOracle, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """A cache that holds less than a third of the tokens of all requests."""
    block_bytes = 30 * 2 * 3 * 64 * 4 * 16
    with LLM(
        model=str(smollm2_folder),
        dtype="float32",
        max_num_batched_tokens=CHUNK,
        max_model_len=1024,
        kv_cache_memory=block_bytes * 64,
        piece_compiler="inductor",
    ) as tight:
        texts, preemptions = greedy(tight, prompts)
    assert preemptions > 0
    check_greedy(oracle, prompts, texts, expected, SMOLLM2_TOLERANCE)


WORKLOADS = st.lists(
    st.tuples(
        st.integers(1, 60),
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 0.7, 1.5]),
            top_k=st.sampled_from([0, 1, 50]),
            top_p=st.sampled_from([1.0, 0.9]),
            min_p=st.sampled_from([0.0, 0.1]),
            seed=st.one_of(st.none(), st.integers(0, 99)),
            max_tokens=st.integers(1, 6),
        ),
    ),
    min_size=1,
    max_size=9,
)


def test_log_probabilities_are_the_same_bits_alone_and_in_any_company(llm: LLM, prompts: list[list[int]]) -> None:
    """Kernels add up in an order of their own: neither batch mates nor chunks nor cached blocks change a bit."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=4)

    def logprobs(some: list[list[int]]) -> list[object]:
        return [output.outputs[0].logprobs for output in llm.generate(some, params, use_tqdm=False)]

    llm.reset_prefix_cache()
    alone = [logprobs([prompt])[0] for prompt in prompts]
    assert logprobs(prompts) == alone
    llm.reset_prefix_cache()
    assert logprobs(prompts[::-1]) == alone[::-1]


@settings(max_examples=50)
@given(workload=WORKLOADS)
def test_no_workload_compiles_after_warm_up(llm: LLM, workload: list[tuple[int, SamplingParams]]) -> None:
    """50 random workloads (lengths, batch sizes, sampling; requests end at different steps, so every batch size
    in between occurs): no Dynamo, Inductor or AOTInductor compilation."""
    prompts = [
        [(7 * index + position) % 49152 for position in range(length)] for index, (length, _) in enumerate(workload)
    ]
    with watch_compiles() as log:
        outputs = llm.generate(prompts, [params for _, params in workload], use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    assert log.events == []
