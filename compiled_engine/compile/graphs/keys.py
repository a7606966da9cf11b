"""What a captured graph is for: the shape of a step, and the key of the graph that may serve it.

A captured graph repeats its kernel launches with the very Python values that they had at capture. Two steps may share
a graph only when all those values are the same, so the key holds every one of them and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class GraphMode(str, Enum):
    """Which graphs the user asks for.

    A decode step is one in which every request has one token; every other step is mixed.
    """

    NONE = "none"
    """Every step runs eagerly."""
    FULL_DECODE_ONLY = "full_decode_only"
    """Decode steps run in graphs with attention inside, mixed steps eagerly."""
    PIECEWISE = "piecewise"
    """All steps run in graphs of the pieces between attentions."""
    FULL = "full"
    """All steps run in graphs with attention inside."""
    FULL_AND_PIECEWISE = "full_and_piecewise"
    """Decode steps run in graphs with attention inside, all other steps piece by piece."""


class GraphKind(str, Enum):
    """What one captured graph holds."""

    FULL = "full"
    """The whole step, attention inside."""
    PIECEWISE = "piecewise"
    """The pieces between attentions; attention runs eagerly between them."""


@dataclass(frozen=True)
class StepShape:
    """The sizes of a real step, before padding. Raises ``ValueError`` when no batch can have them.

    ``num_tokens``: tokens of all requests together. ``num_requests``: requests in the step, each with at least one
    token. ``max_query_len``: tokens of the request that has most in this step. ``max_seq_len``: tokens, cached ones and
    this step's, of the longest request. ``is_uniform``: every request has ``max_query_len`` tokens.
    """

    num_tokens: int
    num_requests: int
    max_query_len: int
    max_seq_len: int
    is_uniform: bool

    def __post_init__(self) -> None:
        for name in ("num_tokens", "num_requests", "max_query_len", "max_seq_len"):
            _at_least(1, name, getattr(self, name))
        tokens, requests, longest = self.num_tokens, self.num_requests, self.max_query_len
        if tokens < requests:
            raise ValueError(f"num_tokens is {tokens} for {requests} requests: every request has at least one token")
        if not longest <= tokens - (requests - 1) or tokens > requests * longest:
            raise ValueError(f"max_query_len is {longest}: {requests} requests cannot share {tokens} tokens like that")
        if longest > self.max_seq_len:
            raise ValueError(f"max_query_len is {longest}, above max_seq_len {self.max_seq_len}, which includes it")
        if self.is_uniform is not (tokens == requests * longest):
            raise ValueError(
                f"is_uniform is {self.is_uniform!r}: {requests} requests have {tokens} tokens, {longest} at most each"
            )

    @property
    def is_decode(self) -> bool:
        """Every request has exactly one token."""
        return self.max_query_len == 1


@dataclass(frozen=True)
class GraphKey:
    """Every Python value that reaches a launch of a captured graph. Raises ``ValueError`` unless it is normalised.

    Normalised: what does not reach a launch has one fixed value, so that no two keys stand for the same launches.
    Attention is no part of a PIECEWISE graph, which therefore has ``num_padded_requests`` 0, ``uniform_query_len``
    None, ``max_seq_len`` 0 and ``num_kv_splits`` 0.
    """

    kind: GraphKind
    """Whether attention's launches are in the graph at all."""
    num_padded_tokens: int
    """Rows of every activation, in tokens: the grid of every kernel outside attention, and of the cache write."""
    num_padded_requests: int
    """Rows of the block table and of the sequence lengths, in requests: an axis of attention's grid."""
    uniform_query_len: int | None
    """Tokens of every request, padded ones too; None when requests differ (a mixed step). It chooses the kernel."""
    max_seq_len: int
    """Most tokens, cached and new, that a request may have: attention's loops and its workspace are made for it."""
    num_kv_splits: int
    """Parts into which attention cuts each request's cache: an axis of the grid. 1: the kernel that does not split."""

    def __post_init__(self) -> None:
        if not isinstance(self.kind, GraphKind):
            raise ValueError(f"kind is {self.kind!r}: give a GraphKind")
        _at_least(1, "num_padded_tokens", self.num_padded_tokens)
        if self.kind is GraphKind.PIECEWISE:
            self._check_piecewise()
        else:
            self._check_full()

    def _check_piecewise(self) -> None:
        inside = (self.num_padded_requests, self.uniform_query_len, self.max_seq_len, self.num_kv_splits)
        if inside != (0, None, 0, 0):
            raise ValueError(
                "a PIECEWISE key has no attention: num_padded_requests, uniform_query_len, max_seq_len and "
                f"num_kv_splits are {inside}, give (0, None, 0, 0)"
            )

    def _check_full(self) -> None:
        for name in ("num_padded_requests", "max_seq_len", "num_kv_splits"):
            _at_least(1, name, getattr(self, name))
        if self.uniform_query_len is None:
            if self.num_kv_splits != 1:
                raise ValueError(f"num_kv_splits is {self.num_kv_splits}: a mixed key does not split, give 1")
            return
        _at_least(1, "uniform_query_len", self.uniform_query_len)
        if self.num_padded_tokens != self.num_padded_requests * self.uniform_query_len:
            raise ValueError(
                f"num_padded_tokens is {self.num_padded_tokens}: {self.num_padded_requests} requests of "
                f"{self.uniform_query_len} tokens have {self.num_padded_requests * self.uniform_query_len}"
            )
        if self.uniform_query_len > self.max_seq_len:
            raise ValueError(f"uniform_query_len is {self.uniform_query_len}, above max_seq_len {self.max_seq_len}")

    @property
    def max_query_len(self) -> int:
        """Most tokens of one request that launches may assume; 0 for PIECEWISE. It follows from the fields."""
        if self.uniform_query_len is not None:
            return self.uniform_query_len
        return min(self.num_padded_tokens, self.max_seq_len)

    def __str__(self) -> str:
        """A short name for people, such as ``full decode 8 requests, seq_len <= 4096, 8 KV splits``."""
        if self.kind is GraphKind.PIECEWISE:
            return f"piecewise {_count(self.num_padded_tokens, 'token')}"
        requests = _count(self.num_padded_requests, "request")
        length = f"seq_len <= {self.max_seq_len}"
        if self.uniform_query_len is None:
            return f"full mixed {_count(self.num_padded_tokens, 'token')}, {requests}, {length}"
        each = "" if self.uniform_query_len == 1 else f" of {self.uniform_query_len} tokens"
        return f"full decode {requests}{each}, {length}, {_count(self.num_kv_splits, 'KV split')}"


def _at_least(least: int, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}: give a whole number of at least {least}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
