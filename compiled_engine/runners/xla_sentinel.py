"""After warm-up no step on a TPU may compile: the seal watches Dynamo, XLA is asked for its number of graphs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from compiled_engine.compile.seal import CompileSeal
from compiled_engine.errors import CompiledAfterWarmup
from compiled_engine.runners.platforms import XlaPlatform

logger = logging.getLogger(__name__)


class XlaSentinel:
    """Compares the platform's counts around every step once ``seal`` was called.

    ``on_compile``: "raise" or "warn", as in ``EngineConfig``. ``stray_executions``: operations outside of compiled
    functions that steps have executed since, which cost a launch each even when they compile nothing.
    """

    def __init__(self, platform: XlaPlatform, on_compile: str) -> None:
        self._platform = platform
        self._seal = CompileSeal(on_compile)
        self._warn_only = on_compile == "warn"
        self.stray_executions = 0

    @property
    def sealed(self) -> bool:
        """Whether steps are watched now."""
        return self._seal.sealed

    def seal(self) -> None:
        """From now on nothing may be compiled inside ``step``. Idempotent."""
        self._seal.seal()

    def close(self) -> None:
        """Watch no more. Idempotent."""
        self._seal.close()

    @contextmanager
    def step(self, bucket: str, shapes: str) -> Iterator[None]:
        """A context manager for one step, described by its ``bucket`` and the ``shapes`` in it for errors.

        Raises ``CompiledAfterWarmup`` for what Dynamo traced (at once) and for graphs that XLA compiled (at the end).
        """
        before = self._platform.counts()
        try:
            with self._seal.guard():
                yield
        except CompiledAfterWarmup as error:
            reason = "; ".join(filter(None, (f"a step in bucket {bucket}", error.reason)))
            raise CompiledAfterWarmup(error.what, reason, shapes) from error
        if not self.sealed:
            return
        after = self._platform.counts()
        # A step that compiles may lose counts of earlier ones.
        stray = max(0, after.stray - before.stray)
        self.stray_executions += stray
        if after.graphs > before.graphs:
            self._report(after.graphs - before.graphs, stray, bucket, shapes)

    def _report(self, graphs: int, stray: int, bucket: str, shapes: str) -> None:
        what = f"XLA compiled {graphs} graph{'s' * (graphs > 1)}"
        if stray:
            what += f", {min(stray, graphs)} of them for operations outside of compiled functions"
        error = CompiledAfterWarmup(what, f"a step in bucket {bucket}", shapes)
        if not self._warn_only:
            raise error
        logger.warning("%s", error)
