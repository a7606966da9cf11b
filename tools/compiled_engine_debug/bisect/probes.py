"""Probes inside a runner: what goes into and comes out of every layer's attention, and the model's end.

A probe copies into tensors that stay where they are. Captured with a graph, it is replayed with it, so a graph's own
values are seen although no Python runs in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from compiled_engine.compile.launch import Launch, copying, launch_now
from compiled_engine.compile.model import CompiledModel
from compiled_engine.compile.plan import GraphPlan, TensorSpec
from compiled_engine.context import AttentionMetadata, StaticForwardContext, token_slots
from compiled_engine.ops.attention import LayerAttention, PagedAttention
from compiled_engine.runners.batch import ScheduledBatch, ScheduledRequest
from compiled_engine_debug.bisect.trace import Rows, Site, TensorName


@dataclass(frozen=True)
class ProbeSizes:
    """The largest step that is probed, padding included: rows of tokens, and rows that get logits."""

    tokens: int
    logits: int


class LayerProbe:
    """A ``LayerAttention`` that keeps what ``computation`` is given and what it gives back."""

    def __init__(self, layer: PagedAttention, dtype: torch.dtype, device: torch.device, num_tokens: int) -> None:
        self._computation: LayerAttention = layer.computation
        spec = layer.attention_spec
        heads = {TensorName.QUERY: spec.num_heads, TensorName.OUT: spec.num_heads}
        if layer.writes_cache:
            heads |= {TensorName.KEY: spec.num_kv_heads, TensorName.VALUE: spec.num_kv_heads}
        self.kept = {
            tensor: torch.zeros(num_tokens, number, spec.head_dim, dtype=dtype, device=device)
            for tensor, number in heads.items()
        }

    def write_and_attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        out: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
        metadata: AttentionMetadata,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """See ``LayerAttention``."""
        self._keep(TensorName.QUERY, query)
        self._keep(TensorName.KEY, key)
        self._keep(TensorName.VALUE, value)
        self._computation.write_and_attend(query, key, value, out, kv_cache, slots, metadata, sinks)
        self._keep(TensorName.OUT, out)

    def _keep(self, tensor: TensorName, values: torch.Tensor | None) -> None:
        if values is not None and tensor in self.kept:
            self.kept[tensor][: len(values)].copy_(values)


class ModelProbe:
    """Takes the place of a model's ``logits`` and keeps the hidden states it is given and the logits it makes."""

    def __init__(self, model: CompiledModel, device: torch.device, sizes: ProbeSizes) -> None:
        self._compute = model.logits
        hidden = _hidden_spec(model.plan)
        self.hidden = torch.zeros(sizes.tokens, int(hidden.shape[-1]), dtype=hidden.dtype, device=device)
        self.logits = torch.zeros(sizes.logits, model.plan.vocab_size, dtype=model.plan.logits_dtype, device=device)

    def __call__(
        self, hidden_states: torch.Tensor, logits_indices: torch.Tensor, launch: Launch = launch_now
    ) -> torch.Tensor:
        launch("probe of the hidden states", copying([(self.hidden[: hidden_states.shape[1]], hidden_states[0])]))
        logits = self._compute(hidden_states, logits_indices, launch)
        launch("probe of the logits", copying([(self.logits[: len(logits)], logits)]))
        return logits


class Probes:
    """The probes of one runner, in all of its attention layers and around its head."""

    def __init__(
        self,
        model: CompiledModel,
        static_context: StaticForwardContext,
        dtype: torch.dtype,
        device: torch.device,
        sizes: ProbeSizes,
    ) -> None:
        self._layers: dict[str, tuple[PagedAttention, LayerProbe]] = {}
        for name, layer in static_context.items():
            if isinstance(layer, PagedAttention):
                probe = LayerProbe(layer, dtype, device, sizes.tokens)
                layer.computation = probe
                self._layers[name] = layer, probe
        self._model = ModelProbe(model, device, sizes)
        model.logits = self._model  # type: ignore[method-assign]

    def read(self, step: int, batch: ScheduledBatch, block_size: int) -> Iterator[Rows]:
        """What the step that has just run computed, in the order in which it did; rows of real tokens alone."""
        starts = _starts(batch)
        for name, (layer, probe) in self._layers.items():
            for tensor in (TensorName.QUERY, TensorName.KEY, TensorName.VALUE):
                if tensor in probe.kept:
                    yield from _by_request(step, batch, starts, Site(name, tensor), probe.kept[tensor])
            if layer.writes_cache:
                stored = token_slots(layer.kv_cache)[_slots(batch, layer.group, block_size).to(layer.kv_cache.device)]
                for index, tensor in enumerate((TensorName.STORED_KEY, TensorName.STORED_VALUE)):
                    yield from _by_request(step, batch, starts, Site(name, tensor), stored[:, index])
            yield from _by_request(step, batch, starts, Site(name, TensorName.OUT), probe.kept[TensorName.OUT])
        sampling = [request for request in batch.requests if request.samples]
        if not sampling:
            return
        yield from _by_request(step, batch, starts, Site(None, TensorName.HIDDEN), self._model.hidden)
        for row, request in enumerate(sampling):
            logits = self._model.logits[row : row + 1].cpu()
            yield Rows(step, request.request_id, Site(None, TensorName.LOGITS), request.seq_len - 1, logits)


def _hidden_spec(plan: GraphPlan) -> TensorSpec:
    piece = next(piece for piece in plan.pieces if piece.key == plan.head.piece)
    return piece.inputs[plan.head.inputs.index(f"value:{plan.hidden}")]


def _starts(batch: ScheduledBatch) -> list[int]:
    """The first row of every request."""
    starts, row = [], 0
    for request in batch.requests:
        starts.append(row)
        row += request.num_scheduled_tokens
    return starts


def _by_request(
    step: int, batch: ScheduledBatch, starts: Sequence[int], site: Site, values: torch.Tensor
) -> Iterator[Rows]:
    on_host = values[: batch.num_scheduled_tokens].cpu()
    for request, start in zip(batch.requests, starts, strict=True):
        rows = on_host[start : start + request.num_scheduled_tokens]
        yield Rows(step, request.request_id, site, request.num_computed_tokens, rows)


def _slots(batch: ScheduledBatch, group: int, block_size: int) -> torch.Tensor:
    """The slots that the step's K/V belong to, worked out from the block tables and not from the step's inputs."""
    return torch.tensor([slot for request in batch.requests for slot in _request_slots(request, group, block_size)])


def _request_slots(request: ScheduledRequest, group: int, block_size: int) -> list[int]:
    table = request.block_tables[group]
    positions = range(request.num_computed_tokens, request.seq_len)
    return [table[position // block_size] * block_size + position % block_size for position in positions]
