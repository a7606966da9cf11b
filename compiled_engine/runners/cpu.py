"""The CPU runner: any number of tokens in a step, no padding."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import torch

from compiled_engine.compile.counters import CompileCounters
from compiled_engine.compile.ledger import Ledger
from compiled_engine.compile.records import RunnerRecord
from compiled_engine.compile.seal import CompileSeal
from compiled_engine.config import EngineConfig
from compiled_engine.context import (
    ForwardContext,
    StaticForwardContext,
    StepKind,
    set_forward_context,
)
from compiled_engine.errors import ContextStateError
from compiled_engine.models import ModelFiles, resolve_dtype, resolve_max_model_len
from compiled_engine.ops.attention import PagedAttention
from compiled_engine.ops.cpu import CpuAttention
from compiled_engine.ops.cpu.build import load_kernels
from compiled_engine.ops.cpu.sampling import CpuSampler
from compiled_engine.ops.cpu.threads import CpuThreads
from compiled_engine.runners.base import Runner, RunnerLimits, describe_cache_groups, log_progress
from compiled_engine.runners.batch import ScheduledBatch, ScheduledRequest, StepFacts, StepOutput
from compiled_engine.runners.caches import bind_new_caches, register_attention_layers, scrub_reserved_block
from compiled_engine.runners.description import cache_records, memory_record, model_record, plan_weight_records
from compiled_engine.runners.inputs import StepInputs, build_step_inputs
from compiled_engine.runners.loading import load_model
from compiled_engine.runners.memory import available_memory, size_cache_groups
from compiled_engine.runners.precompile import RunnableGraphs, graphs_for, kernel_folder
from compiled_engine.threads import usable_cores

if TYPE_CHECKING:
    from compiled_engine.compile.pipeline import Progress

logger = logging.getLogger(__name__)

# Unlike each other, so that what depends on the number of tokens shows. Pieces are compiled for two rows and more,
# because compilers take a size of one for a constant, but their loops are right for one row too.
_WARM_UP_ROWS = (1, 5)


class CpuRunner(Runner):
    """One model on the CPU. Holds no list of caches: attention layers own them, ``static_context`` names the layers.

    Constructing it does everything up to being ready: find or compile the graphs, read the weights, size, allocate and
    bind the caches, warm up; ``ledger`` notes how long each takes. From then on nothing may be compiled in a step.
    Raises ``ModelError``, ``ConfigError``, ``CaptureError``, ``StoreError`` or ``OutOfMemoryError``.
    """

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        ledger: Ledger,
        progress: Progress | None = None,
        graphs: RunnableGraphs | None = None,
    ) -> None:
        """``graphs``: what to run; None: what ``graphs_for`` finds or compiles."""
        self.config = config
        self._files = files
        self.dtype = resolve_dtype(config.dtype, files, config.device_type)
        self.counters = CompileCounters()
        self.static_context = StaticForwardContext()
        self._seal = CompileSeal(config.on_compile)
        with ledger.phase("kernels"):
            kernels = load_kernels(kernel_folder(config))
            self._backend = CpuAttention(self.dtype, kernels)
            self._threads = CpuThreads(kernels, config.num_threads or usable_cores())
            self._sampler = CpuSampler(kernels)
        if graphs is None:
            graphs = graphs_for(config, files, ledger, progress or log_progress, self.counters)
        max_model_len = resolve_max_model_len(graphs.max_position, config.max_model_len)
        make_layer = partial(PagedAttention, backend=self._backend)
        register_attention_layers(self.static_context, graphs.plan.layers, config.block_size, self.dtype, make_layer)
        self.model = load_model(config, graphs, files, self.static_context, ledger)
        with ledger.phase("KV cache") as phase:
            cache_groups = size_cache_groups(config, self.static_context, max_model_len, available_memory())
            phase.num_bytes = bind_new_caches(self.static_context, cache_groups)
        logger.info("KV cache: %s", describe_cache_groups(cache_groups, config.block_size))
        self._limits = RunnerLimits.of(config, max_model_len, cache_groups, self.model.plan.vocab_size)
        with ledger.phase("warm-up"):
            self._warm_up()
        self._seal.seal()

    @property
    def limits(self) -> RunnerLimits:
        return self._limits

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """See ``Runner.execute``. Raises ``RequestError`` for a batch of too many tokens."""
        self._limits.check_tokens(batch)
        with self._seal.guard():
            inputs = build_step_inputs(batch.requests, self.config.block_size)
            logits = self._forward(inputs, StepKind.REAL)
            facts = StepFacts(inputs.num_tokens, len(batch.requests), "eager", self.static_context.epoch)
            return StepOutput(self._sampler.sample(logits, batch.sampling), facts)

    def describe(self) -> RunnerRecord:
        """See ``Runner.describe``."""
        plan = self.model.plan
        weights = plan_weight_records(plan, self.model.weights)
        caches = cache_records(self.static_context)
        return RunnerRecord(
            model=model_record(self._files, self.dtype, plan.vocab_size, len(plan.layers)),
            plan=plan,
            caches=caches,
            weights=weights,
            memory=memory_record(weights, caches),
        )

    def close(self) -> None:
        """Drop caches and weights. Idempotent."""
        self._seal.close()
        self.static_context.close()
        self.model = None  # type: ignore[assignment]

    def _forward(self, inputs: StepInputs, step_kind: StepKind) -> torch.Tensor:
        """Logits [num_logits, vocab_size] of the rows that sample."""
        if self.model is None:
            raise ContextStateError("the runner is closed")
        metadata = tuple(
            self._backend.build_metadata(inputs.query_start_loc, inputs.seq_lens, block_table)
            for block_table in inputs.block_tables
        )
        context = ForwardContext(
            static_context=self.static_context,
            attention_metadata=metadata,
            slot_mapping=inputs.slot_mappings,
            num_tokens=inputs.num_tokens,
            num_padded_tokens=inputs.num_padded_tokens,
            step_kind=step_kind,
        )
        self._threads.prepare_step(inputs.num_padded_tokens)
        with set_forward_context(context):
            hidden_states = self.model.hidden_states(inputs.input_ids, inputs.positions)
        if inputs.num_logits == 0:
            return torch.empty(0, self._limits.vocab_size)
        return self.model.logits(hidden_states, inputs.logits_indices)

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Run two small steps on padding rows, checking every tensor against the plan."""
        tables = ((0,),) * len(self.static_context.groups)
        with self.model.verified():
            for num_tokens in _WARM_UP_ROWS:
                dummy = [ScheduledRequest(f"warm-up {row}", (0,), 0, tables, row < 2) for row in range(num_tokens)]
                self._forward(build_step_inputs(dummy, self.config.block_size), StepKind.WARMUP)
        scrub_reserved_block(self.static_context, self.config.block_size)
