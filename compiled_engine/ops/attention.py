"""Attention as graphs see it: an opaque op that finds the layer, and through it the KV cache, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch

from compiled_engine.context import (
    AttentionMetadata,
    CacheKind,
    CacheLayer,
    ForwardContext,
    KVCacheSpec,
    StepKind,
    get_forward_context,
)
from compiled_engine.errors import CaptureError, ForwardContextError
from compiled_engine.ops.library import LIBRARY


@dataclass(frozen=True)
class AttentionSpec:
    """What one attention layer computes, apart from its cache.

    ``scale`` multiplies the scores. ``sliding_window`` is the number of positions a query sees, its own included
    (None: all). ``soft_cap`` c turns scores s into c * tanh(s / c) before the softmax (None: off). ``shares_with``
    names an earlier layer whose keys and values, and so whose cache, this layer reads instead of having its own.
    """

    layer_name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    shares_with: str | None = None

    def cache_spec(self, block_size: int, dtype: torch.dtype) -> KVCacheSpec:
        """The cache that this layer needs."""
        kind = CacheKind.FULL if self.sliding_window is None else CacheKind.SLIDING_WINDOW
        return KVCacheSpec(
            block_size,
            self.num_kv_heads,
            self.head_dim,
            dtype,
            kind=kind,
            sliding_window=self.sliding_window,
            shares_with=self.shares_with,
        )


@dataclass(frozen=True)
class AttentionLaunch:
    """The Python values that the launches of a step's attention depend on, besides shapes.

    A captured graph has them baked in, so they are part of its key. ``max_query_len``: tokens of a request in this step
    at most. ``max_seq_len``: tokens of a request in the cache at most. ``num_kv_splits``: parts that the cached tokens
    of a request are shared out among (1: not at all). ``is_uniform``: every request has ``max_query_len`` tokens.
    """

    max_query_len: int
    max_seq_len: int
    num_kv_splits: int = 1
    is_uniform: bool = False


class LayerAttention(Protocol):
    """What one device computes for one layer. It remembers nothing about the layer's cache."""

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
        """Store this step's K and V, unless they are None, then attend over the cached tokens, into ``out``.

        query, out: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim], stored at
        ``slots`` int64 [num_tokens]. sinks: float32 [num_heads], one more score per head, which takes part in the
        softmax and carries no value.
        """
        ...


class AttentionBackend(Protocol):
    """How one device computes paged attention."""

    def build_metadata(
        self, query_start_loc: np.ndarray, seq_lens: np.ndarray, block_table: np.ndarray
    ) -> AttentionMetadata:
        """Everything the layers of a cache group share in one step, computed once. See ``AttentionMetadata``."""
        ...

    def for_layer(self, spec: AttentionSpec) -> LayerAttention:
        """What computes the layer with this spec, made once."""
        ...


class PersistentAttentionBackend(AttentionBackend, Protocol):
    """A backend whose metadata can lie in tensors that stay where they are, as captured graphs need it."""

    def metadata_over(
        self, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, launch: AttentionLaunch
    ) -> AttentionMetadata:
        """Metadata that reads these int32 tensors whenever it is used: nothing is copied. See ``AttentionMetadata``."""
        ...

    def num_kv_splits(self, num_requests: int, max_seq_len: int) -> int:
        """``AttentionLaunch.num_kv_splits`` for that many requests of one token: a function of its arguments alone."""
        ...

    def workspaces(self) -> Mapping[str, torch.Tensor]:
        """What the kernels use beside their arguments, by name. It stays where it is."""
        ...


class PagedAttention(CacheLayer):
    """One attention layer of a model: its mathematics, its cache and what computes it.

    ``sinks``: float32 [num_heads], see ``LayerAttention``; None: the softmax is over the tokens alone.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        cache_spec: KVCacheSpec,
        backend: AttentionBackend,
        sinks: torch.Tensor | None = None,
    ) -> None:
        super().__init__(spec.layer_name, cache_spec)
        self.attention_spec = spec
        self.backend = backend
        self.sinks = sinks
        self.computation = backend.for_layer(spec)


def attend(
    layer: PagedAttention,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    out: torch.Tensor,
    context: ForwardContext,
) -> None:
    """Write this step's K/V into the layer's cache, then attend over all of its cached tokens: see
    ``attention_launch``."""
    attention_launch(layer, query, key, value, out, context)()


def attention_launch(
    layer: PagedAttention,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    out: torch.Tensor,
    context: ForwardContext,
) -> Callable[[], None]:
    """What writes this step's K/V into the layer's cache, then attends over all of its cached tokens, when called.

    It has the layer's cache and the step's metadata as they are now: called again, it does the same with the same
    memory.

    query, out: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim], rows in the order
    of ``context``'s metadata; a layer that shares another's cache writes nothing and may be given None. A profile step
    has no caches: ``out`` is zeroed. Raises ``ForwardContextError`` for missing keys and for another number of rows.
    """
    if context.step_kind is StepKind.PROFILE:
        return partial(_zero, out)
    if context.step_kind is StepKind.CAPTURE and not context.captures_attention:
        raise CaptureError(
            f"attention of layer {layer.layer_name!r} runs inside a captured piece of graph {context.graph_key}, which "
            "leaves attention out: it would be replayed with the metadata of its capture"
        )
    slots = context.slot_mapping[layer.group]
    if query.shape[0] != slots.shape[0]:
        raise ForwardContextError(
            f"layer {layer.layer_name!r} gets {query.shape[0]} rows, the step's slot mapping has {slots.shape[0]}"
        )
    if not layer.writes_cache:
        key = value = None
    elif key is None or value is None:
        raise ForwardContextError(f"layer {layer.layer_name!r} has a cache of its own and gets no keys and values")
    metadata = context.attention_metadata[layer.group]
    return partial(
        layer.computation.write_and_attend, query, key, value, out, layer.kv_cache, slots, metadata, layer.sinks
    )


def _zero(tensor: torch.Tensor) -> None:
    tensor.zero_()


def _attention_by_name(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, layer_name: str
) -> None:
    context = get_forward_context()
    if layer_name not in context.static_context:
        raise ForwardContextError(
            f"no layer {layer_name!r} in the step's context, which has {len(context.static_context)} layers: register "
            "it under the name that the graph calls"
        )
    layer = context.static_context[layer_name]
    if not isinstance(layer, PagedAttention):
        raise ForwardContextError(f"layer {layer_name!r} is a {type(layer).__name__}, not a PagedAttention")
    attend(layer, query, key, value, out, context)


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("attention", _attention_by_name, _device)
LIBRARY._register_fake("attention", lambda query, key, value, out, layer_name: None)
