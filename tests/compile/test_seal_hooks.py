"""How the seal gets its hooks into torch and out again: late imports, several engines, forgotten ones."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch._dynamo.callback
import torch.export._trace
import torch.utils.cpp_extension
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from seal_tools import tapped_functions, torch_left_as_found
from torch._inductor import compile_fx

from compiled_engine.compile.seal import CompileSeal
from compiled_engine.errors import CompiledAfterWarmup


@pytest.fixture(autouse=True)
def no_traces_left() -> Any:
    """Each test begins with nothing traced, and leaves torch as it found it."""
    with torch_left_as_found():
        yield


def test_forgotten_seal_leaves_nothing_behind() -> None:
    before = tapped_functions()
    seal = CompileSeal()
    seal.seal()
    assert tapped_functions() != before
    gone = weakref.ref(seal)
    del seal
    gc.collect()
    assert gone() is None
    assert tapped_functions() == before


def test_close_leaves_a_wrapper_of_someone_else_alone() -> None:
    seal = CompileSeal()
    seal.seal()
    wrapped = compile_fx.compile_fx
    theirs = mock.Mock(side_effect=wrapped)
    with mock.patch.object(compile_fx, "compile_fx", theirs):
        seal.close()
        assert compile_fx.compile_fx is theirs
        second = CompileSeal()
        second.seal()
        with pytest.raises(CompiledAfterWarmup), second.guard():
            compile_fx.compile_fx(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(3)])
        second.close()
        assert compile_fx.compile_fx is theirs
    assert compile_fx.compile_fx is wrapped
    compile_fx.compile_fx = wrapped.__wrapped__


IMPORTED_LATER = """
import sys, torch
from compiled_engine.compile.seal import CompileSeal
from compiled_engine.errors import CompiledAfterWarmup
heavy = ("torch._dynamo", "torch._inductor", "torch.export._trace", "torch.utils.cpp_extension")
seals = [CompileSeal(), CompileSeal()]
for seal in seals:
    seal.seal()
    with seal.guard():
        torch.ones(3) * 2
assert not [name for name in heavy if name in sys.modules]
def step(x): return x * 2
for seal in (*seals, *seals):
    try:
        with seal.guard():
            torch.compile(step, backend="eager")(torch.ones(3))
    except CompiledAfterWarmup as error:
        assert "Dynamo traced step (" in str(error), error
    else:
        raise SystemExit("not noticed")
seals[0].close()
assert torch.compile(step, backend="eager")(torch.ones(3)).tolist() == [2.0] * 3
import torch._inductor.cpp_builder as cpp_builder
try:
    with seals[1].guard():
        cpp_builder.CppBuilder("x", "x.cpp", cpp_builder.CppOptions()).build()
except CompiledAfterWarmup as error:
    assert "C++ compiler" in str(error), error
else:
    raise SystemExit("not noticed")
seals[1].close()
assert not any("compiled_engine" in type(finder).__module__ for finder in sys.meta_path)
import torch._inductor.compile_fx as compile_fx
for function in (compile_fx.compile_fx, compile_fx._compile_fx_inner, cpp_builder.CppBuilder.build):
    assert "compiled_engine" not in function.__code__.co_filename
print("all noticed")
"""


@pytest.mark.slow
def test_sealing_imports_nothing_and_notices_what_is_imported_in_a_step() -> None:
    result = subprocess.run([sys.executable, "-c", IMPORTED_LATER], capture_output=True, text=True)
    assert (result.stdout, result.returncode) == ("all noticed\n", 0), result.stderr


class Seals(RuleBasedStateMachine):
    """Several engines in one process: sealing, stepping and closing in any order disturbs no other."""

    def __init__(self) -> None:
        super().__init__()
        self.before = tapped_functions()
        self.seals: list[tuple[CompileSeal, str]] = []

    def draw_index(self, data: st.DataObject) -> int:
        """Of a seal. Hypothesis keeps what it has drawn, and a seal that it keeps could not be forgotten."""
        return data.draw(st.integers(0, len(self.seals) - 1))

    @rule(on_compile=st.sampled_from(["raise", "warn"]), sealed=st.booleans())
    @precondition(lambda self: len(self.seals) < 4)
    def make(self, on_compile: str, sealed: bool) -> None:
        self.seals.append((CompileSeal(on_compile), on_compile))
        if sealed:
            self.seals[-1][0].seal()

    @rule(data=st.data())
    @precondition(lambda self: self.seals)
    def seal(self, data: st.DataObject) -> None:
        self.seals[self.draw_index(data)][0].seal()

    @rule(data=st.data(), forget=st.booleans())
    @precondition(lambda self: self.seals)
    def close(self, data: st.DataObject, forget: bool) -> None:
        seal, _ = self.seals.pop(self.draw_index(data))
        if not forget:
            seal.close()

    @rule(data=st.data())
    def compile_inside_some_guards(self, data: st.DataObject) -> None:
        """Refused exactly if a seal that raises is among those whose guards are open."""
        chosen = data.draw(st.sets(st.integers(0, len(self.seals) - 1))) if self.seals else set()
        inside = [self.seals[index] for index in sorted(chosen)]
        refused = any(seal.sealed and on_compile == "raise" for seal, on_compile in inside)
        reached, raised = False, False
        try:
            with ExitStack() as guards:
                for seal, _ in inside:
                    guards.enter_context(seal.guard())
                with torch._dynamo.callback.callback_handler.install_callbacks(mock.Mock(), "0/0"):
                    reached = True
        except CompiledAfterWarmup:  # pytest.raises would keep the traceback, and so the seals
            raised = True
        assert (raised, reached) == (refused, not refused)

    @invariant()
    def torch_is_tapped_only_while_someone_is_sealed(self) -> None:
        assert (tapped_functions() == self.before) == (not any(seal.sealed for seal, _ in self.seals))

    def teardown(self) -> None:
        for seal, _ in self.seals:
            seal.close()
        self.seals.clear()
        assert tapped_functions() == self.before


Seals.TestCase.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
TestSeals = Seals.TestCase
