"""The recorder: keeps what an engine does, step by step, in memory and in a file of JSON lines."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import platform
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any, BinaryIO

from compiled_engine.compile.ledger import Ledger, Phase
from compiled_engine.compile.records import (
    RECORDING_VERSION,
    CompileRecord,
    HeaderRecord,
    ModelRecord,
    RunnerRecord,
    StepRecord,
)
from compiled_engine.compile.taps import Compilation, Subscription
from compiled_engine.config import EngineConfig
from compiled_engine.errors import ConfigError
from compiled_engine.version import __version__

logger = logging.getLogger(__name__)

IN_MEMORY = "memory"
"""The value of ``EngineConfig.record`` that stands for no file."""

_SECONDS_BETWEEN_WRITES = 1.0
_PACKAGES = ("torch", "transformers")
# Settings that name files, of which a recording keeps the last component.
_PATHS = ("model", "graphs", "record")
_to_json = json.JSONEncoder(separators=(",", ":")).encode


class Recorder:
    """Records one engine: the start, what torch compiles from now on, and every step.

    ``steps`` and ``compiles`` keep the last ``capacity`` each. With a ``file`` everything also goes there, in whole
    lines, about once a second and whenever the engine has nothing left to do; what was there before is replaced. The
    file is complete after ``close``, and readable up to the last write without. A file that can no longer be written is
    told of in the log, and the engine goes on without. Raises ``ConfigError`` for a file that cannot be made.

    ``ledger``: the one of the engine's start; all times count from its zero.
    """

    def __init__(self, config: EngineConfig, ledger: Ledger, file: Path | None = None, capacity: int = 10_000) -> None:
        self.steps: deque[StepRecord] = deque(maxlen=capacity)
        self.compiles: deque[CompileRecord] = deque(maxlen=capacity)
        self.runner: RunnerRecord | None = None
        self.num_steps = 0
        self._lock = threading.Lock()  # of ``compiles``: they are told of in the threads that compile
        self._config = config
        self._ledger = ledger
        self._zero = time.perf_counter() - ledger.now
        self._lines = None if file is None else _LineFile(file)
        self._started = False
        self._num_phases = 0
        self._closed = False
        # A recorder that is forgotten leaves torch as it was.
        self._leave_torch = weakref.finalize(self, Subscription(_CompileWatch(_weakly(self._add_compile))).close)
        self._leave_torch.atexit = False

    def since_start(self, reading: float) -> float:
        """Seconds from the ledger's zero to a reading of ``time.perf_counter()``."""
        return reading - self._zero

    def start(self, runner: RunnerRecord) -> None:
        """The engine is ready, and ``runner`` is what it runs on. To be called once, before the first step."""
        self.runner = runner
        self._write_start()

    def add_step(self, step: StepRecord) -> None:
        """A step has run."""
        self.num_steps += 1
        self.steps.append(step)
        if self._lines is not None:
            self._lines.add([_step_line(step)])

    def flush(self) -> None:
        """Bring everything into the file."""
        if self._lines is not None and self._started:
            self._write_phases()
            self._lines.flush()

    def save(self, path: str | Path) -> None:
        """Write what is in memory as a recording of its own. Raises ``ConfigError`` where that cannot be done."""
        lines = _LineFile(Path(path), keep_errors=True)
        try:
            lines.add(_start_lines(self._header(), self._ledger.phases, self.runner, self._compiles_so_far()))
            lines.add(map(_step_line, self.steps))
            lines.add([_end_line(len(self.steps))])
        finally:
            lines.close()

    def close(self) -> None:
        """Record no more, and complete the file. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._leave_torch()
        if self._lines is not None:
            if not self._started:
                self._write_start()
            self._write_phases()
            self._lines.add([_end_line(self.num_steps)])
            self._lines.close()

    def _header(self) -> HeaderRecord:
        return make_header(self._config, None if self.runner is None else self.runner.model)

    def _write_start(self) -> None:
        """What was found before the header's facts were known comes after it."""
        self._started = True
        if self._lines is not None:
            phases = self._ledger.phases
            self._num_phases = len(phases)
            self._lines.add(_start_lines(self._header(), phases, self.runner, self._compiles_so_far()))
            self._lines.flush()

    def _write_phases(self) -> None:
        phases = self._ledger.phases[self._num_phases :]
        self._num_phases += len(phases)
        if self._lines is not None:
            self._lines.add(_line("phase", asdict(phase)) for phase in phases)

    def _compiles_so_far(self) -> tuple[CompileRecord, ...]:
        with self._lock:
            return tuple(self.compiles)

    def _add_compile(self, found: Compilation, begin: float, seconds: float) -> None:
        record = CompileRecord(
            what=found.what,
            reason=found.reason,
            inputs=found.inputs,
            start=self.since_start(begin),
            seconds=seconds,
            after_warmup=self._started,
        )
        with self._lock:
            self.compiles.append(record)
        if self._lines is not None and self._started:
            self._lines.add([_line("compile", asdict(record))])


def _weakly(report: Callable[[Compilation, float, float], None]) -> Callable[[Compilation, float, float], None]:
    """The bound method ``report`` without keeping its object alive."""
    weak = weakref.WeakMethod(report)

    def call(found: Compilation, begin: float, seconds: float) -> None:
        alive = weak()
        if alive is not None:
            alive(found, begin, seconds)

    return call


def recorder_for(config: EngineConfig, ledger: Ledger) -> Recorder | None:
    """The recorder that ``config.record`` asks for; None where it asks for none. Raises ``ConfigError``."""
    if config.record is None:
        return None
    return Recorder(config, ledger, None if config.record == IN_MEMORY else Path(config.record))


def make_header(config: EngineConfig, model: ModelRecord | None) -> HeaderRecord:
    """The header of a recording that begins now."""
    settings = asdict(config)
    for name in _PATHS:
        if settings[name] is not None:
            settings[name] = Path(settings[name]).name
    versions: dict[str, str | None] = {"python": platform.python_version()}
    return HeaderRecord(
        version=RECORDING_VERSION,
        engine=__version__,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z"),
        versions=versions | {name: _version(name) for name in _PACKAGES},
        device=config.device,
        config=settings,
        model=model,
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _start_lines(
    header: HeaderRecord, phases: Iterable[Phase], runner: RunnerRecord | None, compiles: Iterable[CompileRecord]
) -> Iterator[str]:
    yield _line("header", asdict(header))
    for phase in phases:
        yield _line("phase", asdict(phase))
    if runner is not None:
        yield from _runner_lines(runner)
    for compiled in compiles:
        yield _line("compile", asdict(compiled))


def _runner_lines(runner: RunnerRecord) -> Iterator[str]:
    if runner.plan is not None:
        yield _line("plan", {"plan": json.loads(runner.plan.to_json())})
    for kind, records in (("cache", runner.caches), ("weight", runner.weights), ("graph", runner.graphs)):
        for record in records:
            yield _line(kind, asdict(record))
    yield _line("keys", {"keys": [asdict(key) for key in runner.keys]})
    if runner.memory is not None:
        yield _line("memory", asdict(runner.memory))


def _step_line(step: StepRecord) -> str:
    # Shares by hand, which takes half the time: there are many, every step has them, and a step waits for its line.
    facts = {"kind": "step", **vars(step)}
    shares = [
        f"[{encode_basestring_ascii(request)},{computed},{scheduled},{'true' if samples else 'false'}]"
        for request, computed, scheduled, samples in facts.pop("requests")
    ]
    return f'{_to_json(facts)[:-1]},"requests":[{",".join(shares)}]}}\n'


def _end_line(num_steps: int) -> str:
    return _line("end", {"num_steps": num_steps})


def _line(kind: str, data: dict[str, Any]) -> str:
    return _to_json({"kind": kind, **data}) + "\n"


class _LineFile:
    """A file that is written in whole lines. ``keep_errors``: raise ``ConfigError`` instead of going on without it."""

    def __init__(self, path: Path, keep_errors: bool = False) -> None:
        self._path = path
        self._keep_errors = keep_errors
        self._lock = threading.Lock()  # compiles are told of in the threads that compile
        self._waiting: list[str] = []
        self._written = time.perf_counter()
        try:
            self._file: BinaryIO | None = path.open("wb")
        except OSError as error:
            raise ConfigError(self._problem(error)) from error

    def add(self, lines: Iterable[str]) -> None:
        """Write ``lines``, at once or later."""
        with self._lock:
            self._waiting.extend(lines)
            if time.perf_counter() - self._written >= _SECONDS_BETWEEN_WRITES:
                self._write()

    def flush(self) -> None:
        """Write what was added."""
        with self._lock:
            self._write()

    def close(self) -> None:
        """Write what was added and close the file."""
        with self._lock:
            self._write()
            if self._file is not None:
                self._file.close()
                self._file = None

    def _write(self) -> None:
        self._written = time.perf_counter()
        data = "".join(self._waiting).encode()
        self._waiting.clear()
        if self._file is None or not data:
            return
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            broken, self._file = self._file, None
            # Closing tries to write what is left, and fails for the same reason.
            with contextlib.suppress(OSError):
                broken.close()
            if self._keep_errors:
                raise ConfigError(self._problem(error)) from error
            logger.warning("%s; recording goes on in memory alone", self._problem(error))

    def _problem(self, error: OSError) -> str:
        return f"the recording {self._path} cannot be written ({error.strerror or error}): choose another file"


@dataclass
class _Running:
    found: Compilation
    begin: float
    depth: int = 0


class _CompileWatch(threading.local):
    """A listener of taps. What one compile starts in turn, in its thread, is a part of it."""

    def __init__(self, report: Callable[[Compilation, float, float], None]) -> None:
        self._report = report
        self._running: _Running | None = None

    def enter(self, describe: Callable[[], Compilation]) -> bool:
        if self._running is None:
            self._running = _Running(describe(), time.perf_counter())
        self._running.depth += 1
        return True

    def leave(self) -> None:
        running = self._running
        if running is None:
            return
        running.depth -= 1
        if running.depth == 0:
            self._running = None
            self._report(running.found, running.begin, time.perf_counter() - running.begin)
