"""The seal: what is compiled in a step after warm-up is an error, and nothing else is touched."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch._dynamo.callback
import torch.export._trace
import torch.utils.cpp_extension
from hypothesis import given, settings
from hypothesis import strategies as st
from seal_tools import fresh, scale, torch_left_as_found
from torch._inductor import compile_fx, cpp_builder

from compiled_engine.compile.seal import CompileSeal
from compiled_engine.errors import CompiledAfterWarmup, ConfigError


@pytest.fixture(autouse=True)
def no_traces_left() -> Any:
    """Each test begins with nothing traced, and leaves torch as it found it."""
    with torch_left_as_found():
        yield


@pytest.fixture
def seal() -> Any:
    seal = CompileSeal()
    seal.seal()
    yield seal
    seal.close()


def test_first_trace_is_named(seal: CompileSeal) -> None:
    run = torch.compile(scale, backend="eager")
    with pytest.raises(CompiledAfterWarmup) as caught, seal.guard():
        run(torch.ones(3, 2), 7)
    assert caught.value.what.startswith("Dynamo traced scale (")
    assert f"{scale.__code__.co_filename}:{scale.__code__.co_firstlineno}" in caught.value.what
    assert caught.value.inputs == "x float32[3, 2], factor=7"
    assert caught.value.reason == "it had not been traced before"
    for part in (caught.value.what, caught.value.inputs, caught.value.reason, "warm-up", "on_compile='warn'"):
        assert part in str(caught.value)
    assert str(caught.value) == str(CompiledAfterWarmup(caught.value.what, caught.value.reason, caught.value.inputs))


def test_recompile_tells_torchs_reason(seal: CompileSeal) -> None:
    run = fresh()
    run(torch.ones(3))
    with seal.guard():
        assert run(torch.ones(3)).tolist() == [2, 2, 2]
    with pytest.raises(CompiledAfterWarmup) as caught, seal.guard():
        run(torch.ones(4))
    assert caught.value.reason is not None
    assert "size mismatch at index 0. expected 3, actual 4" in caught.value.reason
    assert caught.value.inputs is not None
    assert "float32[4]" in caught.value.inputs


def test_torch_is_usable_after_a_refusal(seal: CompileSeal) -> None:
    """The refused function is not marked in any way: outside a guard it compiles, then it runs inside one."""
    run = fresh()
    for _ in range(2):
        with pytest.raises(CompiledAfterWarmup), seal.guard():
            run(torch.ones(3))
    log = mock.Mock()
    torch._dynamo.callback.on_compile_start(log)
    try:
        assert run(torch.ones(3)).tolist() == [2, 2, 2]
        assert log.call_count == 1
        with seal.guard():
            assert run(torch.ones(3)).tolist() == [2, 2, 2]
        assert log.call_count == 1
    finally:
        torch._dynamo.callback.callback_handler.remove_start_callback(log)


def test_error_gets_through_when_torch_is_told_to_suppress_errors(seal: CompileSeal) -> None:
    run = fresh()
    went_on = []
    with (
        torch._dynamo.config.patch(suppress_errors=True),
        pytest.raises(CompiledAfterWarmup, match="Dynamo traced"),
        seal.guard(),
    ):
        went_on.append(run(torch.ones(3)))
    assert len(went_on) == 1


def test_error_gets_through_code_that_catches_everything(seal: CompileSeal) -> None:
    def step() -> None:
        with seal.guard():
            try:
                fresh()(torch.ones(3))
            except Exception as error:
                raise ValueError("wrapped") from error

    with pytest.raises(CompiledAfterWarmup):
        step()
    with seal.guard():  # and does not come again
        pass


def test_interrupt_goes_before_the_error(seal: CompileSeal) -> None:
    def step() -> None:
        with seal.guard():
            try:
                fresh()(torch.ones(3))
            except Exception:
                raise KeyboardInterrupt from None

    with pytest.raises(KeyboardInterrupt):
        step()
    with seal.guard():
        pass


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the engine has logged; torch logs as well."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("compiled_engine")]


def build_cpp() -> None:
    builder = cpp_builder.CppBuilder(name="x", sources="x.cpp", BuildOption=cpp_builder.CppOptions())
    builder.build()


def compile_graph() -> None:
    graph = torch.fx.symbolic_trace(lambda x: torch.relu(x) * 3)
    compile_fx.compile_fx_inner(graph, [torch.ones(3)])


def compile_ahead() -> None:
    exported = torch.export.export(torch.nn.ReLU(), (torch.ones(3),))
    torch._inductor.aoti_compile_and_package(exported)


def compile_alone() -> None:
    graph = torch.fx.symbolic_trace(lambda x: torch.relu(x) * 3)
    torch._inductor.standalone_compile(graph, [torch.ones(3)], dynamic_shapes="from_example_inputs")


def run_in_inductor() -> None:
    fresh("inductor")(torch.ones(3))


def export() -> None:
    torch.export.export(torch.nn.ReLU(), (torch.ones(3),))


def build_extension() -> None:
    from torch.utils import cpp_extension

    cpp_extension.load_inline("x", "int x;")


KINDS = [
    (build_cpp, r"a C\+\+ compiler was called to build .*x\.so"),
    (compile_graph, r"Inductor compiled a graph of 2 operations \(relu, mul\)"),
    (compile_ahead, "torch.export traced ReLU"),
    (compile_alone, "Inductor compiled a graph"),
    (run_in_inductor, "Dynamo traced"),
    (export, "torch.export traced ReLU"),
    (build_extension, r"torch built the C\+\+ extension 'x'"),
]


@pytest.mark.parametrize(("work", "message"), KINDS, ids=lambda item: getattr(item, "__name__", ""))
def test_every_kind_of_compile_is_refused_before_any_work(
    seal: CompileSeal, work: Callable[[], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpp_builder, "run_compile_cmd", lambda *args, **kwargs: pytest.fail("a compiler was called"))
    with pytest.raises(CompiledAfterWarmup, match=message), seal.guard():
        work()


def test_ahead_of_time_compile_of_an_exported_program_is_refused(seal: CompileSeal) -> None:
    exported = torch.export.export(torch.nn.ReLU(), (torch.ones(3),))
    with pytest.raises(CompiledAfterWarmup, match="Inductor compiled a graph of 1 operations"), seal.guard():
        torch._inductor.aoti_compile_and_package(exported)


def test_second_kind_under_a_trace_in_progress_elsewhere(seal: CompileSeal) -> None:
    """Dynamo tells its listeners of the first of several simultaneous compiles only; the seal hears of all."""
    inside, finish = threading.Event(), threading.Event()

    def slow(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
        inside.set()
        assert finish.wait(30)
        return graph.forward

    other = threading.Thread(target=lambda: torch.compile(lambda x: x + 1, backend=slow)(torch.ones(3)))
    other.start()
    try:
        assert inside.wait(30)
        handler = torch._dynamo.callback.callback_handler
        with pytest.raises(CompiledAfterWarmup), seal.guard(), handler.install_callbacks(mock.Mock(), "1/0"):
            pass
    finally:
        finish.set()
        other.join()


def test_nothing_happens_outside_the_guard_or_before_the_seal() -> None:
    seal = CompileSeal()
    with seal.guard():
        fresh()(torch.ones(3))
    assert not seal.sealed
    seal.seal()
    assert seal.sealed
    fresh()(torch.ones(3))
    with pytest.raises(CompiledAfterWarmup), seal.guard(), seal.guard():
        fresh()(torch.ones(3))

    def compile_after_an_inner_guard() -> None:
        with seal.guard():
            with seal.guard():
                pass
            fresh()(torch.ones(3))

    with pytest.raises(CompiledAfterWarmup):
        compile_after_an_inner_guard()
    fresh()(torch.ones(3))
    seal.close()
    assert not seal.sealed
    with seal.guard():
        fresh()(torch.ones(3))
    seal.seal()
    assert not seal.sealed


def test_other_threads_may_compile_while_a_step_runs(seal: CompileSeal) -> None:
    results: list[Any] = []
    with seal.guard():
        thread = threading.Thread(target=lambda: results.append(fresh()(torch.ones(3)).tolist()))
        thread.start()
        thread.join()
    assert results == [[2, 2, 2]]


def test_warn_goes_on_and_tells_once_per_cause(caplog: pytest.LogCaptureFixture) -> None:
    seal = CompileSeal("warn")
    seal.seal()
    run = fresh("aot_eager")
    run(torch.ones(3))
    with caplog.at_level(logging.WARNING, "compiled_engine"):
        for size in (4, 4, 5):
            with seal.guard():
                assert run(torch.ones(size)).tolist() == [2.0] * size
        first, second = warnings_of(caplog)
        assert "actual 4" in first
        assert "actual 5" in second
        torch._dynamo.reset()
        run(torch.ones(3))
        with seal.guard():
            run(torch.ones(4))
    seal.close()
    assert warnings_of(caplog) == [first, second]


def test_one_compile_is_one_warning_though_many_parts_of_torch_work_on_it(caplog: pytest.LogCaptureFixture) -> None:
    """Inductor's work on a graph and the C++ build inside it are not causes of their own."""
    seal = CompileSeal("warn")
    seal.seal()

    def inner(*args: Any, **kwargs: Any) -> Any:
        build_cpp()
        return lambda *inputs: inputs

    with (
        mock.patch.object(cpp_builder, "run_compile_cmd") as compiler,
        mock.patch.object(compile_fx, "wrap_compiler_debug", return_value=inner),
        caplog.at_level(logging.WARNING, "compiled_engine"),
        seal.guard(),
    ):
        compile_fx.compile_fx(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(3)])
    seal.close()
    assert compiler.call_count == 1
    (warning,) = warnings_of(caplog)
    assert "Inductor compiled a graph of 1 operations" in warning


def test_unknown_action() -> None:
    with pytest.raises(ConfigError, match="on_compile is 'ignore'"):
        CompileSeal("ignore")


@given(shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=12))
@settings(max_examples=10)
def test_inputs_are_described(shapes: list[list[int]]) -> None:
    """Shapes of the first tensors, and how many more there are."""
    seal = CompileSeal()
    seal.seal()
    exported = mock.Mock(spec=[])
    try:
        with pytest.raises(CompiledAfterWarmup) as caught, seal.guard():
            torch.export._trace._export(exported, tuple(torch.empty(shape) for shape in shapes))
    finally:
        seal.close()
    text = caught.value.inputs
    assert text is not None
    for index, shape in enumerate(shapes[:8]):
        assert f"{index} float32{shape}" in text
    assert ("and" in text) == (len(shapes) > 8)
