"""Which layer of a model would get which cache, found out without reading a weight or compiling anything."""

from __future__ import annotations

from functools import partial

from compiled_engine.config import EngineConfig
from compiled_engine.context import (
    ContextDescription,
    StaticForwardContext,
    bind_kv_cache,
    describe,
)
from compiled_engine.models import ModelFiles, build_definition, resolve_dtype, resolve_max_model_len
from compiled_engine.ops.attention import PagedAttention
from compiled_engine.ops.cpu import CpuAttention
from compiled_engine.ops.cpu.build import load_kernels
from compiled_engine.runners.caches import allocate_cache_groups, register_attention_layers
from compiled_engine.runners.memory import available_memory, size_cache_groups
from compiled_engine.runners.precompile import kernel_folder


def describe_bindings(config: EngineConfig, files: ModelFiles) -> ContextDescription:
    """The static forward context that ``config`` gives the model in ``files``, described while its caches are bound.

    Caches are allocated but not touched, so a large one costs no memory here. Raises what loading the model raises.
    """
    dtype = resolve_dtype(config.dtype, files, config.device_type)
    definition = build_definition(files, dtype)
    max_model_len = resolve_max_model_len(definition.max_position, config.max_model_len)
    context = StaticForwardContext()
    backend = CpuAttention(dtype, load_kernels(kernel_folder(config)))
    make_layer = partial(PagedAttention, backend=backend)
    register_attention_layers(context, definition.layers, config.block_size, dtype, make_layer)
    try:
        cache_groups = size_cache_groups(config, context, max_model_len, available_memory())
        bind_kv_cache(allocate_cache_groups(context, cache_groups), context)
        return describe(context)
    finally:
        context.close()
