"""One step as the audit sees it: what was scheduled, what attention was given, what came out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from compiled_engine.compile.graphs.keys import GraphKey
from compiled_engine.errors import CompiledEngineError
from compiled_engine.runners.batch import ScheduledBatch, StepOutput
from compiled_engine_debug.audit.expected import ExpectedStep


@dataclass(frozen=True)
class AttentionCall:
    """One attention launch: its own tensors, as they are now, and copies of what is overwritten later.

    ``layer``: the name under which the plan runs it. ``query``, ``out``: [num_padded_tokens, num_heads, head_dim].
    ``key``, ``value``: copies, [num_padded_tokens, num_kv_heads, head_dim]; None for a layer that writes no cache.
    ``kv_cache``: the very tensor. ``arrays``: copies of slot mapping and metadata, by the names of ``ExpectedStep``.
    ``block_table``: a copy, [num_requests, max_blocks].
    """

    layer: str
    group: int
    query: torch.Tensor
    key: torch.Tensor | None
    value: torch.Tensor | None
    out: torch.Tensor
    kv_cache: torch.Tensor
    arrays: Mapping[str, torch.Tensor]
    block_table: torch.Tensor

    @property
    def slots(self) -> torch.Tensor:
        """int64 [num_padded_tokens]."""
        return self.arrays[f"slot_mapping of group {self.group}"]


@dataclass
class Step:
    """A step that runs or has run. ``calls`` are attention's launches in order, as far as they can be seen.

    ``inputs``: what the model was given, by name, where that is not in a runner's buffers. ``logits``: of the rows that
    sample, [num_rows, vocab_size]. ``error``: what ended the step, if anything did.
    """

    index: int
    batch: ScheduledBatch
    key: GraphKey | None
    expected: ExpectedStep
    calls: list[AttentionCall] = field(default_factory=list)
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    logits: torch.Tensor | None = None
    output: StepOutput | None = None
    error: CompiledEngineError | None = None
