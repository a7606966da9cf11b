"""Paged attention on GPU: one kernel for any mix of prompts and decodes, and two for few decodes of long sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np
import torch

from compiled_engine.context import AttentionMetadata, KVCacheSpec
from compiled_engine.errors import ConfigError
from compiled_engine.ops.attention import AttentionLaunch, AttentionSpec
from compiled_engine.ops.triton.cache_write import cache_write_variant, write_to_cache
from compiled_engine.ops.triton.prefill import attend_prefill, prefill_variant
from compiled_engine.ops.triton.split_kv import (
    MAX_KV_SPLITS,
    SplitWorkspace,
    attend_decode,
    choose_num_kv_splits,
    max_split_rows,
    reduce_variant,
    split_variant,
)
from compiled_engine.ops.triton.variants import KernelVariant

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_H200_MULTIPROCESSORS = 132


@dataclass(frozen=True)
class TritonAttentionMetadata(AttentionMetadata):
    """``launch``: the Python values that the step's launches depend on; the rest they read on the device."""

    launch: AttentionLaunch


class TritonAttention:
    """The GPU's ``PersistentAttentionBackend``.

    ``layers``: the specs of all layers that it will compute, from which the workspace gets its size. ``dtype``: that
    of queries and results; caches may have another. ``num_multiprocessors``: how many the device has.
    Raises ``ConfigError`` for a dtype that the kernels do not compute in, and for no layers.
    """

    def __init__(
        self,
        layers: Sequence[AttentionSpec],
        dtype: torch.dtype,
        device: torch.device,
        num_multiprocessors: int = _H200_MULTIPROCESSORS,
    ) -> None:
        if dtype not in _DTYPES:
            raise ConfigError(f"attention in {dtype}: the Triton kernels compute in float32, bfloat16 and float16")
        if not layers:
            raise ConfigError("TritonAttention got no layers: name the specs of all that it will compute")
        self.dtype = dtype
        self.device = device
        self._num_multiprocessors = num_multiprocessors
        # Layers with the fewest KV heads have the fewest programs: they decide how much is split.
        self._num_kv_heads = min(spec.num_kv_heads for spec in layers)
        self._max_split_rows = max_split_rows(self._num_kv_heads, num_multiprocessors)
        self._workspace = SplitWorkspace.allocate(
            self._max_split_rows,
            max(spec.num_heads for spec in layers),
            max(spec.num_heads * spec.head_dim for spec in layers),
            device,
        )

    def build_metadata(
        self, query_start_loc: np.ndarray, seq_lens: np.ndarray, block_table: np.ndarray
    ) -> TritonAttentionMetadata:
        """See ``AttentionBackend``. Copies the arrays to the device."""
        lengths = np.diff(query_start_loc)
        max_query_len, max_seq_len = int(lengths.max()), int(seq_lens.max())
        launch = AttentionLaunch(max_query_len, max_seq_len, is_uniform=bool((lengths == max_query_len).all()))
        if max_query_len == 1:
            launch = replace(launch, num_kv_splits=self.num_kv_splits(len(seq_lens), max_seq_len))
        starts, ends, blocks = (
            torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)).to(self.device)
            for array in (query_start_loc, seq_lens, block_table)
        )
        return self.metadata_over(starts, ends, blocks, launch)

    def metadata_over(
        self, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, launch: AttentionLaunch
    ) -> TritonAttentionMetadata:
        """See ``PersistentAttentionBackend``. The table's rows may lie apart; all else is dense.

        Raises ``ConfigError`` for splits of more than one token per request, or more of them than the workspace holds.
        """
        splits = launch.num_kv_splits
        rows = seq_lens.shape[0] * splits
        if splits > 1 and (launch.max_query_len > 1 or splits > MAX_KV_SPLITS or rows > self._max_split_rows):
            raise ConfigError(
                f"{splits} KV splits for {seq_lens.shape[0]} requests of up to {launch.max_query_len} tokens: splits "
                f"are for one token per request, at most {MAX_KV_SPLITS}, and the workspace holds "
                f"{self._max_split_rows} of all requests together; ask num_kv_splits"
            )
        return TritonAttentionMetadata(query_start_loc, seq_lens, block_table, launch)

    def num_kv_splits(self, num_requests: int, max_seq_len: int) -> int:
        """See ``PersistentAttentionBackend`` and ``choose_num_kv_splits``."""
        return choose_num_kv_splits(num_requests, max_seq_len, self._num_kv_heads, self._num_multiprocessors)

    def workspaces(self) -> dict[str, torch.Tensor]:
        """See ``PersistentAttentionBackend``. All layers and steps use the same ones, one after another."""
        workspace = self._workspace
        return {"results": workspace.results, "maxima": workspace.maxima, "totals": workspace.totals}

    def for_layer(
        self,
        spec: AttentionSpec,
        alibi: torch.Tensor | None = None,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> TritonLayerAttention:
        """See ``AttentionBackend``. ``alibi``: float32 [num_heads], the slopes of linear biases, on the device.

        ``key_scale``, ``value_scale``: what keys and values are divided by before they go into the cache.
        """
        return TritonLayerAttention(spec, self._workspace, alibi, key_scale, value_scale)


class TritonLayerAttention:
    """The GPU's ``LayerAttention``."""

    def __init__(
        self,
        spec: AttentionSpec,
        workspace: SplitWorkspace,
        alibi: torch.Tensor | None,
        key_scale: float,
        value_scale: float,
    ) -> None:
        self._spec = spec
        self._workspace = workspace
        self._alibi = alibi
        self._key_scale = float(key_scale)  # an integer would be compiled in
        self._value_scale = float(value_scale)

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
        """See ``LayerAttention``. ``metadata`` must come from a ``TritonAttention``.

        Launches kernels and waits for none. Allocates nothing, unless the heads of a row of ``query``, ``key`` or
        ``value`` lie apart: those are copied first. Rows of ``out`` that belong to no request keep what they held.
        Raises ``TypeError`` for foreign metadata and ``ValueError`` for an ``out`` whose heads lie apart.
        """
        if not isinstance(metadata, TritonAttentionMetadata):
            raise TypeError(f"TritonAttention needs TritonAttentionMetadata, it got {type(metadata).__name__}")
        if not _has_dense_rows(out) or out.dtype is not query.dtype:
            raise ValueError(
                f"attention of {query.dtype} needs an out of that dtype whose rows are dense, not {out.dtype} with "
                f"strides {tuple(out.stride())}"
            )
        if key is not None and value is not None:
            key, value = _dense_rows(key), _dense_rows(value)
            write_to_cache(key, value, kv_cache, slots, self._key_scale, self._value_scale)
        query = _dense_rows(query)
        scale = self._spec.scale * self._key_scale
        splits = metadata.launch.num_kv_splits
        if splits > 1:
            attend_decode(
                self._spec,
                query,
                out,
                kv_cache,
                metadata,
                splits,
                self._workspace,
                scale,
                self._value_scale,
                sinks,
                self._alibi,
            )
        else:
            attend_prefill(self._spec, query, out, kv_cache, metadata, scale, self._value_scale, sinks, self._alibi)


def attention_variants(
    spec: AttentionSpec,
    cache_spec: KVCacheSpec,
    dtype: torch.dtype,
    has_sinks: bool = False,
    has_slopes: bool = False,
) -> tuple[KernelVariant, ...]:
    """Everything that ``write_and_attend`` of a layer can launch, for queries, keys and values of ``dtype``.

    Rows must be a multiple of 16 elements apart and all tensors 16-byte aligned, as real models' are; others work, and
    are compiled when they first occur. Layers with equal arguments have equal names.
    """
    writes = () if spec.shares_with else (cache_write_variant(cache_spec, dtype),)
    variants = (
        *writes,
        prefill_variant(spec, cache_spec, dtype, has_sinks, has_slopes),
        split_variant(spec, cache_spec, dtype, has_slopes),
        reduce_variant(spec, dtype, has_sinks),
    )
    return tuple(replace(variant, name=_unique_name(variant)) for variant in variants)


def _unique_name(variant: KernelVariant) -> str:
    """The kernel's name and a hash of what tells the variant from others of that kernel."""
    identity = repr((sorted(variant.constants.items()), list(variant.arguments.items())))
    return f"{variant.name}-{sha256(identity.encode()).hexdigest()[:12]}"


def _has_dense_rows(rows: torch.Tensor) -> bool:
    return rows.stride(2) == 1 and rows.stride(1) == rows.shape[2]


def _dense_rows(rows: torch.Tensor) -> torch.Tensor:
    return rows if _has_dense_rows(rows) else rows.contiguous()
