"""What is audited: a runner, seen the same way whatever backend it is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from compiled_engine.compile.graphs.backend import GraphBackend
from compiled_engine.compile.graphs.bindings import Role
from compiled_engine.compile.graphs.keys import GraphKey, StepShape
from compiled_engine.compile.model import CompiledModel
from compiled_engine.compile.plan import GraphPlan
from compiled_engine.config import EngineConfig
from compiled_engine.context import StaticForwardContext, declared_specs, token_slots
from compiled_engine.models import ModelFiles
from compiled_engine.runners.base import Runner
from compiled_engine.runners.batch import ScheduledBatch
from compiled_engine.runners.cpu import CpuRunner
from compiled_engine.runners.gpu import GpuRunner
from compiled_engine.runners.tpu import TpuRunner

AuditableRunner = CpuRunner | GpuRunner | TpuRunner


@dataclass(frozen=True)
class Subject:
    """The runner under audit, and the model that it is said to run."""

    runner: AuditableRunner
    files: ModelFiles

    @classmethod
    def of(cls, runner: Runner, files: ModelFiles) -> Subject:
        """The subject for ``runner``. Raises ``TypeError`` for a runner of another kind than the engine's own."""
        if not isinstance(runner, CpuRunner | GpuRunner | TpuRunner):
            raise TypeError(f"a {type(runner).__name__} cannot be audited: give a CpuRunner, GpuRunner or TpuRunner")
        return cls(runner, files)

    @property
    def config(self) -> EngineConfig:
        return self.runner.config

    @property
    def context(self) -> StaticForwardContext:
        return self.runner.static_context

    @property
    def block_size(self) -> int:
        return self.runner.limits.block_size

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Per cache group, the sliding window of its layers."""
        return tuple(group.sliding_window for group in self.runner.limits.cache_groups)

    @property
    def model(self) -> CompiledModel | None:
        """What runs the plan; None on a TPU, where XLA compiles the model itself."""
        if isinstance(self.runner, GpuRunner):
            return None if self.runner.graphed is None else self.runner.graphed.model
        return self.runner.model if isinstance(self.runner, CpuRunner) else None

    @property
    def plan(self) -> GraphPlan | None:
        return None if self.model is None else self.model.plan

    @property
    def gpu(self) -> GpuRunner | None:
        """The runner, if it is the one with captured graphs and staged steps."""
        return self.runner if isinstance(self.runner, GpuRunner) else None

    @property
    def backend(self) -> GraphBackend | None:
        """What captured and replays; None where nothing is captured."""
        return None if self.gpu is None or self.gpu.graphed is None else self.gpu.graphed.backend

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """The graphs that were declared to be captured."""
        return () if self.gpu is None else self.gpu.dispatcher.keys()

    def key_of(self, batch: ScheduledBatch) -> GraphKey | None:
        """The graph that serves ``batch``, as the runner decides."""
        return None if self.gpu is None else self.gpu.decide(shape_of_batch(batch)).key

    def slots(self) -> dict[str, torch.Tensor]:
        """By name, for each layer that owns a cache: [num_slots, 2, num_kv_heads, head_dim]."""
        specs = declared_specs(self.context)
        return {
            name: token_slots(self.context[name].kv_cache) for name, spec in specs.items() if spec.shares_with is None
        }

    def group_of(self, layer: str) -> int:
        """The cache group of ``layer``."""
        return self.context[layer].group

    def tensors(self, num_rows: int) -> Mapping[tuple[Role, str], torch.Tensor]:
        """Everything that a graph of ``num_rows`` rows may use, as it is now, by role and name."""
        model = self.model
        if model is None:
            return {}
        found = {(Role.WEIGHT, name): tensor for name, tensor in model.weights.items()}
        found |= {(Role.CACHE, name): layer.kv_cache for name, layer in self.context.items() if layer.is_bound}
        if self.gpu is None:
            return found
        buffers = self.gpu.buffers
        found |= {(Role.INPUT, name): getattr(buffers, name).tensor for name in _INPUTS}
        found |= {(Role.METADATA, name): getattr(buffers, name).tensor for name in ("query_start_loc", "seq_lens")}
        for group, (table, slots) in enumerate(zip(buffers.block_tables, buffers.slot_mappings, strict=True)):
            found[Role.METADATA, f"block_table of group {group}"] = table.tensor
            found[Role.METADATA, f"slot_mapping of group {group}"] = slots.tensor
        workspaces = {**self.gpu.attention.workspaces(), **self.gpu.sampler.workspaces(num_rows)}
        found |= {(Role.WORKSPACE, name): tensor for name, tensor in workspaces.items()}
        return found | {(Role.OUTPUT, name): tensor for name, tensor in self.gpu.sampler.outputs(num_rows).items()}


_INPUTS = ("input_ids", "positions", "logits_indices")


def shape_of_batch(batch: ScheduledBatch) -> StepShape:
    """The sizes of the step that ``batch`` asks for."""
    lengths = [request.num_scheduled_tokens for request in batch.requests]
    return StepShape(
        num_tokens=sum(lengths),
        num_requests=len(lengths),
        max_query_len=max(lengths),
        max_seq_len=max(request.seq_len for request in batch.requests),
        is_uniform=len(set(lengths)) == 1,
    )
