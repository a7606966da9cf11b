"""What a runner tells of itself when it is ready, as records."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from compiled_engine.compile.graphs.keys import GraphKey
from compiled_engine.compile.plan import GraphPlan
from compiled_engine.compile.records import (
    CacheRecord,
    KeyRecord,
    MemoryRecord,
    ModelRecord,
    WeightRecord,
    dtype_name,
)
from compiled_engine.context import StaticForwardContext, describe
from compiled_engine.models import ModelFiles
from compiled_engine.ops.cpu.packing import packed_bytes


def model_record(files: ModelFiles, dtype: torch.dtype, vocab_size: int, num_layers: int) -> ModelRecord:
    """The model in ``files``, with the first class that its config names."""
    names = json.loads((files.folder / "config.json").read_text(encoding="utf-8")).get("architectures") or [None]
    return ModelRecord(names[0], dtype_name(dtype), vocab_size, num_layers)


def cache_records(static_context: StaticForwardContext) -> tuple[CacheRecord, ...]:
    """The caches of a context that is bound, in the order of its layers."""
    return tuple(
        CacheRecord(
            layer=layer.layer,
            group=layer.group,
            address=layer.address,
            shape=layer.shape,
            dtype=layer.dtype,
            num_bytes=layer.bytes,
            shares_with=layer.shares_with,
        )
        for layer in describe(static_context).layers
        if layer.group is not None and layer.shape is not None and layer.dtype is not None and layer.bytes is not None
    )


def plan_weight_records(plan: GraphPlan, weights: Mapping[str, torch.Tensor]) -> tuple[WeightRecord, ...]:
    """The weights of ``plan``, in its order."""
    return tuple(
        _weight_record(
            recipe.key,
            weights[recipe.key],
            packed_bytes(weights[recipe.key]) if recipe.packed else weights[recipe.key].nbytes,
        )
        for recipe in plan.weights
    )


def module_weight_records(module: torch.nn.Module) -> tuple[WeightRecord, ...]:
    """The parameters and buffers of ``module``, each once."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return tuple(_weight_record(name, tensor, tensor.nbytes) for name, tensor in named)


def key_records(keys: Iterable[GraphKey]) -> tuple[KeyRecord, ...]:
    """``keys`` in the same order."""
    return tuple(KeyRecord(str(key), key.num_padded_tokens, key.num_padded_requests, key.kind.value) for key in keys)


def memory_record(
    weights: Iterable[WeightRecord],
    caches: Iterable[CacheRecord],
    *,
    graphs: int = 0,
    workspaces: Iterable[torch.Tensor] = (),
    estimated_working: int | None = None,
    device: torch.device | None = None,
) -> MemoryRecord:
    """Where memory is now. ``graphs``: bytes of captured graphs.   ``device``: the GPU, None where there is none."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in workspaces}
    by_place = {weight.name if weight.address is None else weight.address: weight.num_bytes for weight in weights}
    return MemoryRecord(
        weights=sum(by_place.values()),
        kv_cache=sum(cache.num_bytes for cache in caches if cache.shares_with is None),
        graphs=graphs,
        workspaces=sum(storages.values()),
        estimated_working=estimated_working,
        resident=resident_bytes(),
        device_allocated=None if device is None or device.type != "cuda" else torch.cuda.memory_allocated(device),
    )


def resident_bytes(statm: Path = Path("/proc/self/statm")) -> int | None:
    """Bytes of memory that this process has in RAM; None where the system does not tell."""
    try:
        return int(statm.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def _weight_record(name: str, tensor: torch.Tensor, num_bytes: int) -> WeightRecord:
    address = tensor.data_ptr() if tensor.device.type in ("cpu", "cuda") else None
    return WeightRecord(name, num_bytes, dtype_name(tensor.dtype), tuple(tensor.shape), address)
