"""What every backend's runner is to the engine."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from compiled_engine.compile.records import ModelRecord, RunnerRecord
from compiled_engine.config import EngineConfig
from compiled_engine.errors import RequestError
from compiled_engine.runners.batch import ScheduledBatch, StepOutput

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheGroupLimits:
    """Blocks of one cache group, block 0, which is reserved for padding, included. Groups do not share blocks.

    ``sliding_window``: positions that a query of this group's layers sees, its own included; None: all.
    """

    num_blocks: int
    sliding_window: int | None = None


def describe_cache_groups(groups: Sequence[CacheGroupLimits], block_size: int) -> str:
    """How many tokens fit, group by group, for the log."""
    return ", ".join(
        f"{(group.num_blocks - 1) * block_size} tokens"
        + ("" if group.sliding_window is None else f" (sliding window {group.sliding_window})")
        for group in groups
    )


@dataclass(frozen=True)
class RunnerLimits:
    """What a runner that is ready can hold. ``cache_groups`` are in the order of ``ScheduledRequest.block_tables``."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    cache_groups: tuple[CacheGroupLimits, ...]
    vocab_size: int

    @classmethod
    def of(
        cls, config: EngineConfig, max_model_len: int, cache_groups: tuple[CacheGroupLimits, ...], vocab_size: int
    ) -> RunnerLimits:
        """The limits that ``config`` sets, with what was found out about the model and the memory."""
        return cls(
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
            cache_groups=cache_groups,
            vocab_size=vocab_size,
        )

    def check_tokens(self, batch: ScheduledBatch) -> None:
        """Raise ``RequestError`` for a batch of more than ``max_num_batched_tokens`` tokens."""
        if batch.num_scheduled_tokens > self.max_num_batched_tokens:
            raise RequestError(
                f"the batch has {batch.num_scheduled_tokens} tokens, max_num_batched_tokens is "
                f"{self.max_num_batched_tokens}"
            )


def log_progress(what: str, done: int, total: int) -> None:
    """Progress through the log: a line for each step, which carries ``progress`` for handlers that draw a bar."""
    if done < total:
        logger.info("%s: %d of %d", what, done + 1, total, extra={"progress": (what, done, total)})


class Runner(ABC):
    """One model on one backend, ready to run steps: loaded, compiled, caches bound, warmed up.

    A runner knows devices and token ids; it knows no text and decides nothing about which request runs.
    """

    @property
    @abstractmethod
    def limits(self) -> RunnerLimits:
        """What fits, for the scheduler and for checks at the door."""

    @abstractmethod
    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Run one step: compute the K/V of every scheduled token and sample for the rows that ask for it."""

    def describe(self) -> RunnerRecord:
        """Plan, caches, weights, graphs and memory of a runner that is ready.

        Here of one that tells no more than its limits.
        """
        return RunnerRecord(ModelRecord(None, "unknown", self.limits.vocab_size, 0))

    @abstractmethod
    def close(self) -> None:
        """Release caches and weights. Idempotent."""
