"""One sequence on its way through the engine."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from compiled_engine.engine.prefix_index import PrefixBlock

_MASK64 = 2**64 - 1


class RequestStatus(Enum):
    """Where a request is: not yet run, running, set back for want of blocks, or done."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Request:
    """The state of one sequence. The scheduler owns ``status`` and the counts, the cache manager the two lists.

    arrival: number of the request in order of arrival; the scheduler serves first come, first served.
    max_output_tokens: new tokens after which the request ends with finish reason "length".
    block_ids: per cache group, the blocks held, in order of the positions they store; 0 for those that a sliding window
        has left behind.
    prefixes: the prefixes of its first full blocks, as far as they have been looked up.
    num_computed_tokens: tokens whose K/V is in the cache. Output tokens survive preemption; this falls to 0.
    num_cached_tokens: prompt tokens that were taken from the cache when the request was first admitted.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        *,
        arrival: int,
        max_output_tokens: int,
        num_cache_groups: int = 1,
    ) -> None:
        self.request_id = request_id
        self.arrival = arrival
        self.max_output_tokens = max_output_tokens
        self.num_prompt_tokens = len(prompt_token_ids)
        self.token_ids = list(prompt_token_ids)
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.prefixes: list[PrefixBlock] = []
        self.block_ids: list[list[int]] = [[] for _ in range(num_cache_groups)]

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def max_cached_tokens(self) -> int:
        """Most tokens whose K/V this request can come to hold: its last token is never computed."""
        return self.num_prompt_tokens + self.max_output_tokens - 1

    def append(self, token_id: int) -> None:
        """Add a sampled token."""
        self.token_ids.append(token_id)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, {self.num_prompt_tokens} prompt + "
            f"{self.num_output_tokens} output tokens, {self.num_computed_tokens} computed)"
        )


def derive_seed(*parts: int) -> int:
    """A 64-bit signed seed from several integers, e.g. (engine seed, request number, completion index).

    Each part is mixed in by the finaliser of SplitMix64 (Steele, Lea and Flood, 2014), which is a bijection, so two
    lists of one length that differ in one place never give the same seed.
    """
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return state - 2**64 if state >= 2**63 else state
