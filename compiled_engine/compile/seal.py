"""The seal: after warm-up, whatever is captured or compiled inside a step is an error that names it."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from types import TracebackType

from compiled_engine.compile.taps import Compilation, Subscription
from compiled_engine.config import ON_COMPILE
from compiled_engine.errors import CompiledAfterWarmup, ConfigError

logger = logging.getLogger(__name__)


class CompileSeal:
    """Watches the steps of one engine once its warm-up is over.

    Call ``seal()`` after warm-up, run every step inside ``with seal.guard():``, and ``close()`` at the end. A Dynamo
    trace, an Inductor compile, an export or a C++ build that the step's own thread begins inside the guard raises
    ``CompiledAfterWarmup`` out of the guard, whatever torch or other code makes of the exception on its way; with
    on_compile "warn" it happens and is logged, once per cause. Compiles outside a guard and in other threads are not
    this engine's: nothing happens. Raises ``ConfigError`` for another ``on_compile``.
    """

    def __init__(self, on_compile: str = "raise") -> None:
        if on_compile not in ON_COMPILE:
            raise ConfigError(f"on_compile is {on_compile!r}: choose one of {', '.join(ON_COMPILE)}")
        self._watch = _Watch(warn_only=on_compile == "warn")
        self._end: weakref.finalize[[], CompileSeal] | None = None
        self._closed = False

    @property
    def sealed(self) -> bool:
        """Whether guarded steps are watched now."""
        return self._end is not None and self._end.alive

    def seal(self) -> None:
        """From now on nothing may be compiled inside a guard. Idempotent; nothing happens after ``close``."""
        if self._end is None and not self._closed:
            self._end = weakref.finalize(self, Subscription(self._watch).close)
            self._end.atexit = False

    def guard(self) -> StepGuard:
        """A context manager for one step; it takes about a microsecond."""
        return StepGuard(self._watch)

    def close(self) -> None:
        """Watch no more and leave no trace in torch. Idempotent; also happens when the seal is collected."""
        self._closed = True
        if self._end is not None:
            self._end()


class _Watch:
    """What taps are told to, and what guards ask. It knows no seal, so that a forgotten seal can be collected."""

    def __init__(self, warn_only: bool) -> None:
        self.guarded_thread: int | None = None
        self.violation: CompiledAfterWarmup | None = None
        self._warn_only = warn_only
        self._warned: set[tuple[str, str | None]] = set()
        self._depth = 0

    def enter(self, describe: Callable[[], Compilation]) -> bool:
        if self.guarded_thread != threading.get_ident():
            return False
        if self._depth == 0:  # what one compile starts in turn is not another cause
            self._report(describe())
        self._depth += 1
        return True

    def leave(self) -> None:
        self._depth -= 1

    def _report(self, found: Compilation) -> None:
        error = CompiledAfterWarmup(found.what, found.reason, found.inputs)
        if not self._warn_only:
            self.violation = self.violation or error
            try:
                raise error
            finally:
                del error  # or it would hold itself, and all that the step's frames hold, until a collection
        if (found.what, found.reason) not in self._warned:
            self._warned.add((found.what, found.reason))
            logger.warning("%s", error)


class StepGuard:
    """One step of a sealed engine, in the thread that enters it."""

    __slots__ = ("_outer", "_watch")

    def __init__(self, watch: _Watch) -> None:
        self._watch = watch
        self._outer: int | None = None

    def __enter__(self) -> None:
        self._outer = self._watch.guarded_thread
        self._watch.guarded_thread = threading.get_ident()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        watch = self._watch
        watch.guarded_thread = self._outer
        violation = watch.violation
        if violation is None:
            return
        watch.violation = None
        violation.args = (violation.message,)  # torch appends hints of its own
        # torch wraps what its callbacks raise, and with suppress_errors goes on as if nothing had happened.
        if error is not violation and (error is None or isinstance(error, Exception)):
            try:
                raise violation from None
            finally:
                del violation, error, traceback
