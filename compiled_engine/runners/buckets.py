"""The few sizes that steps are padded to, where a graph is compiled for each size before any step runs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from compiled_engine.config import EngineConfig
from compiled_engine.errors import ConfigError, RequestError

SMALLEST_TOKEN_BUCKET = 16
SMALLEST_REQUEST_BUCKET = 8


@dataclass(frozen=True)
class Buckets:
    """Sizes that steps are padded to, ascending."""

    sizes: tuple[int, ...]

    def fit(self, number: int) -> int:
        """The smallest size that holds ``number``. Raises ``RequestError`` where none does."""
        index = bisect_left(self.sizes, number)
        if index == len(self.sizes):
            raise RequestError(
                f"a step of {number} is above {self.sizes[-1]}, the largest size that is compiled: give it less, or "
                "raise max_num_batched_tokens (tokens) or max_num_seqs (rows)"
            )
        return self.sizes[index]


def padded_sizes(smallest: int, largest: int, gap: int) -> tuple[int, ...]:
    """``smallest``, twice that, and so on while sizes lie at most ``gap`` apart, then steps of ``gap``; 0: no steps.

    The last is ``largest``, and none is above it. A number above ``smallest`` is thus padded to less than twice itself,
    and by less than ``gap``. The idea is that of vLLM's TPU runner (VLLM_TPU_BUCKET_PADDING_GAP).
    Raises ``ConfigError`` for sizes below 1 and a gap below 0.
    """
    if smallest < 1 or largest < 1 or gap < 0:
        raise ConfigError(
            f"sizes from {smallest} to {largest} in steps of {gap}: sizes are at least 1, and steps at least 0"
        )
    sizes = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size += min(size, gap) if gap else size
    return (*sizes, largest)


def token_buckets(config: EngineConfig) -> Buckets:
    """Numbers of tokens that steps are padded to; the largest is ``max_num_batched_tokens``.

    Raises ``ConfigError`` for one of ``config.token_buckets`` that is larger.
    """
    largest = config.max_num_batched_tokens
    if config.token_buckets is None:
        return Buckets(padded_sizes(SMALLEST_TOKEN_BUCKET, largest, config.bucket_gap))
    return _chosen("token_buckets", config.token_buckets, largest, "max_num_batched_tokens")


def request_buckets(config: EngineConfig) -> Buckets:
    """Numbers of sampled rows that steps are padded to.

    The largest is ``max_num_seqs``, or ``max_num_batched_tokens`` where that is less: a row takes a token.
    Raises ``ConfigError`` for one of ``config.request_buckets`` that is larger.
    """
    largest = min(config.max_num_seqs, config.max_num_batched_tokens)
    if config.request_buckets is None:
        return Buckets(padded_sizes(SMALLEST_REQUEST_BUCKET, largest, 0))
    setting = "max_num_seqs" if largest == config.max_num_seqs else "max_num_batched_tokens"
    return _chosen("request_buckets", config.request_buckets, largest, setting)


def _chosen(name: str, sizes: Iterable[int], largest: int, setting: str) -> Buckets:
    for size in sizes:
        if size > largest:
            raise ConfigError(
                f"{size} of {name} is above {setting}, which is {largest}, so no step can need it: leave it out, or "
                f"raise {setting}"
            )
    return Buckets(tuple(sorted({*sizes, largest})))
