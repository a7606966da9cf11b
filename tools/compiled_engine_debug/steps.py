"""The steps of a recording as columns: compact, and quick to work with in numpy."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiled_engine.compile.records import ScheduledShare, StepRecord

_COUNTS = (
    "index",
    "num_tokens",
    "num_padded_tokens",
    "num_requests",
    "num_padded_requests",
    "num_sampled",
    "epoch",
)
_TIMES = ("start", "seconds")
_TEXTS = ("mode", "key", "reason")

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Texts = NDArray[np.object_]


@dataclass(frozen=True, eq=False)
class Shares:
    """What every request has in every step, flat: step ``i`` has entries ``offsets[i]`` to ``offsets[i + 1]``.

    ``request``: index into ``request_ids``. Request ids are in the order in which they first ran.
    """

    offsets: Ints
    request_ids: tuple[str, ...]
    request: NDArray[np.int32]
    num_computed_tokens: NDArray[np.int32]
    num_scheduled_tokens: NDArray[np.int32]
    samples: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Steps:
    """All steps, one row each; columns have the names and units of ``StepRecord``.

    ``steps[i]`` is the i-th as a ``StepRecord``. ``index`` differs from i where only the last steps were kept.
    ``mode``, ``key`` and ``reason`` hold text, or None.
    """

    index: Ints
    start: Floats
    seconds: Floats
    num_tokens: Ints
    num_padded_tokens: Ints
    num_requests: Ints
    num_padded_requests: Ints
    num_sampled: Ints
    epoch: Ints
    mode: Texts
    key: Texts
    reason: Texts
    shares: Shares

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, position: Any) -> Any:
        """The step at ``position``; of a slice, a list of them."""
        if isinstance(position, slice):
            return [self[place] for place in range(*position.indices(len(self)))]
        place = range(len(self))[position]
        columns = {name: getattr(self, name)[place].item() for name in (*_COUNTS, *_TIMES)}
        texts = {name: getattr(self, name)[place] for name in _TEXTS}
        return StepRecord(**columns, **texts, requests=self.requests(place))

    def __iter__(self) -> Iterator[StepRecord]:
        return (self[place] for place in range(len(self)))

    def requests(self, position: int) -> tuple[ScheduledShare, ...]:
        """The requests of the step at ``position``."""
        shares, place = self.shares, range(len(self))[position]
        rows = slice(shares.offsets[place], shares.offsets[place + 1])
        return tuple(
            ScheduledShare(shares.request_ids[request], computed, scheduled, samples)
            for request, computed, scheduled, samples in zip(
                shares.request[rows].tolist(),
                shares.num_computed_tokens[rows].tolist(),
                shares.num_scheduled_tokens[rows].tolist(),
                shares.samples[rows].tolist(),
                strict=True,
            )
        )


class StepsBuilder:
    """Collects the step lines of a recording."""

    def __init__(self) -> None:
        self._counts = {name: array("q") for name in _COUNTS}
        self._times = {name: array("d") for name in _TIMES}
        self._texts = {name: _TextColumn() for name in _TEXTS}
        self._offsets = array("q", [0])
        self._requests = _TextColumn()
        self._computed, self._scheduled, self._samples = array("i"), array("i"), array("b")

    def add(self, data: Mapping[str, Any]) -> None:
        """Add one line. Raises ``KeyError``, ``TypeError``, ``ValueError`` or ``OverflowError`` where it is none."""
        for name, counts in self._counts.items():
            counts.append(data[name])
        for name, times in self._times.items():
            times.append(data[name])
        for name, texts in self._texts.items():
            texts.append(data[name])
        for request, computed, scheduled, samples in data["requests"]:
            self._requests.append(request)
            self._computed.append(computed)
            self._scheduled.append(scheduled)
            self._samples.append(samples)
        self._offsets.append(len(self._computed))

    def build(self) -> Steps:
        """What was added."""
        shares = Shares(
            offsets=np.array(self._offsets, dtype=np.int64),
            request_ids=tuple(str(text) for text in self._requests.values),
            request=np.array(self._requests.codes, dtype=np.int32),
            num_computed_tokens=np.array(self._computed, dtype=np.int32),
            num_scheduled_tokens=np.array(self._scheduled, dtype=np.int32),
            samples=np.array(self._samples, dtype=np.bool_),
        )
        counts: dict[str, Any] = {name: np.array(column, dtype=np.int64) for name, column in self._counts.items()}
        times: dict[str, Any] = {name: np.array(column, dtype=np.float64) for name, column in self._times.items()}
        texts: dict[str, Any] = {name: column.build() for name, column in self._texts.items()}
        return Steps(**counts, **times, **texts, shares=shares)


class _TextColumn:
    """Texts, each kept once."""

    def __init__(self) -> None:
        self.codes = array("i")
        self._known: dict[str | None, int] = {}

    @property
    def values(self) -> tuple[str | None, ...]:
        return tuple(self._known)

    def append(self, text: str | None) -> None:
        if text is not None and type(text) is not str:
            raise TypeError(f"{text!r} is no text")
        self.codes.append(self._known.setdefault(text, len(self._known)))

    def build(self) -> Texts:
        values = np.empty(len(self._known), dtype=object)
        values[:] = self.values
        return values[np.array(self.codes, dtype=np.int64)]
