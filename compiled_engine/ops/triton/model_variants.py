"""The kernel variants of a whole model, from its ``config.json`` or from a few numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compiled_engine.errors import ConfigError
from compiled_engine.ops.attention import AttentionSpec
from compiled_engine.ops.triton.attention import attention_variants
from compiled_engine.ops.triton.sampling import sampling_variants
from compiled_engine.ops.triton.variants import KernelVariant


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides about its kernels: unlike attention layers, each once, and the size of its vocabulary.

    ``has_sinks``: its attention has sink logits.
    """

    layers: tuple[AttentionSpec, ...]
    vocab_size: int
    has_sinks: bool = False


def model_variants(shape: ModelShape, dtype: torch.dtype, block_size: int) -> tuple[KernelVariant, ...]:
    """All kernels of a model that computes in ``dtype`` with a cache of that type in blocks of ``block_size`` tokens.

    Logits may have ``dtype`` or float32. Raises ``ConfigError`` for sizes that cannot work.
    """
    variants: dict[str, KernelVariant] = {}
    for layer in shape.layers:
        for variant in attention_variants(layer, layer.cache_spec(block_size, dtype), dtype, has_sinks=shape.has_sinks):
            variants[variant.name] = variant
    logits_dtypes = dict.fromkeys((dtype, torch.float32))
    return (*variants.values(), *sampling_variants(shape.vocab_size, tuple(logits_dtypes)))


def layer_shape(
    num_heads: int, num_kv_heads: int, head_dim: int, window: int | None = None, soft_cap: float | None = None
) -> AttentionSpec:
    """An attention layer as far as its kernels go. Raises ``ConfigError`` for sizes that cannot work."""
    if min(num_heads, num_kv_heads, head_dim) < 1 or num_heads % num_kv_heads:
        raise ConfigError(
            f"{num_heads} heads, {num_kv_heads} KV heads and head_dim {head_dim}: give at least 1 of each, and a "
            "number of heads that is a multiple of that of KV heads"
        )
    scale = head_dim**-0.5
    return AttentionSpec("any", num_heads, num_kv_heads, head_dim, scale, sliding_window=window, soft_cap=soft_cap)


def read_model_shape(path: Path) -> ModelShape:
    """The shape of the model whose ``config.json`` is at ``path``; its text part where the model has several.

    Both kinds of layers are taken where the file does not tell which have a sliding window. Raises ``ConfigError`` for
    a file that cannot be read or lacks a number.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a model's configuration: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a model's configuration: it holds no JSON object")
    config = config.get("text_config", config)
    for name in ("num_attention_heads", "hidden_size", "vocab_size"):
        if not isinstance(config.get(name), int) or config[name] < 1:
            raise ConfigError(
                f"{path} has {name} {config.get(name)!r}: give --heads, --kv-heads, --head-dim and --vocab instead"
            )
    return ModelShape(
        layers=tuple(_layer(config, kind) for kind in _layer_kinds(config)),
        vocab_size=config["vocab_size"],
        has_sinks=config.get("model_type") == "gpt_oss",
    )


def _layer_kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return ("full_attention",)
    kinds = ("full_attention", "sliding_attention")
    layer_types = config.get("layer_types") or kinds
    return tuple(kind for kind in kinds if kind in layer_types)


def _layer(config: Mapping[str, Any], kind: str) -> AttentionSpec:
    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    is_full = kind == "full_attention"
    if is_full:
        # Gemma 4 has larger heads in these layers.
        head_dim = config.get("global_head_dim") or head_dim
        num_kv_heads = config.get("num_global_key_value_heads") or num_kv_heads
    window = None if is_full else config["sliding_window"]
    return layer_shape(num_heads, num_kv_heads, head_dim, window, config.get("attn_logit_softcapping"))


SMOLLM2 = ModelShape((layer_shape(num_heads=9, num_kv_heads=3, head_dim=64),), vocab_size=49_152)
"""HuggingFaceTB/SmolLM2-135M."""
