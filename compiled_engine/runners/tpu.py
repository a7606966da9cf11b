"""The TPU runner: XLA compiles whole steps for a few sizes, and every step is padded to one of them.

Its graphs take caches by value, read from the layers at every call. It is the only runner that keeps a list of caches,
by which it knows its profile run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from compiled_engine.compile.ledger import Ledger
from compiled_engine.compile.records import KeyRecord, RunnerRecord
from compiled_engine.config import EngineConfig
from compiled_engine.context import (
    CacheGeometry,
    StaticForwardContext,
    bind_kv_cache,
    cache_geometry,
    declared_specs,
    is_profile_run,
    layer_order,
)
from compiled_engine.errors import ContextStateError, OutOfMemoryError, RequestError
from compiled_engine.models import ModelFiles, build_definition, resolve_dtype, resolve_max_model_len
from compiled_engine.models.by_value import ByValueModel, GroupInputs
from compiled_engine.ops.attention import AttentionSpec
from compiled_engine.ops.by_value import ByValueAttention, ByValueLayer, GatherAttention, PagedStep
from compiled_engine.ops.ragged import RaggedAttention, ragged_kernel_refusal
from compiled_engine.ops.sampling import SampledTokens, SamplingBatch, greedy_batch
from compiled_engine.runners.base import CacheGroupLimits, Runner, RunnerLimits, describe_cache_groups, log_progress
from compiled_engine.runners.batch import ScheduledBatch, ScheduledRequest, StepFacts, StepOutput
from compiled_engine.runners.bucketed_model import BucketedModel, CompiledFunctions
from compiled_engine.runners.bucketed_sampler import BucketedSampler
from compiled_engine.runners.buckets import request_buckets, token_buckets
from compiled_engine.runners.caches import allocate_cache_groups, cache_bytes, register_attention_layers
from compiled_engine.runners.description import cache_records, memory_record, model_record, module_weight_records
from compiled_engine.runners.inputs import StepInputs, build_step_inputs
from compiled_engine.runners.loading import load_module
from compiled_engine.runners.memory import size_cache_groups
from compiled_engine.runners.platforms import XlaPlatform, find_platform
from compiled_engine.runners.xla_sentinel import XlaSentinel

if TYPE_CHECKING:
    from compiled_engine.compile.pipeline import Progress

logger = logging.getLogger(__name__)


class TpuRunner(Runner):
    """One model behind XLA. ``kv_caches``: its caches in layer order, empty until they are bound.

    Constructing it does everything up to being ready: read the weights, run once without caches to see what memory is
    left, size, allocate and bind the caches, and compile every bucket and branch; ``ledger`` notes how long each takes.
    From then on nothing may be compiled in a step. Raises ``ModelError``, ``ConfigError``, ``CaptureError`` or
    ``OutOfMemoryError``.
    """

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        ledger: Ledger,
        progress: Progress | None = None,
        platform: XlaPlatform | None = None,
    ) -> None:
        self.config = config
        self._files = files
        self.kv_caches: list[torch.Tensor] = []
        # And the epoch of the context in which they were read: every step asks for them.
        self._geometries: tuple[int | None, tuple[CacheGeometry, ...]] = (None, ())
        self.static_context = StaticForwardContext()
        self._progress = progress or log_progress
        with ledger.phase("device"):
            self.platform = platform or find_platform()
        logger.info("device tpu: %s", self.platform.description)
        self.sentinel = XlaSentinel(self.platform, config.on_compile)
        self._functions = CompiledFunctions(self.platform)
        self.model: BucketedModel | None = None
        try:
            self._make_ready(files, ledger)
        except BaseException:
            self.close()
            raise

    def _make_ready(self, files: ModelFiles, ledger: Ledger) -> None:
        config = self.config
        self.token_buckets, self.request_buckets = token_buckets(config), request_buckets(config)
        self.dtype = resolve_dtype(config.dtype, files, "cpu" if self.platform.emulated else "tpu")
        with ledger.phase("model definition"):
            definition = build_definition(files, self.dtype)
        max_model_len = resolve_max_model_len(definition.max_position, config.max_model_len)
        register_attention_layers(self.static_context, definition.layers, config.block_size, self.dtype, ByValueLayer)
        self.attention = self._attention(definition.layers, max_model_len)
        load_module(definition, files, ledger, self.platform.to_device)
        self._weights = module_weight_records(definition.module)
        layers = {spec.layer_name: self._layer(spec.layer_name) for spec in definition.layers}
        self.model = BucketedModel(ByValueModel(definition, layers, self.attention), self._functions)
        self.sampler = BucketedSampler(self._functions.by_rows, definition.vocab_size)
        with ledger.phase("profile") as phase:
            phase.num_bytes = working_bytes = self._profile(definition.layers)
        with ledger.phase("KV cache") as phase:
            cache_groups = self._size_caches(max_model_len, working_bytes)
            self._bind_new_caches(cache_groups)
            phase.num_bytes = cache_bytes(self.kv_caches)
        logger.info("KV cache: %s", describe_cache_groups(cache_groups, config.block_size))
        self._limits = RunnerLimits.of(config, max_model_len, cache_groups, definition.vocab_size)
        with ledger.phase("compile buckets") as phase:
            phase.note = self.platform.warm_start
            self._warm_up(ledger)
        self.sentinel.seal()

    @property
    def limits(self) -> RunnerLimits:
        return self._limits

    @torch.no_grad()
    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """See ``Runner.execute``. Raises ``RequestError`` for a batch of too many tokens or with blocks that the caches
        do not have, and ``CompiledAfterWarmup``."""
        model = self._ready_model()
        self._limits.check_tokens(batch)
        self._check_blocks(batch)
        num_rows = len(batch.sampling.num_logprobs)
        if num_rows != (asking := sum(request.samples for request in batch.requests)):
            raise RequestError(f"{asking} requests of the batch ask for a token, and {num_rows} rows say how to sample")
        num_padded_tokens = self.token_buckets.fit(batch.num_scheduled_tokens)
        num_padded_rows = self.request_buckets.fit(num_rows) if num_rows else 0
        bucket = _bucket_name(num_padded_tokens, num_padded_rows)
        shapes = f"{batch.num_scheduled_tokens} tokens of {len(batch.requests)} requests, {num_rows} sampled rows"
        facts = StepFacts(num_padded_tokens, num_padded_rows, "bucket", self.static_context.epoch, bucket)
        with self.sentinel.step(bucket, shapes):
            staged = self._stage(batch.requests, num_padded_tokens, batch.sampling, num_padded_rows)
            hidden_states = self._hidden_states(staged)
            if num_rows == 0:
                return StepOutput(SampledTokens((), ()), facts)
            logits = model.logits(hidden_states, staged.rows)
            return StepOutput(self.sampler.sample(logits, batch.sampling, staged.sampler_inputs), facts)

    def describe(self) -> RunnerRecord:
        """See ``Runner.describe``. There is no plan, and graphs are XLA's own."""
        caches = cache_records(self.static_context)
        model = model_record(self._files, self.dtype, self._limits.vocab_size, len(self.static_context))
        return RunnerRecord(
            model=model,
            caches=caches,
            weights=self._weights,
            keys=tuple(
                KeyRecord(_bucket_name(num_tokens, num_rows), num_tokens, num_rows, "bucket")
                for num_tokens in self.token_buckets.sizes
                for num_rows in (0, *self._rows_after(num_tokens))
            ),
            memory=memory_record(self._weights, caches),
        )

    def close(self) -> None:
        """Drop caches and weights. Idempotent."""
        self.sentinel.close()
        self._functions.close()
        self.static_context.close()
        self.kv_caches.clear()
        self.model = None
        self.__dict__.pop("sampler", None)

    def _stage(
        self, requests: Sequence[ScheduledRequest], num_padded_tokens: int, sampling: SamplingBatch, num_rows: int
    ) -> _StagedStep:
        """Lay out and pad a step on the host and copy it to the device in one transfer."""
        inputs = build_step_inputs(requests, self.config.block_size, num_padded_tokens)
        # A profile run has no caches to write to, and the list tells.
        by_group = () if is_profile_run(self.kv_caches) else self._attention_inputs(inputs, len(requests))
        rows = torch.zeros(num_rows, dtype=torch.int64)
        rows[: inputs.num_logits] = inputs.logits_indices
        for_sampler = self.sampler.host_inputs(sampling, num_rows) if num_rows else ()
        parts = [(inputs.input_ids, inputs.positions, rows), for_sampler, *by_group]
        moved = iter(self.platform.to_device([tensor for part in parts for tensor in part]))
        (input_ids, positions, rows), sampler_inputs, *groups = (tuple(next(moved) for _ in part) for part in parts)
        return _StagedStep(input_ids, positions, rows, sampler_inputs, tuple(groups) or None)

    def _hidden_states(self, staged: _StagedStep) -> torch.Tensor:
        return self._ready_model().hidden_states(staged.input_ids, staged.positions, staged.attention_inputs)

    def _ready_model(self) -> BucketedModel:
        if self.model is None:
            raise ContextStateError("the runner is closed")
        return self.model

    def _attention_inputs(self, inputs: StepInputs, num_requests: int) -> GroupInputs:
        num_padding = len(inputs.seq_lens) - num_requests
        return tuple(
            self.attention.host_inputs(
                PagedStep(inputs.query_start_loc, inputs.seq_lens, block_table, slot_mapping, num_padding),
                group.sliding_window,
            )
            for group, block_table, slot_mapping in zip(
                self.static_context.groups, inputs.block_tables, inputs.slot_mappings, strict=True
            )
        )

    def _check_blocks(self, batch: ScheduledBatch) -> None:
        """XLA writes nothing where an index is out of range, and says nothing."""
        for group, geometry in enumerate(self.cache_geometries()):
            for request in batch.requests:
                largest = max(request.block_tables[group], default=0)
                if largest >= geometry.num_blocks:
                    raise RequestError(
                        f"request {request.request_id!r} has block {largest}, cache group {group} has "
                        f"{geometry.num_blocks} blocks"
                    )

    def cache_geometries(self) -> tuple[CacheGeometry, ...]:
        """Number and size of blocks and number of KV heads of each cache group, read from ``kv_caches``.

        Raises ``ContextError`` before they are bound.
        """
        epoch, geometries = self._geometries
        if epoch != self.static_context.epoch:
            names = layer_order(declared_specs(self.static_context))
            caches = dict(zip(names, self.kv_caches, strict=False))
            geometries = tuple(
                cache_geometry([caches[name] for name in group.layer_names if name in caches])
                for group in self.static_context.groups
            )
            self._geometries = (self.static_context.epoch, geometries)
        return geometries

    def _attention(self, layers: Sequence[AttentionSpec], max_model_len: int) -> ByValueAttention:
        platform, config = self.platform, self.config
        kernel = platform.ragged_paged_attention
        if kernel is not None:
            refusals = {ragged_kernel_refusal(spec, self.dtype) for spec in layers} - {None}
            if not refusals:
                max_blocks = -(-max_model_len // config.block_size)
                return RaggedAttention(kernel, platform.donate, config.max_num_seqs, max_blocks)
            logger.warning(
                "attention gathers, because the device's kernel cannot be used: %s", "; ".join(map(str, refusals))
            )
        return GatherAttention(config.block_size, max_model_len, platform.donate)

    @torch.no_grad()
    def _profile(self, layers: Sequence[AttentionSpec]) -> int:
        """Run the largest step without caches, and return the bytes that its attention would take for a while."""
        if not is_profile_run(self.kv_caches):
            raise ContextStateError("the profile run comes before caches are bound")
        largest = self.token_buckets.sizes[-1]
        hidden_states = self._hidden_states(self._stage_dummy(largest))
        (rows,) = self.platform.to_device([torch.zeros(self.request_buckets.sizes[-1], dtype=torch.int64)])
        self._warm_up_sampler(self._ready_model().logits(hidden_states, rows))
        self.platform.wait()
        return max(self.attention.working_bytes(spec, largest) for spec in layers)

    def _size_caches(self, max_model_len: int, working_bytes: int) -> tuple[CacheGroupLimits, ...]:
        config = self.config
        free = self.platform.free_memory(config.gpu_memory_fraction) - working_bytes
        if free <= 0:
            raise OutOfMemoryError(
                f"attention of {self.token_buckets.sizes[-1]} tokens over {max_model_len} places takes {working_bytes} "
                f"bytes, more than are free: lower max_num_batched_tokens or max_model_len"
            )
        if not self.platform.updates_in_place:
            free //= 2
        most = None if self.platform.emulated else free
        return size_cache_groups(config, self.static_context, max_model_len, free, most)

    def _bind_new_caches(self, cache_groups: Sequence[CacheGroupLimits]) -> None:
        # Zeros made on the device would be a constant of the graphs.
        on_host = allocate_cache_groups(self.static_context, cache_groups)
        moved: dict[int, torch.Tensor] = {}
        for cache in on_host.values():
            if id(cache) not in moved:
                (moved[id(cache)],) = self.platform.to_device([cache])
        caches = {name: moved[id(cache)] for name, cache in on_host.items()}
        bind_kv_cache(caches, self.static_context, self.kv_caches)

    @torch.no_grad()
    def _warm_up(self, ledger: Ledger) -> None:
        """Compile the body for every number of tokens, and what follows for every number of rows that can follow."""
        model, bodies, rows = self._ready_model(), self.token_buckets.sizes, self.request_buckets.sizes
        done, total = 0, len(bodies) + len(rows)
        hidden_states: dict[int, torch.Tensor] = {}
        for num_tokens in bodies:
            self._progress("compiling buckets", done, total)
            with ledger.phase(f"body, {num_tokens} tokens"):
                hidden_states[num_tokens] = self._hidden_states(self._stage_dummy(num_tokens))
                self.platform.wait()
            done += 1
        for num_rows in rows:
            self._progress("compiling buckets", done, total)
            with ledger.phase(f"head and sampling, {num_rows} rows"):
                (indices,) = self.platform.to_device([torch.zeros(num_rows, dtype=torch.int64)])
                reaching = [size for size in bodies if num_rows in self._rows_after(size)]
                logits = [model.logits(hidden_states[size], indices) for size in reaching]
                self._warm_up_sampler(logits[-1])
            done += 1
        self._progress("compiling buckets", total, total)

    def _rows_after(self, num_tokens: int) -> tuple[int, ...]:
        """The numbers of rows that can follow a body of ``num_tokens``."""
        sizes = self.request_buckets.sizes
        most = self.request_buckets.fit(min(num_tokens, sizes[-1]))
        return tuple(size for size in sizes if size <= most)

    def _warm_up_sampler(self, logits: torch.Tensor) -> None:
        for batch in self.sampler.warm_up_batches(logits.shape[0]):
            inputs = self.platform.to_device(self.sampler.host_inputs(batch, logits.shape[0]))
            self.sampler.sample(logits, batch, inputs)

    def _stage_dummy(self, num_tokens: int) -> _StagedStep:
        """A step of padding alone."""
        tables = ((0,),) * len(self.static_context.groups)
        request = ScheduledRequest("warm-up", (0,), 0, tables, False)
        return self._stage([request], num_tokens, greedy_batch(0), 0)

    def _layer(self, name: str) -> ByValueLayer:
        layer = self.static_context[name]
        if not isinstance(layer, ByValueLayer):
            raise ContextStateError(f"layer {name!r} is a {type(layer).__name__}, not a ByValueLayer")
        return layer


def _bucket_name(num_tokens: int, num_rows: int) -> str:
    return f"{num_tokens} tokens, {num_rows} rows"


@dataclass(frozen=True)
class _StagedStep:
    """A padded step on the device. ``attention_inputs`` None: a profile run."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    sampler_inputs: tuple[torch.Tensor, ...]
    attention_inputs: GroupInputs | None
