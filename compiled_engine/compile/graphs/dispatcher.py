"""Which captured graph serves a step. Pure: the same settings and shape give the same answer, on any machine.

One dispatcher decides for capture and for replay: ``keys()`` is what gets captured, ``dispatch`` looks a step up in
the same tables, so that no step can ask for a graph that was not captured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from compiled_engine.compile.graphs.keys import GraphKey, GraphKind, GraphMode, StepShape
from compiled_engine.errors import ConfigError

DECODE_QUERY_LEN = 1
"""Tokens of each request of a decode step."""


@dataclass(frozen=True)
class Decision:
    """The graph that serves a step, or why the step runs eagerly: ``reason`` is ``""`` exactly when there is a key."""

    key: GraphKey | None
    reason: str

    def __post_init__(self) -> None:
        if (self.key is None) is (self.reason == ""):
            raise ValueError(f"a decision has a key or a reason: key {self.key}, reason {self.reason!r}")


class Dispatcher:
    """Chooses the smallest captured graph that a step fits.

    ``decode_sizes`` (requests), ``token_sizes`` (tokens) and ``max_seq_len_buckets`` (tokens, cached and new) ascend;
    those that ``mode`` has no use for may be empty. ``max_num_seqs``: most requests of a step.
    ``num_kv_splits(num_padded_requests, max_seq_len)``: the splits of a decode graph; it must be pure, and is asked
    once for each graph. Raises ``ConfigError`` for sizes that cannot work.
    """

    def __init__(
        self,
        mode: GraphMode,
        decode_sizes: tuple[int, ...],
        token_sizes: tuple[int, ...],
        max_num_seqs: int,
        max_seq_len_buckets: tuple[int, ...],
        num_kv_splits: Callable[[int, int], int],
    ) -> None:
        if max_num_seqs < 1:
            raise ConfigError(f"max_num_seqs is {max_num_seqs}: give a whole number of at least 1")
        self.mode = mode
        self.max_num_seqs = max_num_seqs
        # In the order of preference. The last is the most general, so its reason is the one to tell.
        self._families: list[_Family] = []
        if mode in (GraphMode.FULL_DECODE_ONLY, GraphMode.FULL, GraphMode.FULL_AND_PIECEWISE):
            _check_sizes("decode_sizes", decode_sizes, mode)
            _check_sizes("max_seq_len_buckets", max_seq_len_buckets, mode)
            if decode_sizes[-1] > max_num_seqs:
                raise ConfigError(f"decode_sizes has {decode_sizes[-1]}, above max_num_seqs {max_num_seqs}")
            self._families.append(_DecodeGraphs(decode_sizes, max_seq_len_buckets, num_kv_splits))
        if mode == GraphMode.FULL:
            _check_sizes("token_sizes", token_sizes, mode)
            self._families.append(_MixedGraphs(token_sizes, max_seq_len_buckets, max_num_seqs, decode_sizes[-1]))
        if mode in (GraphMode.PIECEWISE, GraphMode.FULL_AND_PIECEWISE):
            _check_sizes("token_sizes", token_sizes, mode)
            self._families.append(_PiecewiseGraphs(token_sizes))
        keys = [key for family in self._families for key in family.keys]
        self._keys = tuple(sorted(keys, key=_size_of, reverse=True))

    def keys(self) -> tuple[GraphKey, ...]:
        """Every key that ``dispatch`` can return, largest first.

        That is the order to capture in: the first graph makes a shared memory pool as large as it gets, and the
        others fit into it.
        """
        return self._keys

    def dispatch(self, shape: StepShape) -> Decision:
        """The smallest graph that ``shape`` fits, or the reason to run eagerly, with the number and its limit.

        Raises ``ValueError`` for a step of more than ``max_num_seqs`` requests, for which no buffers exist.
        """
        if shape.num_requests > self.max_num_seqs:
            raise ValueError(f"the step has {shape.num_requests} requests, above max_num_seqs {self.max_num_seqs}")
        decision = _eager(f"graphs are off (mode {self.mode.value})")
        for family in self._families:
            decision = family.find(shape)
            if decision.key is not None:
                return decision
        return decision


class _Family(Protocol):
    """Graphs of one form, made once, and the rule that finds a step's graph among them."""

    keys: tuple[GraphKey, ...]

    def find(self, shape: StepShape) -> Decision:
        """The smallest graph that ``shape`` fits, or why there is none."""


class _DecodeGraphs:
    """FULL graphs of steps in which every request has one token: one for each size and bucket."""

    def __init__(self, sizes: tuple[int, ...], buckets: tuple[int, ...], num_kv_splits: Callable[[int, int], int]):
        self._sizes, self._buckets = sizes, buckets
        self._table = {
            (size, bucket): GraphKey(
                kind=GraphKind.FULL,
                num_padded_tokens=size * DECODE_QUERY_LEN,
                num_padded_requests=size,
                uniform_query_len=DECODE_QUERY_LEN,
                max_seq_len=bucket,
                num_kv_splits=num_kv_splits(size, bucket),
            )
            for size in sizes
            for bucket in buckets
        }
        self.keys = tuple(self._table.values())

    def find(self, shape: StepShape) -> Decision:
        if not shape.is_decode:
            tokens, requests = shape.num_tokens, shape.num_requests
            return _eager(f"{tokens} tokens of {requests} request(s) are no decode step, and only those are captured")
        size = _smallest(self._sizes, shape.num_requests)
        if size is None:
            return _eager(
                f"{shape.num_requests} requests are above the largest captured decode size, {self._sizes[-1]}"
            )
        bucket = _smallest(self._buckets, shape.max_seq_len)
        if bucket is None:
            return _too_long(shape, self._buckets)
        return Decision(self._table[size, bucket], "")


class _MixedGraphs:
    """FULL graphs of any step: one for each token size and bucket that some step can need."""

    def __init__(
        self, sizes: tuple[int, ...], buckets: tuple[int, ...], max_num_seqs: int, largest_decode_size: int
    ) -> None:
        self._sizes, self._buckets = sizes, buckets
        self._max_num_seqs, self._largest_decode_size = max_num_seqs, largest_decode_size
        self._table = {
            (size, bucket): GraphKey(
                kind=GraphKind.FULL,
                num_padded_tokens=size,
                num_padded_requests=max_num_seqs,
                uniform_query_len=None,
                max_seq_len=bucket,
                num_kv_splits=1,
            )
            for smaller, size in pairwise((0, *sizes))
            for bucket in buckets
            if self._is_needed(smaller, size, bucket)
        }
        self.keys = tuple(self._table.values())

    def _is_needed(self, smaller: int, size: int, bucket: int) -> bool:
        """Whether a step of more than ``smaller`` and at most ``size`` tokens can come here with this bucket.

        A step that is no decode has two tokens at least, and its requests have no more tokens than the bucket.
        A decode step comes here when it has too many requests for the decode graphs.
        """
        if bucket > 1 and max(smaller + 1, 2) <= min(size, self._max_num_seqs * bucket):
            return True
        return max(smaller, self._largest_decode_size) < min(size, self._max_num_seqs)

    def find(self, shape: StepShape) -> Decision:
        size = _smallest(self._sizes, shape.num_tokens)
        if size is None:
            return _too_many_tokens(shape, self._sizes)
        bucket = _smallest(self._buckets, shape.max_seq_len)
        if bucket is None:
            return _too_long(shape, self._buckets)
        return Decision(self._table[size, bucket], "")


class _PiecewiseGraphs:
    """PIECEWISE graphs of any step: one for each token size, whatever attention does in between."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes
        self._table = {
            size: GraphKey(
                kind=GraphKind.PIECEWISE,
                num_padded_tokens=size,
                num_padded_requests=0,
                uniform_query_len=None,
                max_seq_len=0,
                num_kv_splits=0,
            )
            for size in sizes
        }
        self.keys = tuple(self._table.values())

    def find(self, shape: StepShape) -> Decision:
        size = _smallest(self._sizes, shape.num_tokens)
        if size is None:
            return _too_many_tokens(shape, self._sizes)
        return Decision(self._table[size], "")


def _smallest(sizes: tuple[int, ...], needed: int) -> int | None:
    """The first of the ascending ``sizes`` that is at least ``needed``; None when all are smaller."""
    index = bisect_left(sizes, needed)
    return sizes[index] if index < len(sizes) else None


def _eager(reason: str) -> Decision:
    return Decision(None, reason)


def _too_many_tokens(shape: StepShape, sizes: tuple[int, ...]) -> Decision:
    return _eager(f"{shape.num_tokens} tokens are above the largest captured token size, {sizes[-1]}")


def _too_long(shape: StepShape, buckets: tuple[int, ...]) -> Decision:
    return _eager(f"max_seq_len {shape.max_seq_len} is above the largest captured bucket, {buckets[-1]}")


def _size_of(key: GraphKey) -> tuple[int, ...]:
    """What decides how much memory a graph needs, most important first."""
    return key.num_padded_tokens, key.num_padded_requests, key.max_seq_len, key.num_kv_splits


def _check_sizes(name: str, sizes: tuple[int, ...], mode: GraphMode) -> None:
    if not sizes:
        raise ConfigError(f"{name} is empty: mode {mode.value} captures at least one")
    if sizes[0] < 1 or any(left >= right for left, right in pairwise(sizes)):
        raise ConfigError(f"{name} is {sizes}: give positive numbers, each larger than the one before")
