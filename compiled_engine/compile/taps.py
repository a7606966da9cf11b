"""Taps: hearing of it when torch traces, compiles or builds something.

torch tells of its compiles in no single place. A tap replaces one of its functions by a wrapper that passes every call
on and first tells its listeners; the function comes back with the last listener's leave. A module of torch that is
not imported yet is tapped when it is, so listening imports nothing.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

logger = logging.getLogger(__name__)

_MARK = "_compiled_engine_tap"
_LOCK = threading.RLock()
_MOST_SHOWN = 8


@dataclass(frozen=True)
class Compilation:
    """What is compiled, why, and for which inputs; None where torch does not tell."""

    what: str
    reason: str | None = None
    inputs: str | None = None


Describe = Callable[[Sequence[Any], Mapping[str, Any]], Compilation]


class Listener(Protocol):
    """Told in the thread that compiles."""

    def enter(self, describe: Callable[[], Compilation]) -> bool:
        """A compilation begins. What this raises keeps it from happening. True: ``leave`` is wanted at its end."""
        ...

    def leave(self) -> None:
        """A compilation for which ``enter`` returned True has ended."""
        ...


@dataclass(frozen=True)
class TapPoint:
    """A function of torch. ``owner``: class or object in the module that has it; None: the module itself.

    ``scoped``: calling it gives a context manager, inside which the work is done.
    """

    module: str
    owner: str | None
    attribute: str
    describe: Describe
    scoped: bool = False


@dataclass(eq=False)
class Tap:
    """One wrapped function and who listens to it."""

    owner: Any
    attribute: str
    original: Any
    own: bool  # whether the attribute stood in the owner itself, not in its class
    wrapper: Any = None
    listeners: list[Listener] = field(default_factory=list)

    def remove(self, listener: Listener) -> None:
        """Stop telling ``listener``. A wrapper that someone else has wrapped stays, and passes calls on."""
        with _LOCK:
            self.listeners.remove(listener)
            if self.listeners or vars(self.owner).get(self.attribute) is not self.wrapper:
                return
            if self.own:
                setattr(self.owner, self.attribute, self.original)
            else:
                delattr(self.owner, self.attribute)


class Subscription:
    """One listener on every tap point, also on those whose module is imported later. Ended by ``close``."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._taps: list[Tap] = []
        self._watcher: _ImportWatcher | None = _ImportWatcher(self._tap_module)
        with _LOCK:
            sys.meta_path.insert(0, self._watcher)
            for module in self._watcher.names:
                if module in sys.modules:
                    self._tap_module(module)

    def close(self) -> None:
        """Leave every tap. Idempotent."""
        with _LOCK:
            if self._watcher is None:
                return
            if self._watcher in sys.meta_path:
                sys.meta_path.remove(self._watcher)
            self._watcher = None
            for tap in self._taps:
                tap.remove(self._listener)
            self._taps.clear()

    def _tap_module(self, name: str) -> None:
        with _LOCK:
            if self._watcher is None:
                return
            for point in TAP_POINTS:
                if point.module == name:
                    tap = _tap(point)
                    if tap is not None and self._listener not in tap.listeners:
                        tap.listeners.append(self._listener)
                        self._taps.append(tap)


class _ImportWatcher(importlib.abc.MetaPathFinder):
    """Calls ``loaded`` with the name of a tapped module as soon as that module has been executed."""

    def __init__(self, loaded: Callable[[str], None]) -> None:
        self.names = frozenset(point.module for point in TAP_POINTS)
        self._loaded = loaded

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.names or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                self._announce(spec)
                return spec
        return None

    def _announce(self, spec: importlib.machinery.ModuleSpec) -> None:
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._loaded(spec.name)

        loader.exec_module = exec_module  # the loader is this module's own


def _tap(point: TapPoint) -> Tap | None:
    """The tap at ``point``, made if there is none; None if this version of torch has no such function."""
    owner = sys.modules[point.module]
    if point.owner is not None:
        owner = getattr(owner, point.owner, None)  # type: ignore[assignment]
    current = getattr(owner, point.attribute, None)
    if current is None:
        logger.debug("no %s in %s: its compiles are not noticed", point.attribute, point.owner or point.module)
        return None
    tap = getattr(current, _MARK, None)
    if tap is None or tap.wrapper is not current:
        tap = Tap(owner, point.attribute, current, point.attribute in vars(owner))
        tap.wrapper = _wrap(tap, point)
        setattr(tap.wrapper, _MARK, tap)
        setattr(owner, point.attribute, tap.wrapper)
    return tap


def _wrap(tap: Tap, point: TapPoint) -> Callable[..., Any]:
    @contextmanager
    def told(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        entered: list[Listener] = []
        try:
            for listener in tuple(tap.listeners):
                if listener.enter(lambda: point.describe(args, kwargs)):
                    entered.append(listener)
            yield
        finally:
            for listener in entered:
                listener.leave()

    if point.scoped:

        @functools.wraps(tap.original)
        @contextmanager
        def scope(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with told(args, kwargs), tap.original(*args, **kwargs) as value:
                yield value

        return scope

    @functools.wraps(tap.original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with told(args, kwargs):
            return tap.original(*args, **kwargs)

    return call


def _describe_dynamo(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Compilation:
    """Dynamo passes on no more than a number; the function and the reason stand in the frame of its own compiler."""
    frame = sys._getframe()
    while frame is not None and not _is_dynamos_compile(frame.f_code.co_name, frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None or not hasattr(frame.f_locals.get("code"), "co_name"):
        trigger = getattr(args[0] if args else kwargs.get("trigger"), "name", "something")
        return Compilation(f"torch compiled or captured at run time ({trigger.lower().replace('_', ' ')})")
    local, code = frame.f_locals, frame.f_locals["code"]
    name = getattr(code, "co_qualname", code.co_name)
    return Compilation(
        f"Dynamo traced {name} ({code.co_filename}:{code.co_firstlineno})",
        reason=str(local.get("recompile_reason") or "it had not been traced before").strip(),
        inputs=_inputs(local["locals"].items()) if isinstance(local.get("locals"), dict) else None,
    )


def _is_dynamos_compile(name: str, file: str) -> bool:
    return name == "_compile" and os.path.basename(file) == "convert_frame.py"


def _describe_inductor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Compilation:
    module = args[0] if args else kwargs.get("gm", kwargs.get("model_"))
    examples = args[1] if len(args) > 1 else kwargs.get("example_inputs", kwargs.get("example_inputs_", ()))
    nodes = [node for node in getattr(getattr(module, "graph", None), "nodes", ()) if node.op.startswith("call")]
    names = ", ".join(_name(node.target) for node in nodes[:_MOST_SHOWN]) + (
        ", ..." if len(nodes) > _MOST_SHOWN else ""
    )
    return Compilation(
        f"Inductor compiled a graph of {len(nodes)} operations ({names})",
        inputs=_inputs(enumerate(examples)) if isinstance(examples, (list, tuple)) else None,
    )


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _describe_cpp(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Compilation:
    target = getattr(args[0], "get_target_file_path", None) if args else None
    return Compilation("a C++ compiler was called" + (f" to build {target()}" if callable(target) else ""))


def _describe_extension(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Compilation:
    return Compilation(f"torch built the C++ extension {args[0] if args else kwargs.get('name')!r}")


def _describe_export(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Compilation:
    module = args[0] if args else kwargs.get("mod")
    examples = args[1] if len(args) > 1 else kwargs.get("args", ())
    return Compilation(
        f"torch.export traced {type(module).__name__}",
        inputs=_inputs(enumerate(examples)) if isinstance(examples, (list, tuple)) else None,
    )


def _inputs(values: Any) -> str | None:
    shown = [text for name, value in values for text in _describe_value(str(name), value)]
    if not shown:
        return None
    return ", ".join(shown[:_MOST_SHOWN]) + (f", and {len(shown) - _MOST_SHOWN} more" * (len(shown) > _MOST_SHOWN))


def _describe_value(name: str, value: Any) -> Iterator[str]:
    """Tensors as "x float32[2, 8]" and numbers as "n=3"; other values are left out."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        sizes = ", ".join(str(size) for size in value.shape)
        yield f"{name} {str(value.dtype).removeprefix('torch.')}[{sizes}]"
    elif isinstance(value, (bool, int, float)):
        yield f"{name}={value}"
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _describe_value(f"{name}[{index}]", item)


TAP_POINTS = (
    TapPoint("torch._dynamo.callback", "callback_handler", "install_callbacks", _describe_dynamo, scoped=True),
    TapPoint("torch._inductor.compile_fx", None, "compile_fx", _describe_inductor),
    TapPoint("torch._inductor.compile_fx", None, "compile_fx_aot", _describe_inductor),
    # Where every graph ends up, also those of callers that imported the two above by name.
    TapPoint("torch._inductor.compile_fx", None, "_compile_fx_inner", _describe_inductor),
    TapPoint("torch._inductor.cpp_builder", "CppBuilder", "build", _describe_cpp),
    TapPoint("torch.utils.cpp_extension", None, "_jit_compile", _describe_extension),
    TapPoint("torch.export._trace", None, "_export", _describe_export),
)
