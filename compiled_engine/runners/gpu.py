"""The runner with captured graphs: CUDA graphs on a GPU, their emulation on the CPU.

Every step is staged in buffers that stay where they are. A step that fits a captured graph is padded to it and
replayed; any other runs eagerly from the same buffers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from compiled_engine.compile.counters import CompileCounters
from compiled_engine.compile.graphs.backend import GraphRecord
from compiled_engine.compile.graphs.dispatcher import Decision, Dispatcher
from compiled_engine.compile.graphs.graphed_model import GraphedModel, StepTensors
from compiled_engine.compile.graphs.keys import GraphKey, GraphKind, GraphMode, StepShape
from compiled_engine.compile.graphs.sizes import decode_sizes, token_sizes
from compiled_engine.compile.ledger import Ledger
from compiled_engine.compile.model import CompiledModel
from compiled_engine.compile.seal import CompileSeal
from compiled_engine.compile.weights import materialize, num_weight_bytes
from compiled_engine.config import EngineConfig
from compiled_engine.context import (
    ForwardContext,
    StaticForwardContext,
    StepKind,
    bind_kv_cache,
    set_forward_context,
    token_slots,
    unbind_kv_cache,
)
from compiled_engine.errors import ContextStateError, RequestError
from compiled_engine.models import Checkpoint, ModelFiles, resolve_dtype, resolve_max_model_len
from compiled_engine.ops.attention import AttentionLaunch
from compiled_engine.ops.sampling import SampledTokens, SamplingBatch
from compiled_engine.runners.base import CacheGroupLimits, Runner, RunnerLimits
from compiled_engine.runners.batch import ScheduledBatch, ScheduledRequest, StepOutput
from compiled_engine.runners.caches import allocate_cache_groups, register_attention_layers
from compiled_engine.runners.devices import create_device
from compiled_engine.runners.inputs import StepInputs, build_step_inputs, empty_step_inputs
from compiled_engine.runners.loading import CheckpointWeights
from compiled_engine.runners.memory import size_cache_groups, smallest_cache_groups
from compiled_engine.runners.precompile import RunnableGraphs, graphs_for
from compiled_engine.runners.step_buffers import Padding, StagedStep, StepBuffers

if TYPE_CHECKING:
    from compiled_engine.compile.pipeline import Progress

logger = logging.getLogger(__name__)


class GpuRunner(Runner):
    """One model on a device with captured graphs. Holds no list of caches: attention layers own them.

    Constructing it does everything up to being ready: find or compile the graphs of pieces, read the weights, measure
    what a step and the captured graphs take, size, allocate and bind the caches, capture; ``ledger`` notes how long
    each takes. From then on nothing may be compiled in a step. Raises ``ModelError``, ``ConfigError``,
    ``CaptureError``, ``StoreError`` or ``OutOfMemoryError``.
    """

    def __init__(
        self, config: EngineConfig, files: ModelFiles, ledger: Ledger, progress: Progress | None = None
    ) -> None:
        self.config = config
        self.dtype = resolve_dtype(config.dtype, files, config.device_type)
        self.counters = CompileCounters()
        self.static_context = StaticForwardContext()
        self._progress = progress or _log_progress
        self._seal = CompileSeal(config.on_compile)
        with ledger.phase("kernels"):
            self.device = create_device(config, self.dtype)
        graphs = graphs_for(config, files, ledger, self._progress, self.counters)
        max_model_len = resolve_max_model_len(graphs.max_position, config.max_model_len)
        self.attention = self.device.attention_backend(graphs.plan.layers)
        self.dispatcher = make_dispatcher(
            config, self.device.max_seq_len_buckets(max_model_len), self.attention.num_kv_splits
        )
        model = self._load_weights(graphs, files, ledger)
        self.graphed = GraphedModel(model, self.device.graph_backend(self.static_context))
        self.buffers = self._make_buffers(max_model_len)
        self.sampler = self.device.sampler(model.plan.vocab_size, config.max_num_seqs, model.plan.logits_dtype)
        with ledger.phase("profile") as phase:
            phase.num_bytes = working_bytes = self._profile(max_model_len)
        with ledger.phase("KV cache") as phase:
            free = max(0, self.device.free_memory() - working_bytes)
            most = self.device.default_cache_memory(free)
            cache_groups = size_cache_groups(config, self.static_context, max_model_len, free, most)
            phase.num_bytes = self._bind_caches(cache_groups)
        self._limits = RunnerLimits(
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
            cache_groups=cache_groups,
            vocab_size=model.plan.vocab_size,
        )
        with ledger.phase("capture graphs") as phase, torch.inference_mode():
            self._warm_up()
            records = self._capture(self.dispatcher.keys())
            phase.num_bytes = sum(record.num_bytes for record in records)
            phase.note = f"{len(self.dispatcher.keys())} keys, {len(records)} graphs"
            self._scrub_reserved_block()
        self._seal.seal()

    @property
    def limits(self) -> RunnerLimits:
        return self._limits

    @property
    def graph_records(self) -> tuple[GraphRecord, ...]:
        """What was captured, in order."""
        return self.graphed.backend.records

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """See ``Runner.execute``. Raises ``RequestError`` for a batch of too many tokens, and ``StaleGraph``."""
        if batch.num_scheduled_tokens > self._limits.max_num_batched_tokens:
            raise RequestError(
                f"the batch has {batch.num_scheduled_tokens} tokens, max_num_batched_tokens is "
                f"{self._limits.max_num_batched_tokens}"
            )
        if self.graphed is None:
            raise ContextStateError("the runner is closed")
        with self._seal.guard():
            inputs = build_step_inputs(batch.requests, self.config.block_size)
            decision = self.decide(inputs)
            if decision.key is not None and decision.key.kind is GraphKind.FULL:
                return StepOutput(self._replay_full(decision.key, inputs, batch.sampling))
            return StepOutput(self._run_between(decision.key, inputs, batch.sampling))

    def decide(self, inputs: StepInputs) -> Decision:
        """The graph that serves a step, or why none does."""
        query_lens = inputs.query_start_loc[1:] - inputs.query_start_loc[:-1]
        longest = int(query_lens.max())
        return self.dispatcher.dispatch(
            StepShape(
                num_tokens=inputs.num_tokens,
                num_requests=len(query_lens),
                max_query_len=longest,
                max_seq_len=int(inputs.seq_lens.max()),
                is_uniform=bool((query_lens == longest).all()),
            )
        )

    def close(self) -> None:
        """Drop graphs, caches and weights. Idempotent."""
        self._seal.close()
        if self.graphed is not None:
            self.graphed.cleanup()
        self.static_context.close()
        self.graphed = None  # type: ignore[assignment]

    def _replay_full(self, key: GraphKey, inputs: StepInputs, sampling: SamplingBatch) -> SampledTokens:
        staged = self.buffers.stage(inputs, _padding_of(key))
        self.sampler.stage(sampling, key.num_padded_requests)
        self.device.prepare_step(key.num_padded_tokens)
        self.graphed.replay_full(key, self._tensors(staged, key.num_padded_requests))
        return self.sampler.finished(sampling)

    def _run_between(self, key: GraphKey | None, inputs: StepInputs, sampling: SamplingBatch) -> SampledTokens:
        """A step with attention run eagerly: its pieces replayed, or everything eager where there is no key."""
        padding = Padding.none(inputs)
        if key is not None:
            padding = Padding(key.num_padded_tokens, padding.num_requests, padding.num_logits, False)
        staged = self.buffers.stage(inputs, padding)
        self.device.prepare_step(padding.num_tokens)
        with set_forward_context(self._context(staged, self._launch_of(inputs), StepKind.REAL, inputs.num_tokens)):
            if key is None:
                hidden_states = self.graphed.model.hidden_states(staged.input_ids, staged.positions)
            else:
                hidden_states = self.graphed.replay_pieces(key, self._tensors(staged, padding.num_logits))
        if padding.num_logits == 0:
            return SampledTokens((), ())
        return self.sampler.sample(self.graphed.model.logits(hidden_states, staged.logits_indices), sampling)

    def _launch_of(self, inputs: StepInputs) -> AttentionLaunch:
        query_lens = inputs.query_start_loc[1:] - inputs.query_start_loc[:-1]
        max_query_len, max_seq_len = int(query_lens.max()), int(inputs.seq_lens.max())
        is_decode = max_query_len == 1
        splits = self.attention.num_kv_splits(len(query_lens), max_seq_len) if is_decode else 1
        return AttentionLaunch(max_query_len, max_seq_len, splits, is_decode)

    def _context(
        self, staged: StagedStep, launch: AttentionLaunch, step_kind: StepKind, num_tokens: int
    ) -> ForwardContext:
        metadata = tuple(
            self.attention.metadata_over(staged.query_start_loc, staged.seq_lens, block_table, launch)
            for block_table in staged.block_tables
        )
        return ForwardContext(
            static_context=self.static_context,
            attention_metadata=metadata,
            slot_mapping=staged.slot_mappings,
            num_tokens=num_tokens,
            num_padded_tokens=staged.input_ids.shape[0],
            step_kind=step_kind,
        )

    def _tensors(self, staged: StagedStep, num_rows: int) -> StepTensors:
        return StepTensors(
            staged.input_ids,
            staged.positions,
            staged.logits_indices,
            metadata=staged.metadata(),
            workspaces={**self.attention.workspaces(), **self.sampler.workspaces(num_rows)},
            outputs=self.sampler.outputs(num_rows),
        )

    def _capture(self, keys: Sequence[GraphKey]) -> list[GraphRecord]:
        """Capture ``keys``, which come largest first, each on a step of padding alone."""
        records: list[GraphRecord] = []
        nothing = empty_step_inputs(len(self.static_context.groups))
        for index, key in enumerate(keys):
            self._progress("capturing graphs", index, len(keys))
            staged = self.buffers.stage(nothing, _padding_of(key))
            launch = AttentionLaunch(
                max_query_len=key.uniform_query_len or key.num_padded_tokens,
                max_seq_len=key.max_seq_len,
                num_kv_splits=max(1, key.num_kv_splits),
                is_uniform=key.uniform_query_len is not None,
            )
            context = self._context(staged, launch, StepKind.CAPTURE, 0)
            self.device.prepare_step(key.num_padded_tokens)
            rows = staged.logits_indices.shape[0]
            records += self.graphed.capture(key, self._tensors(staged, rows), context, self.sampler.finish(rows))
        self._progress("capturing graphs", len(keys), len(keys))
        return records

    def _profile(self, max_model_len: int) -> int:
        """Bytes that steps take beside weights and caches: what the largest step needs for a while, and graphs.

        Graphs of one kind share a pool, which the largest of them fills; each kind's largest is captured on caches of
        the smallest size, measured and thrown away.
        """
        with torch.inference_mode():
            self.device.reset_peak()
            self._profile_step(max_model_len)
            working_bytes = self.device.peak_above_current()
            keys = self.dispatcher.keys()
            largest = {(key.kind, key.uniform_query_len): key for key in reversed(keys)}
            if not largest:
                return working_bytes
            self._bind_caches(smallest_cache_groups(self.config, self.static_context, max_model_len))
            graph_bytes = sum(record.num_bytes for record in self._capture(tuple(largest.values())))
            self.graphed.cleanup()
            unbind_kv_cache(self.static_context)
        return working_bytes + graph_bytes

    def _profile_step(self, max_model_len: int) -> None:
        """The largest step, without caches, whose attention computes nothing."""
        config = self.config
        rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        inputs = self._dummy_inputs(rows, min(config.max_num_batched_tokens // rows, max_model_len))
        staged = self.buffers.stage(inputs, Padding.none(inputs))
        context = self._context(staged, self._launch_of(inputs), StepKind.PROFILE, inputs.num_tokens)
        self.device.prepare_step(inputs.num_tokens)
        with set_forward_context(context):
            hidden_states = self.graphed.model.hidden_states(staged.input_ids, staged.positions)
        self.graphed.model.logits(hidden_states, staged.logits_indices)

    def _warm_up(self) -> None:
        """Two small eager steps on padding, checking every tensor against the plan."""
        with self._verified():
            for num_tokens in (1, min(5, self.config.max_num_seqs)):
                inputs = self._dummy_inputs(num_tokens, 1)
                staged = self.buffers.stage(inputs, Padding.none(inputs))
                self.device.prepare_step(num_tokens)
                with set_forward_context(self._context(staged, self._launch_of(inputs), StepKind.WARMUP, num_tokens)):
                    hidden_states = self.graphed.model.hidden_states(staged.input_ids, staged.positions)
                self.graphed.model.logits(hidden_states, staged.logits_indices)

    @contextmanager
    def _verified(self) -> Iterator[None]:
        self.graphed.model.verify(True)
        try:
            yield
        finally:
            self.graphed.model.verify(False)

    def _dummy_inputs(self, num_requests: int, num_tokens: int) -> StepInputs:
        """Requests of tokens 0 in block 0."""
        blocks = (0,) * -(-num_tokens // self.config.block_size)
        tables = (blocks,) * len(self.static_context.groups)
        return build_step_inputs(
            [ScheduledRequest(f"dummy {row}", (0,) * num_tokens, 0, tables, True) for row in range(num_requests)],
            self.config.block_size,
        )

    def _scrub_reserved_block(self) -> None:
        """Whatever padding left in the reserved block must not outlive the warm-up (vllm#57156)."""
        for layer in self.static_context.values():
            token_slots(layer.kv_cache)[: self.config.block_size].zero_()

    def _bind_caches(self, cache_groups: Sequence[CacheGroupLimits]) -> int:
        caches = allocate_cache_groups(self.static_context, cache_groups, self.device.torch_device)
        bind_kv_cache(caches, self.static_context)
        return sum(cache.nbytes for cache in {id(cache): cache for cache in caches.values()}.values())

    def _load_weights(self, graphs: RunnableGraphs, files: ModelFiles, ledger: Ledger) -> CompiledModel:
        """Read the weights by the plan's recipes onto the device, and register the plan's attention layers."""
        with ledger.phase("weights") as phase, Checkpoint(files) as checkpoint:
            logger.info("reading %.0f MB of weights", checkpoint.num_bytes / 1e6)
            source = CheckpointWeights(graphs.weight_names, graphs.constants, checkpoint)
            head_weights = {name.removeprefix("weight:") for name in graphs.plan.head.inputs}
            weights = materialize(
                graphs.plan.weights, source, self.config.quantization, head_weights, self.device.torch_device
            )
            phase.num_bytes = num_weight_bytes(graphs.plan.weights, weights)
        register_attention_layers(
            self.static_context, graphs.plan.layers, self.config.block_size, self.dtype, self.attention
        )
        return CompiledModel(graphs.plan, graphs.pieces, weights, self.static_context)

    def _make_buffers(self, max_model_len: int) -> StepBuffers:
        config = self.config
        keys = self.dispatcher.keys()
        return StepBuffers(
            max_tokens=max([config.max_num_batched_tokens, *(key.num_padded_tokens for key in keys)]),
            max_requests=config.max_num_seqs,
            num_groups=len(self.static_context.groups),
            max_blocks=-(-max_model_len // config.block_size),
            device=self.device.torch_device,
        )


def make_dispatcher(
    config: EngineConfig, max_seq_len_buckets: tuple[int, ...], num_kv_splits: Callable[[int, int], int]
) -> Dispatcher:
    """The dispatcher for the graph mode and sizes that ``config`` asks for. Raises ``ConfigError``."""
    default = GraphMode.NONE if config.device_type == "cpu" else GraphMode.FULL_AND_PIECEWISE
    mode = default if config.graph_mode is None else GraphMode(config.graph_mode)
    seqs, tokens, maximum = config.max_num_seqs, config.max_num_batched_tokens, config.max_graph_size
    return Dispatcher(
        mode,
        decode_sizes(seqs, _at_most(config.graph_sizes, seqs), None if maximum is None else min(maximum, seqs)),
        token_sizes(tokens, config.graph_sizes, maximum),
        seqs,
        max_seq_len_buckets,
        num_kv_splits,
    )


def _at_most(sizes: tuple[int, ...] | None, limit: int) -> tuple[int, ...] | None:
    """Of ``sizes`` those that are at most ``limit``, and that one."""
    return None if sizes is None else tuple(sorted({size for size in sizes if size <= limit} | {limit}))


def _padding_of(key: GraphKey) -> Padding:
    if key.kind is GraphKind.PIECEWISE:
        # One request without tokens: attention, which runs between the pieces, has nothing to do.
        return Padding(key.num_padded_tokens, 1, 0, False)
    uniform = key.uniform_query_len is not None
    return Padding(key.num_padded_tokens, key.num_padded_requests, key.num_padded_requests, uniform)


def _log_progress(what: str, done: int, total: int) -> None:
    if done < total:
        logger.info("%s: %d of %d", what, done + 1, total)
