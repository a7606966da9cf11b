"""The runner with captured graphs: CUDA graphs on a GPU, their emulation on the CPU.

Every step is staged in buffers that stay where they are. A step that fits a captured graph is padded to it and
replayed; any other runs eagerly from the same buffers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from compiled_engine.compile.counters import CompileCounters
from compiled_engine.compile.graphs.backend import GraphRecord
from compiled_engine.compile.graphs.dispatcher import Decision, Dispatcher
from compiled_engine.compile.graphs.graphed_model import GraphedModel, StepTensors
from compiled_engine.compile.graphs.keys import GraphKey, GraphKind, GraphMode, StepShape
from compiled_engine.compile.graphs.sizes import decode_sizes, token_sizes
from compiled_engine.compile.ledger import Ledger
from compiled_engine.compile.records import RunnerRecord, captured_graph_records
from compiled_engine.compile.seal import CompileSeal
from compiled_engine.config import EngineConfig
from compiled_engine.context import (
    ForwardContext,
    StaticForwardContext,
    StepKind,
    set_forward_context,
    unbind_kv_cache,
)
from compiled_engine.errors import ContextStateError
from compiled_engine.models import ModelFiles, resolve_dtype, resolve_max_model_len
from compiled_engine.ops.attention import AttentionLaunch, PagedAttention
from compiled_engine.ops.sampling import SampledTokens, SamplingBatch, greedy_batch
from compiled_engine.runners.base import Runner, RunnerLimits, describe_cache_groups, log_progress
from compiled_engine.runners.batch import ScheduledBatch, ScheduledRequest, StepFacts, StepOutput
from compiled_engine.runners.caches import bind_new_caches, register_attention_layers, scrub_reserved_block
from compiled_engine.runners.description import (
    cache_records,
    key_records,
    memory_record,
    model_record,
    plan_weight_records,
)
from compiled_engine.runners.devices import create_device
from compiled_engine.runners.inputs import StepInputs, build_step_inputs, empty_step_inputs
from compiled_engine.runners.loading import load_model
from compiled_engine.runners.memory import size_cache_groups, smallest_cache_groups
from compiled_engine.runners.precompile import RunnableGraphs, graphs_for
from compiled_engine.runners.step_buffers import Padding, StagedStep, StepBuffers

if TYPE_CHECKING:
    from compiled_engine.compile.pipeline import Progress

logger = logging.getLogger(__name__)

# There are dozens of captures, and each takes a fraction of a second.
_CAPTURES_PER_MESSAGE = 10


class GpuRunner(Runner):
    """One model on a device with captured graphs. Holds no list of caches: attention layers own them.

    Constructing it does everything up to being ready: find or compile the graphs of pieces, read the weights, measure
    what a step and the captured graphs take, size, allocate and bind the caches, capture; ``ledger`` notes how long
    each takes. From then on nothing may be captured in a step, and no graph of pieces compiled. Raises
    ``ModelError``, ``ConfigError``, ``CaptureError``, ``StoreError`` or ``OutOfMemoryError``.
    """

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        ledger: Ledger,
        progress: Progress | None = None,
        graphs: RunnableGraphs | None = None,
    ) -> None:
        """``graphs``: the pieces to run and capture; None: what ``graphs_for`` finds or compiles."""
        self.config = config
        self._files = files
        self.dtype = resolve_dtype(config.dtype, files, config.device_type)
        self.counters = CompileCounters()
        self.static_context = StaticForwardContext()
        self.graphed: GraphedModel | None = None
        self._progress = progress or log_progress
        self._seal = CompileSeal(config.on_compile)
        with ledger.phase("kernels"):
            self.device = create_device(config, self.dtype)
        if graphs is None:
            graphs = graphs_for(config, files, ledger, self._progress, self.counters)
        try:
            self._make_ready(graphs, files, ledger)
        except BaseException:
            self.close()
            raise

    def _make_ready(self, graphs: RunnableGraphs, files: ModelFiles, ledger: Ledger) -> None:
        config, plan = self.config, graphs.plan
        max_model_len = resolve_max_model_len(graphs.max_position, config.max_model_len)
        with ledger.phase("kernels of the model"):
            self.attention = self.device.attention_backend(plan.layers)
            self.sampler = self.device.sampler(plan.vocab_size, config.max_num_seqs, plan.logits_dtype)
        buckets = self.device.max_seq_len_buckets(max_model_len)
        self.dispatcher = make_dispatcher(config, buckets, self.attention.num_kv_splits)
        make_layer = partial(PagedAttention, backend=self.attention)
        register_attention_layers(self.static_context, plan.layers, config.block_size, self.dtype, make_layer)
        self.buffers = self._make_buffers(max_model_len)
        model = load_model(config, graphs, files, self.static_context, ledger, self.device.torch_device)
        self.graphed = GraphedModel(model, self.device.graph_backend(self.static_context))
        with ledger.phase("profile") as phase, torch.inference_mode():
            phase.num_bytes = self._working_bytes = self._profile(max_model_len)
        with ledger.phase("KV cache") as phase:
            free = max(0, self.device.free_memory() - self._working_bytes)
            most = self.device.default_cache_memory(free)
            cache_groups = size_cache_groups(config, self.static_context, max_model_len, free, most)
            phase.num_bytes = bind_new_caches(self.static_context, cache_groups, self.device.torch_device)
        logger.info("KV cache: %s", describe_cache_groups(cache_groups, config.block_size))
        self._limits = RunnerLimits.of(config, max_model_len, cache_groups, plan.vocab_size)
        with ledger.phase("capture graphs") as phase, torch.inference_mode():
            self._warm_up()
            records = self._capture(self.dispatcher.keys())
            phase.num_bytes = sum(record.num_bytes for record in records)
            phase.note = f"{len(self.dispatcher.keys())} keys, {len(records)} graphs"
            scrub_reserved_block(self.static_context, config.block_size)
        self.graphed.backend.seal()
        self._seal.seal()

    @property
    def limits(self) -> RunnerLimits:
        return self._limits

    @property
    def graph_records(self) -> tuple[GraphRecord, ...]:
        """What was captured, in order."""
        return self._model().backend.records

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """See ``Runner.execute``. Raises ``RequestError`` for a batch of too many tokens, and ``StaleGraph``."""
        self._limits.check_tokens(batch)
        self._model()
        with self._seal.guard():
            inputs = build_step_inputs(batch.requests, self.config.block_size)
            shape = shape_of(inputs)
            decision = self.decide(shape)
            key, facts = decision.key, self._facts(shape, decision)
            if key is not None and key.kind is GraphKind.FULL:
                return StepOutput(self._replay_full(key, inputs, batch.sampling), facts)
            return StepOutput(self._run_with_eager_attention(key, inputs, shape, batch.sampling), facts)

    def decide(self, shape: StepShape) -> Decision:
        """The graph that serves a step, or why none does."""
        return self.dispatcher.dispatch(shape)

    def describe(self) -> RunnerRecord:
        """See ``Runner.describe``."""
        model, plan, rows = self._model().model, self._model().model.plan, self.config.max_num_seqs
        weights, caches = plan_weight_records(plan, model.weights), cache_records(self.static_context)
        kernels = {**self.attention.workspaces(), **self.sampler.workspaces(rows), **self.sampler.outputs(rows)}
        return RunnerRecord(
            model=model_record(self._files, self.dtype, plan.vocab_size, len(plan.layers)),
            plan=plan,
            caches=caches,
            weights=weights,
            graphs=captured_graph_records(self.graph_records),
            keys=key_records(self.dispatcher.keys()),
            memory=memory_record(
                weights,
                caches,
                graphs=sum(record.num_bytes for record in self.graph_records),
                workspaces=[*self.buffers.tensors(), *kernels.values()],
                estimated_working=self._working_bytes,
                device=self.device.torch_device,
            ),
        )

    def close(self) -> None:
        """Drop graphs, caches and weights. Idempotent."""
        self._seal.close()
        graphed, self.graphed = self.graphed, None
        try:
            if graphed is not None:
                graphed.cleanup()
        finally:
            self.static_context.close()
            for name in ("sampler", "buffers", "attention"):
                self.__dict__.pop(name, None)

    def _model(self) -> GraphedModel:
        if self.graphed is None:
            raise ContextStateError("the runner is closed")
        return self.graphed

    def _facts(self, shape: StepShape, decision: Decision) -> StepFacts:
        key, epoch = decision.key, self.static_context.epoch
        if key is None:
            return StepFacts(shape.num_tokens, shape.num_requests, "eager", epoch, reason=decision.reason)
        # Attention runs outside piecewise graphs, on the requests that are there.
        num_requests = key.num_padded_requests if key.kind is GraphKind.FULL else shape.num_requests
        return StepFacts(key.num_padded_tokens, num_requests, key.kind.value, epoch, key)

    def _replay_full(self, key: GraphKey, inputs: StepInputs, sampling: SamplingBatch) -> SampledTokens:
        self.device.prepare_step(key.num_padded_tokens)
        staged = self.buffers.stage(inputs, _padding_of(key))
        self.sampler.stage(sampling, key.num_padded_requests)
        self._model().replay_full(key, partial(self._tensors, staged, key.num_padded_requests))
        return self.sampler.read_results(sampling)

    def _run_with_eager_attention(
        self, key: GraphKey | None, inputs: StepInputs, shape: StepShape, sampling: SamplingBatch
    ) -> SampledTokens:
        """A step whose pieces are replayed between attentions; without a key they run eagerly too."""
        graphed = self._model()
        padding = Padding.none(inputs)
        if key is not None:
            padding = Padding(key.num_padded_tokens, padding.num_requests, padding.num_logits, False)
        self.device.prepare_step(padding.num_tokens)
        staged = self.buffers.stage(inputs, padding)
        with set_forward_context(self._context(staged, self._launch_of(shape), StepKind.REAL, inputs.num_tokens)):
            if key is None:
                hidden_states = graphed.model.hidden_states(staged.input_ids, staged.positions)
            else:
                hidden_states = graphed.replay_pieces(key, partial(self._tensors, staged, padding.num_logits))
        if padding.num_logits == 0:
            return SampledTokens((), ())
        return self.sampler.sample(graphed.model.logits(hidden_states, staged.logits_indices), sampling)

    def _launch_of(self, shape: StepShape) -> AttentionLaunch:
        splits = self.attention.num_kv_splits(shape.num_requests, shape.max_seq_len) if shape.is_decode else 1
        return AttentionLaunch(shape.max_query_len, shape.max_seq_len, splits, shape.is_uniform)

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
            if index % _CAPTURES_PER_MESSAGE == 0:
                self._progress("capturing graphs", index, len(keys))
            self.device.prepare_step(key.num_padded_tokens)
            staged = self.buffers.stage(nothing, _padding_of(key))
            launch = AttentionLaunch(
                max_query_len=key.max_query_len,
                max_seq_len=key.max_seq_len,
                num_kv_splits=max(1, key.num_kv_splits),
                is_uniform=key.uniform_query_len is not None,
            )
            context = self._context(staged, launch, StepKind.CAPTURE, 0)
            rows = staged.logits_indices.shape[0]
            tensors = self._tensors(staged, rows)
            records += self._model().capture(key, tensors, context, self.sampler.graph_tail(rows))
        self._progress("capturing graphs", len(keys), len(keys))
        return records

    def _profile(self, max_model_len: int) -> int:
        """Bytes that steps take beside weights and caches: what the largest step needs for a while, and graphs.

        The largest graph of each form is captured on caches of the smallest size, measured and thrown away: the
        smaller ones of its form fit into the memory that it takes.
        """
        self.device.reset_peak()
        self._profile_step(max_model_len)
        working_bytes = self.device.peak_above_current()
        forms: dict[tuple[GraphKind, int | None], GraphKey] = {}
        largest_first = self.dispatcher.keys()
        for key in largest_first:
            forms.setdefault((key.kind, key.uniform_query_len), key)
        if not forms:
            return working_bytes
        smallest = smallest_cache_groups(self.config, self.static_context, max_model_len)
        bind_new_caches(self.static_context, smallest, self.device.torch_device)
        graph_bytes = sum(record.num_bytes for record in self._capture(tuple(forms.values())))
        self._model().cleanup()
        unbind_kv_cache(self.static_context)
        return working_bytes + graph_bytes

    def _profile_step(self, max_model_len: int) -> None:
        """The largest step, without caches, whose attention computes nothing."""
        tokens = self.config.max_num_batched_tokens
        rows = min(self.config.max_num_seqs, tokens)
        lengths = [min(tokens // rows + (row < tokens % rows), max_model_len) for row in range(rows)]
        self._run_dummy(lengths, StepKind.PROFILE)

    def _warm_up(self) -> None:
        """Two small eager steps on padding, checking every tensor against the plan."""
        most = min(5, self.config.max_num_seqs, self.config.max_num_batched_tokens)
        with self._model().model.verified():
            for num_requests in (1, most):
                logits = self._run_dummy([1] * num_requests, StepKind.WARMUP)
                self.sampler.sample(logits, greedy_batch(num_requests))

    def _run_dummy(self, lengths: Sequence[int], step_kind: StepKind) -> torch.Tensor:
        """Logits of an eager step of requests with so many tokens 0, all in block 0."""
        groups = len(self.static_context.groups)
        requests = [
            ScheduledRequest(
                f"dummy {row}", (0,) * length, 0, ((0,) * -(-length // self.config.block_size),) * groups, True
            )
            for row, length in enumerate(lengths)
        ]
        inputs = build_step_inputs(requests, self.config.block_size)
        self.device.prepare_step(inputs.num_tokens)
        staged = self.buffers.stage(inputs, Padding.none(inputs))
        model = self._model().model
        launch = self._launch_of(shape_of(inputs))
        with set_forward_context(self._context(staged, launch, step_kind, inputs.num_tokens)):
            hidden_states = model.hidden_states(staged.input_ids, staged.positions)
        return model.logits(hidden_states, staged.logits_indices)

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
    seqs, tokens, maximum = config.max_num_seqs, config.max_num_batched_tokens, config.max_graph_size
    most_decodes = seqs if maximum is None else min(maximum, seqs)
    mode, sizes = GraphMode(config.resolved_graph_mode), token_sizes(tokens, config.graph_sizes, maximum)
    if mode is GraphMode.FULL_AND_PIECEWISE and sizes[0] == 1 < len(sizes):
        # A step of one token is a decode step, and the buckets hold sequences of any length.
        sizes = sizes[1:]
    return Dispatcher(
        mode,
        decode_sizes(seqs, _at_most(config.graph_sizes, most_decodes), most_decodes),
        sizes,
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


def shape_of(inputs: StepInputs) -> StepShape:
    """The sizes of a step, which decide how it runs."""
    query_lens = inputs.query_start_loc[1:] - inputs.query_start_loc[:-1]
    longest = int(query_lens.max())
    return StepShape(
        num_tokens=inputs.num_tokens,
        num_requests=len(query_lens),
        max_query_len=longest,
        max_seq_len=int(inputs.seq_lens.max()),
        is_uniform=bool((query_lens == longest).all()),
    )
