"""The CPU runner: any number of tokens in a step, no padding but from one row to two."""

from __future__ import annotations

import logging
import os

import torch

from compiled_engine.compile.counters import CompileCounters
from compiled_engine.compile.model import CompiledModel
from compiled_engine.compile.pieces import create_piece_compiler
from compiled_engine.compile.pipeline import compile_pieces, plan_model
from compiled_engine.compile.weights import materialize
from compiled_engine.config import EngineConfig
from compiled_engine.context import (
    ForwardContext,
    StaticForwardContext,
    StepKind,
    bind_kv_cache,
    set_forward_context,
    token_slots,
)
from compiled_engine.errors import ContextStateError, RequestError
from compiled_engine.models import Checkpoint, ModelFiles, build_definition, resolve_dtype, resolve_max_model_len
from compiled_engine.ops.cpu import CpuAttention
from compiled_engine.ops.sampling import sample
from compiled_engine.runners.base import CacheGroupLimits, Runner, RunnerLimits
from compiled_engine.runners.batch import ScheduledBatch, ScheduledRequest, StepOutput
from compiled_engine.runners.caches import allocate_cache_groups, register_attention_layers
from compiled_engine.runners.inputs import StepInputs, build_step_inputs
from compiled_engine.runners.loading import DefinitionWeights
from compiled_engine.runners.memory import available_memory, size_cache_groups

logger = logging.getLogger(__name__)

# Size 1 would be another graph (compilers specialise it), so one row is padded to two.
_MIN_ROWS = 2


class CpuRunner(Runner):
    """One model on the CPU. Holds no list of caches: attention layers own them, ``static_context`` names the layers.

    Constructing it does everything up to being ready: read the definition, capture and compile, read the weights, size,
    allocate and bind the caches, warm up. Raises ``ModelError``, ``ConfigError``, ``CaptureError`` or
    ``OutOfMemoryError``.
    """

    def __init__(self, config: EngineConfig, files: ModelFiles) -> None:
        torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
        self.config = config
        self.dtype = resolve_dtype(config.dtype, files)
        self.counters = CompileCounters()
        self._backend = CpuAttention(self.dtype)
        self.static_context = StaticForwardContext()
        with Checkpoint(files) as checkpoint:
            self.model, max_model_len = self._load(files, checkpoint)
        cache_groups = size_cache_groups(config, self.static_context, max_model_len, available_memory())
        self._limits = RunnerLimits(
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
            cache_groups=cache_groups,
            vocab_size=self.model.plan.vocab_size,
        )
        logger.info("KV cache: %s", ", ".join(_describe_group(group, config.block_size) for group in cache_groups))
        bind_kv_cache(allocate_cache_groups(self.static_context, cache_groups), self.static_context)
        self._warm_up()

    @property
    def limits(self) -> RunnerLimits:
        return self._limits

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """See ``Runner.execute``. Raises ``RequestError`` for a batch of too many tokens."""
        if batch.num_scheduled_tokens > self._limits.max_num_batched_tokens:
            raise RequestError(
                f"the batch has {batch.num_scheduled_tokens} tokens, max_num_batched_tokens is "
                f"{self._limits.max_num_batched_tokens}"
            )
        inputs = build_step_inputs(batch.requests, self.config.block_size, _MIN_ROWS)
        logits = self._forward(inputs, StepKind.REAL)
        return StepOutput(sample(logits, batch.sampling))

    def close(self) -> None:
        """Drop caches and weights. Idempotent."""
        self.static_context.close()
        self.model = None  # type: ignore[assignment]

    def _load(self, files: ModelFiles, checkpoint: Checkpoint) -> tuple[CompiledModel, int]:
        """Definition, plan, pieces and weights, in the order that keeps the peak of memory low."""
        definition = build_definition(files, self.dtype, checkpoint)
        max_model_len = resolve_max_model_len(definition.config, self.config.max_model_len)
        logger.info("capturing %s, %d layers", type(definition.module).__name__, len(definition.layers))
        planned = plan_model(definition.module, definition.layers, torch.device("cpu"), self.counters)
        compiler = create_piece_compiler(self.config.piece_compiler)
        pieces = compile_pieces(planned, compiler, self.counters, _log_progress)
        logger.info("reading %.0f MB of weights", checkpoint.num_bytes / 1e6)
        weights = materialize(planned.plan.weights, DefinitionWeights(definition, checkpoint))
        register_attention_layers(
            self.static_context, planned.plan.layers, self.config.block_size, self.dtype, self._backend
        )
        return CompiledModel(planned.plan, pieces, weights, self.static_context), max_model_len

    def _forward(self, inputs: StepInputs, step_kind: StepKind) -> torch.Tensor:
        """Logits [num_logits, vocab_size] of the rows that sample."""
        if self.model is None:
            raise ContextStateError("the runner is closed")
        metadata = tuple(
            self._backend.build_metadata(
                inputs.query_start_loc,
                inputs.seq_lens,
                block_table,
                self.config.block_size,
                (group.sliding_window,),
            )
            for group, block_table in zip(self.static_context.groups, inputs.block_tables, strict=True)
        )
        context = ForwardContext(
            static_context=self.static_context,
            attention_metadata=metadata,
            slot_mapping=inputs.slot_mappings,
            num_tokens=inputs.num_tokens,
            num_padded_tokens=inputs.num_padded_tokens,
            step_kind=step_kind,
        )
        with set_forward_context(context):
            hidden_states = self.model.hidden_states(inputs.input_ids, inputs.positions)
        if inputs.num_logits == 0:
            return torch.empty(0, self._limits.vocab_size)
        return self.model.logits(hidden_states, inputs.logits_indices)[: inputs.num_logits]

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Run the smallest and the largest step on padding rows, checking every tensor against the plan."""
        self.model.verify(True)
        tables = ((0,),) * len(self.static_context.groups)
        for num_tokens in {_MIN_ROWS, self._limits.max_num_batched_tokens}:
            dummy = [ScheduledRequest(f"warm-up {row}", (0,), 0, tables, row < _MIN_ROWS) for row in range(num_tokens)]
            self._forward(build_step_inputs(dummy, self.config.block_size, _MIN_ROWS), StepKind.WARMUP)
        self.model.verify(False)
        for layer in self.static_context.values():
            # Whatever the dummy rows left in the reserved block must not outlive the warm-up (vllm#57156).
            token_slots(layer.kv_cache)[: self.config.block_size].zero_()


def _log_progress(what: str, done: int, total: int) -> None:
    if done < total:
        logger.info("%s: %d of %d", what, done + 1, total)


def _describe_group(group: CacheGroupLimits, block_size: int) -> str:
    kind = "" if group.sliding_window is None else f" (sliding window {group.sliding_window})"
    return f"{(group.num_blocks - 1) * block_size} tokens{kind}"
