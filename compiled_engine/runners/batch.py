"""What the engine hands to a runner for one step, and what it gets back."""

from __future__ import annotations

from dataclasses import dataclass, field

from compiled_engine.compile.graphs.keys import GraphKey
from compiled_engine.compile.records import StepMode
from compiled_engine.ops.sampling import SampledTokens, SamplingBatch


@dataclass(frozen=True)
class ScheduledRequest:
    """One request's share of a step.

    ``token_ids``: the tokens whose K/V this step computes (``num_scheduled_tokens`` of them), at positions
    ``num_computed_tokens, num_computed_tokens + 1, ...``.
    ``block_tables``: per cache group, the ids of the blocks that hold positions ``0 .. num_computed_tokens +
    num_scheduled_tokens - 1``, in order. Id 0, which is reserved, stands for blocks that a sliding window has left
    behind: no token of this step sees or writes them.
    ``samples``: whether the last of these tokens is followed by a new one, i.e. a row of logits is wanted.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_computed_tokens: int
    block_tables: tuple[tuple[int, ...], ...]
    samples: bool

    @property
    def num_scheduled_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def seq_len(self) -> int:
        """Tokens in the cache once this step has run."""
        return self.num_computed_tokens + len(self.token_ids)


@dataclass(frozen=True)
class ScheduledBatch:
    """One step: the requests in row order and the sampling parameters of those among them that sample.

    Row ``i`` of ``sampling`` belongs to the ``i``-th request with ``samples`` set.
    """

    requests: tuple[ScheduledRequest, ...]
    sampling: SamplingBatch

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(request.num_scheduled_tokens for request in self.requests)


@dataclass(frozen=True)
class StepFacts:
    """How one step ran, for those who watch.

    ``num_padded_tokens``: rows of activations.   ``num_padded_requests``: rows of attention's metadata, or of sampling
    where ``mode`` is "bucket".   ``epoch``: the static forward context's.   ``key``: of the graph or bucket that served
    the step; None: it ran eagerly, and ``reason`` says why where graphs were captured.
    """

    num_padded_tokens: int
    num_padded_requests: int
    mode: StepMode
    epoch: int
    key: GraphKey | str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class StepOutput:
    """Result of one step: row ``i`` belongs to the ``i``-th request of the batch with ``samples`` set.

    ``facts``, which is no part of the result, tells how the step ran; None: the runner does not tell.
    """

    sampled: SampledTokens
    facts: StepFacts | None = field(default=None, compare=False)
