"""The forward context of a step: one at a time, restored whatever happens, one per thread."""

from __future__ import annotations

import contextvars
import dataclasses
import threading

import pytest

from compiled_engine.context import (
    ForwardContext,
    StaticForwardContext,
    StepKind,
    get_forward_context,
    set_forward_context,
)
from compiled_engine.errors import ForwardContextError


def make_step(num_tokens: int = 1, kind: StepKind = StepKind.REAL) -> ForwardContext:
    return ForwardContext(StaticForwardContext(), (), (), num_tokens, num_tokens, kind)


def test_there_is_none_outside() -> None:
    with pytest.raises(ForwardContextError, match="set_forward_context"):
        get_forward_context()


def test_it_is_set_and_taken_back() -> None:
    step = make_step()
    with set_forward_context(step) as entered:
        assert entered is step
        assert get_forward_context() is step
    with pytest.raises(ForwardContextError):
        get_forward_context()


def test_an_exception_restores_the_former_one() -> None:
    outer, inner = make_step(1), make_step(2)
    with set_forward_context(outer):
        with pytest.raises(ZeroDivisionError), set_forward_context(inner, nested=True):
            raise ZeroDivisionError
        assert get_forward_context() is outer
    with pytest.raises(ZeroDivisionError), set_forward_context(outer):
        raise ZeroDivisionError
    with pytest.raises(ForwardContextError):
        get_forward_context()


def test_nesting_must_be_asked_for() -> None:
    outer, inner = make_step(1), make_step(2)
    with set_forward_context(outer):
        with pytest.raises(ForwardContextError, match="nested=True"), set_forward_context(inner):
            pytest.fail("entered")
        assert get_forward_context() is outer


def test_deep_nesting_unwinds_in_order() -> None:
    steps = [make_step(number) for number in range(5)]

    def enter(depth: int) -> None:
        if depth < len(steps):
            with set_forward_context(steps[depth], nested=True):
                enter(depth + 1)
                assert get_forward_context() is steps[depth]

    enter(0)


def test_threads_have_their_own() -> None:
    seen: dict[int, list[bool]] = {}
    barrier = threading.Barrier(4)

    def run(number: int) -> None:
        step = make_step(number)
        results = seen[number] = []
        try:
            get_forward_context()
        except ForwardContextError:
            results.append(True)
        with set_forward_context(step):
            for _ in range(20):
                barrier.wait()
                results.append(get_forward_context() is step)

    with set_forward_context(make_step(99)):
        threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == {number: [True] * 21 for number in range(4)}


def test_a_copied_context_does_not_leak_back() -> None:
    step = make_step()

    def inside() -> None:
        with set_forward_context(step):
            assert get_forward_context() is step

    contextvars.copy_context().run(inside)
    with pytest.raises(ForwardContextError):
        get_forward_context()


def test_a_step_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_step().num_tokens = 2  # type: ignore[misc]
