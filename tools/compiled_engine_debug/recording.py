"""Reading a recording: the file of JSON lines that ``LLM(record=FILE)`` writes, one object per line."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from compiled_engine.compile.ledger import Phase
from compiled_engine.compile.plan import GraphPlan
from compiled_engine.compile.records import (
    RECORDING_VERSION,
    BindingRecord,
    CacheRecord,
    CapturedGraphRecord,
    CompileRecord,
    HeaderRecord,
    KeyRecord,
    MemoryRecord,
    ModelRecord,
    WeightRecord,
)
from compiled_engine.errors import ConfigError, PlanError
from compiled_engine_debug.steps import Steps, StepsBuilder

_LONGEST_HEADER = 1 << 20
# What reading a line raises that is none: no JSON, or not with the fields and types of its kind.
_WRONG_LINE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, PlanError)

Record = TypeVar("Record")


class RecordingError(ConfigError):
    """A file cannot be read as a recording; the message names the file, the line and the way out."""

    def __init__(self, path: Path, line: int | None, problem: str) -> None:
        self.path, self.line = path, line
        super().__init__(f"{path}{'' if line is None else f', line {line}'}: {problem}")


@dataclass(frozen=True)
class Recording:
    """Everything that a recording holds. ``plan`` is None on a device that runs none, and when the start failed.

    ``truncated``: the file was cut short, as by a crash; what it holds up to there is all here.
    """

    path: Path
    header: HeaderRecord
    phases: tuple[Phase, ...]
    plan: GraphPlan | None
    caches: tuple[CacheRecord, ...]
    weights: tuple[WeightRecord, ...]
    graphs: tuple[CapturedGraphRecord, ...]
    keys: tuple[KeyRecord, ...]
    memory: MemoryRecord | None
    compiles: tuple[CompileRecord, ...]
    steps: Steps
    truncated: bool


def read_recording(path: str | Path) -> Recording:
    """Read the recording in the file ``path``. Raises ``RecordingError`` for what is none, or is damaged.

    A last line that is cut off is no error: see ``Recording.truncated``. Lines of a kind that is not known here are
    passed over, unless a newer version wrote them.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            return _Reader(path).read(file)
    except OSError as error:
        raise RecordingError(path, None, f"{error.strerror or error}: give a file that record=FILE wrote") from error


class _Reader:
    """Collects the lines of one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._phases: list[Phase] = []
        self._plan: GraphPlan | None = None
        self._caches: list[CacheRecord] = []
        self._weights: list[WeightRecord] = []
        self._graphs: list[CapturedGraphRecord] = []
        self._keys: tuple[KeyRecord, ...] = ()
        self._memory: MemoryRecord | None = None
        self._compiles: list[CompileRecord] = []
        self._steps = StepsBuilder()
        self._num_steps: int | None = None  # as the last line tells
        self._takers: dict[str, Callable[[dict[str, Any]], None]] = {
            "step": self._steps.add,
            "phase": lambda data: self._phases.append(_record(Phase, data)),
            "plan": self._take_plan,
            "cache": lambda data: self._caches.append(_record(CacheRecord, data)),
            "weight": lambda data: self._weights.append(_record(WeightRecord, data)),
            "graph": lambda data: self._graphs.append(_graph(data)),
            "keys": self._take_keys,
            "memory": self._take_memory,
            "compile": lambda data: self._compiles.append(_record(CompileRecord, data)),
            "end": self._take_end,
        }

    def read(self, file: BinaryIO) -> Recording:
        header = self._read_header(file)
        for number, line in enumerate(file, 2):
            if not line.endswith(b"\n"):
                break  # the writer was interrupted in this line
            self._take(number, line, header.version)
        steps = self._steps.build()
        if self._num_steps is not None and self._num_steps != len(steps):
            problem = f"its end tells of {self._num_steps} steps, and {len(steps)} are there: lines are missing"
            raise RecordingError(self._path, None, f"{problem}; record again")
        return Recording(
            path=self._path,
            header=header,
            phases=tuple(self._phases),
            plan=self._plan,
            caches=tuple(self._caches),
            weights=tuple(self._weights),
            graphs=tuple(self._graphs),
            keys=self._keys,
            memory=self._memory,
            compiles=tuple(self._compiles),
            steps=steps,
            truncated=self._num_steps is None,
        )

    def _read_header(self, file: BinaryIO) -> HeaderRecord:
        line = file.readline(_LONGEST_HEADER)
        problem = "this is no header of a recording: give a file that record=FILE wrote"
        try:
            data = json.loads(line)
            if not line.endswith(b"\n") or data.pop("kind") != "header" or type(data["version"]) is not int:
                raise ValueError("the first line is of another kind")
            if data["model"] is not None:
                data["model"] = _record(ModelRecord, data["model"])
            return _record(HeaderRecord, data)
        except _WRONG_LINE as error:
            raise RecordingError(self._path, 1, problem) from error

    def _take(self, number: int, line: bytes, version: int) -> None:
        if self._num_steps is not None:
            raise RecordingError(self._path, number, "this follows the line that ends the recording: record again")
        try:
            data = json.loads(line)
            kind = data.pop("kind")
            if kind in self._takers:
                self._takers[kind](data)
            elif version > RECORDING_VERSION:
                raise ValueError(f"lines of kind {kind!r} are not known here")
        except _WRONG_LINE as error:
            hint = "record again"
            if version > RECORDING_VERSION:
                hint = f"it has version {version}, this tool reads {RECORDING_VERSION}: use the version that wrote it"
            raise RecordingError(self._path, number, f"{type(error).__name__}: {error}; {hint}") from error

    def _take_plan(self, data: dict[str, Any]) -> None:
        self._plan = GraphPlan.from_json(json.dumps(data["plan"]))

    def _take_keys(self, data: dict[str, Any]) -> None:
        self._keys = tuple(_record(KeyRecord, item) for item in data["keys"])

    def _take_memory(self, data: dict[str, Any]) -> None:
        self._memory = _record(MemoryRecord, data)

    def _take_end(self, data: dict[str, Any]) -> None:
        self._num_steps = operator.index(data["num_steps"])


def _graph(data: Mapping[str, Any]) -> CapturedGraphRecord:
    bindings = tuple(_record(BindingRecord, item) for item in data["bindings"])
    return _record(CapturedGraphRecord, {**data, "bindings": bindings})


def _record(kind: Callable[..., Record], data: Mapping[str, Any]) -> Record:
    """``data`` as a dataclass; lists become tuples. Raises ``TypeError`` where fields are missing or left over."""
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in data.items()})
