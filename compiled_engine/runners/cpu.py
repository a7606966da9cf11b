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
    KVCacheSpec,
    StaticForwardContext,
    StepKind,
    allocate_kv_caches,
    bind_kv_cache,
    set_forward_context,
    token_slots,
)
from compiled_engine.errors import ContextStateError, RequestError
from compiled_engine.models import Checkpoint, ModelFiles, build_definition, resolve_dtype, resolve_max_model_len
from compiled_engine.ops.attention import PagedAttention
from compiled_engine.ops.cpu import CpuAttention
from compiled_engine.ops.sampling import sample
from compiled_engine.runners.base import Runner, RunnerLimits
from compiled_engine.runners.batch import ScheduledBatch, ScheduledRequest, StepOutput
from compiled_engine.runners.inputs import StepInputs, build_step_inputs
from compiled_engine.runners.loading import DefinitionWeights
from compiled_engine.runners.memory import available_memory, num_cache_blocks

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
        self.static_context = StaticForwardContext()
        with Checkpoint(files) as checkpoint:
            self.model, max_model_len = self._load(files, checkpoint)
        self._windows = tuple({layer.sliding_window for layer in self.model.plan.layers})
        num_blocks = num_cache_blocks(config, self.cache_specs().values(), max_model_len, available_memory())
        self._limits = RunnerLimits(
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
            num_blocks=num_blocks,
            vocab_size=self.model.plan.vocab_size,
        )
        bind_kv_cache(allocate_kv_caches(self.cache_specs(), num_blocks), self.static_context)
        self._warm_up()

    @property
    def limits(self) -> RunnerLimits:
        return self._limits

    def cache_specs(self) -> dict[str, KVCacheSpec]:
        """What every attention layer wants of its cache, by layer name."""
        return {name: layer.spec for name, layer in self.static_context.items() if layer.spec is not None}

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """See ``Runner.execute``. Raises ``RequestError`` for a batch beyond the limits."""
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
        logger.info("capturing %s", type(definition.module).__name__)
        planned = plan_model(definition.module, definition.layers, torch.device("cpu"), self.counters)
        compiler = create_piece_compiler(self.config.piece_compiler)
        pieces = compile_pieces(planned, compiler, self.counters, _log_progress)
        weights = materialize(planned.plan.weights, DefinitionWeights(definition, checkpoint))
        backend = CpuAttention(self.dtype)
        for spec in planned.plan.layers:
            layer = PagedAttention(spec, spec.cache_spec(self.config.block_size, self.dtype), backend)
            self.static_context.register(spec.layer_name, layer)
        self.static_context.seal()
        return CompiledModel(planned.plan, pieces, weights, self.static_context), max_model_len

    def _forward(self, inputs: StepInputs, step_kind: StepKind) -> torch.Tensor:
        """Logits [num_logits, vocab_size] of the rows that sample."""
        if self.model is None:
            raise ContextStateError("the runner is closed")
        layer = next(iter(self.static_context.values()))
        if not isinstance(layer, PagedAttention):
            raise ContextStateError(f"layer {layer.layer_name!r} is no PagedAttention")
        metadata = layer.backend.build_metadata(
            inputs.query_start_loc, inputs.seq_lens, inputs.block_table, self.config.block_size, self._windows
        )
        context = ForwardContext(
            static_context=self.static_context,
            attention_metadata=(metadata,),
            slot_mapping=(inputs.slot_mapping,),
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
        self.model.verify_next(True)
        for num_tokens in {_MIN_ROWS, self._limits.max_num_batched_tokens}:
            dummy = [ScheduledRequest(f"warm-up {row}", (0,), 0, ((0,),), row < _MIN_ROWS) for row in range(num_tokens)]
            self._forward(build_step_inputs(dummy, self.config.block_size, _MIN_ROWS), StepKind.WARMUP)
        self.model.verify_next(False)
        for layer in self.static_context.values():
            # Whatever the dummy rows left in the reserved block must not outlive the warm-up (vllm#57156).
            token_slots(layer.kv_cache)[: self.config.block_size].zero_()


def _log_progress(what: str, done: int, total: int) -> None:
    logger.info("%s: %d of %d", what, done, total)
