"""The attention kernel itself: every instruction path, and results that depend on a token's own request alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attention_steps import Request, Step, make_step, steps
from compiled_engine.ops.attention import AttentionSpec
from compiled_engine.ops.cpu.build import load_kernels
from compiled_engine.ops.cpu.instructions import runnable_paths
from kernel_folder import KERNELS

# The best path is the one that everything else runs; the others are built for these tests.
PATHS = [
    pytest.param(path.name, marks=[pytest.mark.slow] if index else []) for index, path in enumerate(runnable_paths())
]


@contextmanager
def threads(count: int) -> Iterator[None]:
    library = load_kernels(KERNELS)
    library.set_num_threads(count)
    try:
        yield
    finally:
        library.set_num_threads(0)


def specs(head_dim: int, window: int | None, soft_cap: float | None, group: int = 3) -> AttentionSpec:
    return AttentionSpec("layer", 2 * group, 2, head_dim, head_dim**-0.5, window, soft_cap)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_path_equals_the_reference(path: str, dtype: torch.dtype, data: st.DataObject) -> None:
    data.draw(steps(dtype)).check(path)


@pytest.mark.parametrize("head_dim", [*range(1, 18), 31, 33, 63, 65, 112, 192, 257])
def test_every_head_size(head_dim: int) -> None:
    spec = AttentionSpec("layer", 6, 2, head_dim, head_dim**-0.5)
    make_step(spec, [Request(70, 1), Request(0, 10)], 0, 16, torch.float32, seed=head_dim).check()


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 100])
def test_every_number_of_queries_to_a_key(group: int) -> None:
    make_step(specs(16, None, None, group), [Request(70, 1), Request(3, 5)], 0, 16, torch.float32, seed=group).check()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (100, None), (700, 5.0)])
@pytest.mark.parametrize("head_dim", [64, 20])
def test_a_chunk_has_the_bits_of_its_tokens_one_by_one(
    path: str, dtype: torch.dtype, window: int | None, soft_cap: float | None, head_dim: int
) -> None:
    """Prefill in one go, in chunks of any size, and token by token: the same bits, over tiles and splits."""
    spec = specs(head_dim, window, soft_cap)
    whole = make_step(spec, [Request(470, 120)], 0, 16, dtype, seed=7, with_sinks=True)
    expected = replace(whole, cache=whole.cache.clone()).run(path)
    for size in (1, 2, 33, 64, 119):
        step = replace(whole, cache=whole.cache.clone())
        bounds = [*range(0, 120, size), 120]
        parts = [step.chunk(first, last).run(path) for first, last in pairwise(bounds)]
        assert torch.equal(torch.cat(parts), expected), size


@settings(deadline=None, max_examples=50)
@given(step=steps(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_request_has_the_same_bits_in_any_batch(step: Step, dtype: torch.dtype) -> None:
    tensors = {name: getattr(step, name).to(dtype) for name in ("query", "key", "value", "cache")}
    step = replace(step, **tensors)
    alone = [step.alone(row).run() for row in range(step.num_real)]
    assert torch.equal(step.run()[: step.num_real_rows], torch.cat(alone))


@settings(deadline=None)
@given(step=steps(max_requests=1), data=st.data())
def test_a_prompt_has_the_same_bits_in_any_two_chunks(step: Step, data: st.DataObject) -> None:
    whole = step.alone(0)
    new = whole.requests[0].new
    split = data.draw(st.integers(0, new))
    expected = replace(whole, cache=whole.cache.clone()).run()
    assert torch.equal(torch.cat([whole.chunk(0, split).run(), whole.chunk(split, new).run()]), expected)


@pytest.mark.parametrize(
    "requests",
    [
        [Request(2600, 1)],
        [Request(1500, 20)],
        [Request(0, 300)],
        [Request(2600, 1), Request(0, 90), Request(600, 1), *[Request(40, 1)] * 20],
    ],
    ids=["a long decode", "a chunk", "a prompt", "a mix"],
)
def test_any_number_of_threads_gives_the_same_bits(requests: list[Request]) -> None:
    """One thread keeps splits to itself, several share them out: the results are merged in the same order."""
    step = make_step(specs(64, None, None), requests, 0, 16, torch.float32, seed=11)
    with threads(1):
        expected = replace(step, cache=step.cache.clone()).run()
    for count in (2, 3, 8):
        with threads(count):
            for _ in range(3):
                assert torch.equal(replace(step, cache=step.cache.clone()).run(), expected), count
    torch.testing.assert_close(expected.double(), replace(step, cache=written(step)).reference(), rtol=2e-5, atol=2e-5)


def written(step: Step) -> torch.Tensor:
    cache = step.cache.clone()
    replace(step, cache=cache).run()
    return cache


def test_padding_rows_are_the_same_whichever_thread_writes_first() -> None:
    """Padding rows share slots. The rows of a head are one thread's, so the last row stays."""
    step = make_step(specs(64, None, None), [Request(900, 1)], 40, 1, torch.float32, seed=3)
    with threads(4):
        step.run()
    assert torch.equal(step.cache[0, 0, 0], step.key[-1])
    assert torch.equal(step.cache[0, 0, 1], step.value[-1])


@pytest.mark.parametrize("scale", [1e-30, 30.0, 1e4])
def test_scores_of_any_size(scale: float) -> None:
    """From scores that are all alike to one that outweighs all others."""
    spec = replace(specs(16, None, None), scale=scale)
    step = make_step(spec, [Request(200, 1), Request(0, 20)], 0, 16, torch.float32, seed=2, with_sinks=True)
    torch.testing.assert_close(step.run().double(), step.reference(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("sink", [-1e4, 0.0, 80.0])
def test_sinks_take_their_share(sink: float) -> None:
    step = make_step(specs(16, None, None), [Request(600, 1)], 0, 16, torch.float32, seed=2)
    step = replace(step, sinks=torch.full((6,), sink))
    step.check()


def test_a_query_of_nan_spoils_its_own_row_alone() -> None:
    step = make_step(specs(64, None, None), [Request(100, 4)], 0, 16, torch.float32, seed=2)
    clean = replace(step, cache=step.cache.clone()).run()
    step.query[2, 1] = float("nan")
    out = step.run()
    assert out[2, 1].isnan().all()
    out[2, 1] = clean[2, 1]
    assert torch.equal(out, clean)
