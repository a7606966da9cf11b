"""What changes from step to step: the frozen forward context that attention layers read while a step runs."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum

import torch

from compiled_engine.errors import ForwardContextError

from .static_context import StaticForwardContext


class StepKind(str, Enum):
    """Why a step runs. PROFILE: to measure, no caches exist yet. WARMUP, CAPTURE: on dummy rows. REAL: for requests."""

    PROFILE = "profile"
    WARMUP = "warmup"
    CAPTURE = "capture"
    REAL = "real"


@dataclass(frozen=True)
class AttentionMetadata:
    """Where the queries and the cached tokens of a step's requests are; one per cache group.

    query_start_loc: int32 [num_requests + 1], first token row of each request.
    seq_lens: int32 [num_requests], tokens in the cache once this step's are written.
    block_table: int32 [num_requests, max_blocks], block ids in order of position; unused columns are 0.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor


@dataclass(frozen=True)
class ForwardContext:
    """One step.

    ``attention_metadata`` and ``slot_mapping`` hold one entry per cache group; a slot mapping is int64 [num_tokens],
    the slot (block id * block_size + offset) where each token's K/V is written.
    ``num_tokens`` are real, ``num_padded_tokens`` are the rows the graph sees. ``graph_key`` names a captured graph;
    ``captures_attention``: whether attention may be captured with it.
    """

    static_context: StaticForwardContext
    attention_metadata: tuple[AttentionMetadata, ...]
    slot_mapping: tuple[torch.Tensor, ...]
    num_tokens: int
    num_padded_tokens: int
    step_kind: StepKind = StepKind.REAL
    graph_key: Hashable | None = None
    captures_attention: bool = True


_CURRENT: ContextVar[ForwardContext | None] = ContextVar("compiled_engine_forward_context", default=None)


def get_forward_context() -> ForwardContext:
    """The context of the running step. Raises ``ForwardContextError`` outside ``set_forward_context``."""
    context = _CURRENT.get()
    if context is None:
        raise ForwardContextError("no forward context is set: run the model inside `with set_forward_context(ctx):`")
    return context


@contextmanager
def set_forward_context(context: ForwardContext, *, nested: bool = False) -> Iterator[ForwardContext]:
    """Make ``context`` the running step's; the former one is restored on leaving, by exception too.

    A context inside another is a mistake (``ForwardContextError``) unless ``nested`` is set.
    """
    if _CURRENT.get() is not None and not nested:
        raise ForwardContextError("a forward context is already set: leave it first, or pass nested=True")
    token = _CURRENT.set(context)
    try:
        yield context
    finally:
        _CURRENT.reset(token)
