"""What this engine does not honour, found in a model's config or class, and refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from compiled_engine.errors import ModelError, UnsupportedModelError
from compiled_engine.models.locate import ModelFiles

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PER_BATCH_ROPE = {"dynamic", "longrope"}


def load_config(files: ModelFiles) -> PretrainedConfig:
    """transformers' config object of a decoder-only text model that it defines itself.

    Remote code is never run. Raises ``ModelError`` for an unusable config.json and ``UnsupportedModelError``, naming
    the feature, for a model that this engine does not run.
    """
    import transformers

    path = files.folder / "config.json"
    try:
        raw = json.loads(path.read_text("utf-8"))
        model_type = raw.get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read as a JSON object: {error}") from error
    if model_type not in transformers.CONFIG_MAPPING:
        if raw.get("auto_map"):
            raise UnsupportedModelError(
                f"model {files.source!r} wants remote code (model_type {model_type!r} with auto_map): this engine "
                "never runs code from a checkpoint. Use a model that transformers defines itself"
            )
        known = f"transformers {transformers.__version__} does not know it"
        raise UnsupportedModelError(f"model {files.source!r} has model_type {model_type!r}: {known}")
    try:
        config = transformers.AutoConfig.from_pretrained(str(files.folder), trust_remote_code=False)
    except Exception as error:  # config classes validate in many ways
        raise ModelError(f"transformers refuses {path}: {type(error).__name__}: {error}") from error
    for feature in _unsupported(config):
        raise UnsupportedModelError(f"model {files.source!r} ({model_type}) cannot be run by this engine: {feature}")
    return config


def _unsupported(config: PretrainedConfig) -> Iterator[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder, and only decoder-only models are supported"
    if getattr(config, "add_cross_attention", False):
        yield "it has cross-attention"
    if config.get_text_config() is not config or getattr(config, "vision_config", None) is not None:
        yield "it is a multimodal wrapper, and only text models are supported"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        yield "it is no causal language model"
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else type(quantization).__name__
        yield f"its weights are quantized ({method})"
    if any((getattr(config, name, None) or 0) > 1 for name in _EXPERT_COUNTS):
        yield "it is a mixture of experts"
    layer_types = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES
    if layer_types:
        yield f"it has layers that are no plain attention ({', '.join(sorted(map(str, layer_types)))})"
    rope_types = _rope_types(getattr(config, "rope_parameters", None)) & _PER_BATCH_ROPE
    if rope_types:
        yield f"its rotary frequencies depend on the longest sequence of a batch (rope type {', '.join(rope_types)})"


def _rope_types(parameters: Any) -> set[str]:
    # Either one dict, or one dict per layer type.
    if not isinstance(parameters, dict):
        return set()
    nested = [_rope_types(value) for value in parameters.values() if isinstance(value, dict)]
    return {str(parameters.get("rope_type", "default"))}.union(*nested)


def check_model(model: PreTrainedModel, num_layers: int) -> None:
    """Refuse a model that mixes tokens outside the ``num_layers`` attention layers that were discovered."""
    feature = None
    expected = getattr(model.config, "num_hidden_layers", None)
    if getattr(type(model), "_is_stateful", False):
        feature = "it keeps a recurrent state"
    elif any(isinstance(module, torch.nn.Conv1d) and module.kernel_size != (1,) for module in model.modules()):
        feature = "it has convolutions over tokens"
    elif num_layers == 0 or (expected is not None and num_layers != expected):
        feature = f"{num_layers} of its {expected} layers use transformers' attention interface"
    if feature:
        raise UnsupportedModelError(f"{type(model).__name__} cannot be run by this engine: {feature}")
