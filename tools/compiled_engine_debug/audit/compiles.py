"""``compile-after-warmup``: something is traced, compiled or captured while the workload runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from compiled_engine.compile.taps import Compilation, Subscription
from compiled_engine.errors import CompiledAfterWarmup
from compiled_engine_debug.audit.detector import Detector
from compiled_engine_debug.audit.step import Step
from compiled_engine_debug.audit.subject import Subject
from compiled_engine_debug.findings import Finding


class CompileAfterWarmup(Detector):
    """Listens to every compile of torch while steps run, also where the engine is set to warn and go on."""

    name = "compile-after-warmup"
    about = "traces, compiles and captures during the workload"

    def __init__(self) -> None:
        super().__init__()
        self._ear = _Ear()
        self._subscription: Subscription | None = None

    def start(self, subject: Subject) -> Iterable[Finding]:
        self._subscription = Subscription(self._ear)
        return ()

    def before_step(self, subject: Subject, step: Step) -> Iterable[Finding]:
        self._ear.thread = threading.get_ident()
        self._ear.heard.clear()
        return ()

    def after_step(self, subject: Subject, step: Step) -> Iterable[Finding]:
        self._ear.thread = None
        self.looks += 1
        heard = list(self._ear.heard)
        error = step.error
        if isinstance(error, CompiledAfterWarmup) and not any(item.what == error.what for item in heard):
            heard.insert(0, Compilation(error.what, error.reason, error.inputs))
        for item in heard:
            why = "" if item.reason is None else f" because {item.reason}"
            inputs = "" if item.inputs is None else f", for {item.inputs}"
            yield self.found(
                f"in step {step.index}, after warm-up: {item.what}{why}{inputs}",
                step=step.index,
                key=None if step.key is None else str(step.key),
                node=item.what,
            )

    def close(self) -> None:
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None


class _Ear:
    """A ``taps.Listener`` that notes what begins in the step's thread; what one compile starts in turn is not noted."""

    def __init__(self) -> None:
        self.thread: int | None = None
        self.heard: list[Compilation] = []
        self._depth = 0

    def enter(self, describe: Callable[[], Compilation]) -> bool:
        if self.thread != threading.get_ident():
            return False
        if self._depth == 0:
            self.heard.append(describe())
        self._depth += 1
        return True

    def leave(self) -> None:
        self._depth -= 1
