"""What every backend's runner is to the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from compiled_engine.runners.batch import ScheduledBatch, StepOutput


@dataclass(frozen=True)
class CacheGroupLimits:
    """Blocks of one cache group, block 0, which is reserved for padding, included. Groups do not share blocks.

    ``sliding_window``: positions that a query of this group's layers sees, its own included; None: all.
    """

    num_blocks: int
    sliding_window: int | None = None


@dataclass(frozen=True)
class RunnerLimits:
    """What a runner that is ready can hold. ``cache_groups`` are in the order of ``ScheduledRequest.block_tables``."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    cache_groups: tuple[CacheGroupLimits, ...]
    vocab_size: int


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

    @abstractmethod
    def close(self) -> None:
        """Release caches and weights. Idempotent."""
