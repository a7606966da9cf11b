"""Counting compilations of any kind inside a block, from outside the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock


@dataclass
class CompileLog:
    """What was compiled: one entry per Dynamo trace, Inductor graph (just in time or ahead of time) or C++ build."""

    events: list[str] = field(default_factory=list)


@contextmanager
def watch_compiles() -> Iterator[CompileLog]:
    """Record every compilation that starts inside the block."""
    import torch._dynamo.callback as dynamo
    from torch._inductor import compile_fx
    from torch._inductor.cpp_builder import CppBuilder

    log = CompileLog()
    inner, build = compile_fx.compile_fx_inner, CppBuilder.build

    def on_dynamo(arguments: object) -> None:
        log.events.append(f"dynamo: {arguments}")

    def on_inductor(*args: object, **kwargs: object) -> object:
        log.events.append("inductor")
        return inner(*args, **kwargs)

    def on_cpp(self: CppBuilder) -> None:
        log.events.append(f"c++: {self.get_target_file_path()}")
        build(self)

    dynamo.on_compile_start(on_dynamo)
    try:
        with (
            mock.patch.object(compile_fx, "compile_fx_inner", on_inductor),
            mock.patch.object(CppBuilder, "build", on_cpp),
        ):
            yield log
    finally:
        dynamo.callback_handler.remove_start_callback(on_dynamo)
