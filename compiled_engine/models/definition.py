"""A model definition: transformers' own module, with attention replaced, and what the rest of the engine asks of it."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from compiled_engine.errors import UnsupportedModelError
from compiled_engine.models.attention_interface import RECORDING, discover_layers, register_interface
from compiled_engine.models.checkpoint import Checkpoint
from compiled_engine.models.limits import max_positions
from compiled_engine.models.locate import ModelFiles
from compiled_engine.models.support import check_model, load_config
from compiled_engine.models.weights import ExpectedWeights, expected_weights, model_name, resolve_names
from compiled_engine.ops.attention import AttentionSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_POSITIONS_WITHOUT_LIMIT = 4096


@dataclass(frozen=True)
class ModelDefinition:
    """A causal language model without its weights.

    ``module`` is transformers' ``...ForCausalLM`` in ``dtype``, in eval mode; its parameters are allocated, never
    touched. Every attention module carries its ``layers`` entry's name as ``compiled_engine_layer_name`` and calls
    ``torch.ops.compiled_engine.attention``. ``layers`` is in call order. ``max_position`` is None when the config names
    no limit. ``weight_names`` maps every ``state_dict`` name to the checkpoint's. ``sources`` is what else the graphs
    depend on: the transformers version and the sha256 of the modeling file.
    """

    module: PreTrainedModel
    config: PretrainedConfig
    dtype: torch.dtype
    layers: tuple[AttentionSpec, ...]
    vocab_size: int
    hidden_size: int
    max_position: int | None
    expected: ExpectedWeights
    weight_names: Mapping[str, str]
    sources: Mapping[str, str]


def build_definition(files: ModelFiles, dtype: torch.dtype, checkpoint: Checkpoint | None = None) -> ModelDefinition:
    """Build the definition of the model in ``files`` for arithmetic in ``dtype``, and check its checkpoint against it.

    Only headers of the weights are read (of ``checkpoint``, when the caller has it open). Raises
    ``UnsupportedModelError`` that names the feature this engine cannot honour, ``WeightsError`` when checkpoint and
    definition disagree, ``ModelError`` for an unusable config.
    """
    config = load_config(files)
    register_interface()
    module = _build_module(config, dtype)
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        raise UnsupportedModelError(f"{type(module).__name__} cannot choose rows for its head (no logits_to_keep)")
    stored = checkpoint if checkpoint is not None else Checkpoint(files)
    _untie_what_is_stored_twice(module, stored)
    max_position = max_positions(config)
    layers = discover_layers(module, max_position or _POSITIONS_WITHOUT_LIMIT)
    check_model(module, len(layers))
    expected = expected_weights(module)
    names = resolve_names(stored, expected)
    return ModelDefinition(
        module=module,
        config=module.config,
        dtype=dtype,
        layers=layers,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        max_position=max_position,
        expected=expected,
        weight_names=names,
        sources=_sources(module),
    )


def _build_module(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    # Parameters are torch.empty and stay untouched; buffers such as inv_freq are computed for real.
    try:
        with no_init_weights(), torch.device("cpu"):
            module = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=RECORDING, trust_remote_code=False
            )
    except Exception as error:  # older definitions look the implementation up in tables of their own
        raise UnsupportedModelError(
            f"transformers cannot build a {config.model_type} model whose attention is replaced "
            f"({type(error).__name__}: {error})"
        ) from error
    module.tie_weights()
    _keep_in_float32(module, dtype)
    module.eval().requires_grad_(False)
    return module


def _keep_in_float32(module: PreTrainedModel, dtype: torch.dtype) -> None:
    """Parameters that a model wants in float32 even in 16-bit arithmetic; from_config does not see to it."""
    patterns = set(module._keep_in_fp32_modules_strict or ()) if dtype in (torch.bfloat16, torch.float16) else set()
    if dtype == torch.float16:
        patterns |= set(module._keep_in_fp32_modules or ())
    if not patterns:
        return
    matcher = re.compile("|".join(pattern.replace("*", ".*") for pattern in patterns))
    for name, parameter in module.named_parameters():
        if matcher.search(name):
            parameter.data = torch.empty(parameter.shape, dtype=torch.float32)


def _untie_what_is_stored_twice(module: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """A tied head follows the checkpoint: where that stores both, the head gets a tensor of its own."""
    expected = expected_weights(module)
    if not expected.tied:
        return
    stored = {name for key in checkpoint if (name := model_name(key, expected)) is not None}
    for alias, owner in expected.tied.items():
        if alias in stored and owner in stored:
            parent, _, attribute = alias.rpartition(".")
            own = torch.empty_like(module.get_parameter(owner))
            setattr(module.get_submodule(parent), attribute, torch.nn.Parameter(own, requires_grad=False))
            module.config.tie_word_embeddings = False


def _sources(module: PreTrainedModel) -> dict[str, str]:
    import transformers

    file = inspect.getsourcefile(type(module))
    sources = {"transformers": transformers.__version__}
    if file:
        sources[Path(file).name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return sources
