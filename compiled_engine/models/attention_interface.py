"""Attention replaced through transformers' own attention interface.

``compiled_engine`` is the implementation that graphs are captured with: the opaque attention op, no mask. Its layers
are told apart by name alone, so ``discover_layers`` runs the model once under a second, recording implementation,
which notes what every layer asks for and refuses what the op cannot honour. ``compiled_engine_by_value`` calls what
each attention module holds under that name, in code that is traced with the model (see ``models/by_value.py``).
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from compiled_engine.errors import UnsupportedModelError
from compiled_engine.models.masks import MaskFunction, classify_mask
from compiled_engine.ops.attention import AttentionSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IMPLEMENTATION = "compiled_engine"
BY_VALUE = "compiled_engine_by_value"
RECORDING = "compiled_engine_recording"
LAYER_NAME = "compiled_engine_layer_name"

_HARMLESS = {
    "dropout", "scaling", "sliding_window", "softcap", "is_causal", "position_ids", "cache_position", "use_cache",
    "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep",
}  # fmt: skip
_FEATURES = {
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
    "alibi": "ALiBi",
    "head_mask": "a head mask",
}


def register_interface() -> None:
    """Make all implementations known to transformers. May be called any number of times."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, no_mask)
    ALL_ATTENTION_FUNCTIONS.register(BY_VALUE, _by_value_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(BY_VALUE, no_mask)
    ALL_ATTENTION_FUNCTIONS.register(RECORDING, _record_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(RECORDING, _record_mask)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that is captured. Query, key, value: [1, heads, tokens, head_dim].

    Returns [1, tokens, heads, head_dim]. Scale, window and cap are not passed on: they are in the layer's
    ``AttentionSpec``.
    """
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    out = query.new_empty(q.shape)
    torch.ops.compiled_engine.attention(q, k, v, out, module.compiled_engine_layer_name)
    return out.unsqueeze(0), None


def _by_value_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    out: torch.Tensor = getattr(module, BY_VALUE)(q, k, v)
    return out.unsqueeze(0), None


def no_mask(*args: Any, **kwargs: Any) -> None:
    """The mask function that is captured: the op knows from the step's metadata what each token may see."""
    return None


@dataclass
class _Recorder:
    names: dict[int, str]
    num_positions: int
    masks: dict[int, tuple[torch.Tensor, int | None]] = field(default_factory=dict)
    layers: dict[int, AttentionSpec] = field(default_factory=dict)
    keys: dict[int, tuple[torch.Tensor, str]] = field(default_factory=dict)


_RECORDER: ContextVar[_Recorder] = ContextVar("compiled_engine_recorder")


def discover_layers(model: PreTrainedModel, num_positions: int) -> tuple[AttentionSpec, ...]:
    """What every attention layer of ``model`` computes, in call order, named by the module's dotted path.

    ``model`` must have been built with the ``RECORDING`` implementation; it is switched to ``IMPLEMENTATION``, and
    every attention module learns its name. Parameters are replaced by fake tensors for the one forward pass, so no
    weight is touched and nothing large is computed; positions and masks are real, so windows are measured on the masks
    themselves. Raises ``UnsupportedModelError`` that names what cannot be honoured.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    modules = dict(model.named_modules())
    recorder = _Recorder({id(module): name for name, module in modules.items()}, num_positions)
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[str, torch.Tensor] = {
        name: fake_mode.from_tensor(parameter.detach()) for name, parameter in model.named_parameters()
    }
    num_tokens = min(4, num_positions)
    inputs = {
        "input_ids": torch.zeros(1, num_tokens, dtype=torch.long),
        "position_ids": torch.arange(num_tokens)[None],
        "use_cache": False,
    }
    token = _RECORDER.set(recorder)
    try:
        with torch.no_grad():
            torch.func.functional_call(model, fakes, kwargs=inputs)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{type(model).__name__} cannot be run by this engine: {error}") from error
    except Exception as error:  # whatever a model's forward may raise on a plain text input
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be run by this engine: its forward fails on plain token ids "
            f"({type(error).__name__}: {error})"
        ) from error
    finally:
        _RECORDER.reset(token)
    for module in modules.values():
        spec = recorder.layers.get(id(module))
        if spec is not None:
            setattr(module, LAYER_NAME, spec.layer_name)
    switch_implementation(model, RECORDING, IMPLEMENTATION)
    return tuple(recorder.layers.values())


def switch_implementation(model: PreTrainedModel, before: str, after: str) -> None:
    """Let all of ``model`` that attends with the implementation ``before`` attend with ``after``."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) == before:
            config._attn_implementation = after


def _record_mask(*args: Any, mask_function: MaskFunction | None = None, **kwargs: Any) -> torch.Tensor:
    recorder = _RECORDER.get()
    if mask_function is None:
        raise UnsupportedModelError("a mask asked for without a mask function")
    if kwargs.get("attention_mask") is not None:
        raise UnsupportedModelError("a padding mask that the model makes itself")
    window = classify_mask(mask_function, recorder.num_positions)
    # A tensor of its own for every mask: the layers are told apart by which one they are handed.
    marker = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    recorder.masks[id(marker)] = (marker, window)
    return marker


def _record_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    recorder = _RECORDER.get()
    name = recorder.names.get(id(module))
    if name is None:
        raise UnsupportedModelError(f"attention called with a {type(module).__name__} that is no module of the model")
    if id(module) in recorder.layers:
        raise UnsupportedModelError(f"layer {name!r} attends twice in one forward pass (shared layers)")
    _check_arguments(name, kwargs)
    num_heads, num_kv_heads, head_dim = _check_shapes(name, query, key, value)
    scaling, soft_cap = kwargs.get("scaling"), kwargs.get("softcap")
    # A layer that is handed the very keys of an earlier one reads that one's cache. Keeping the tensor keeps its id.
    _, owner = recorder.keys.setdefault(id(key), (key, name))
    recorder.layers[id(module)] = AttentionSpec(
        layer_name=name,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=float(scaling) if scaling is not None else head_dim**-0.5,
        sliding_window=_window(name, recorder, attention_mask, kwargs.get("sliding_window")),
        soft_cap=float(soft_cap) if soft_cap is not None else None,
        shares_with=owner if owner != name else None,
    )
    return query.new_empty(1, query.shape[2], num_heads, head_dim), None


def _check_arguments(name: str, kwargs: dict[str, Any]) -> None:
    for key, value in kwargs.items():
        if value is not None and key not in _HARMLESS:
            raise UnsupportedModelError(f"layer {name!r} uses {_FEATURES.get(key, 'an attention argument')} ({key})")
    if kwargs.get("dropout"):
        raise UnsupportedModelError(f"layer {name!r} uses attention dropout ({kwargs['dropout']}) at inference")
    if kwargs.get("is_causal") is False:
        raise UnsupportedModelError(f"layer {name!r} uses bidirectional attention (is_causal=False)")


def _check_shapes(name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[int, int, int]:
    if query.ndim != 4 or query.shape[0] != 1 or key.ndim != 4 or value.ndim != 4:
        raise UnsupportedModelError(f"layer {name!r} attends over queries of shape {tuple(query.shape)}")
    if value.shape != key.shape or query.shape[3] != key.shape[3]:
        raise UnsupportedModelError(
            f"layer {name!r} has values of another head size than its keys or queries: query {tuple(query.shape)}, "
            f"key {tuple(key.shape)}, value {tuple(value.shape)}"
        )
    if key.shape[2] != query.shape[2]:
        raise UnsupportedModelError(f"layer {name!r} attends to {key.shape[2]} keys from {query.shape[2]} tokens")
    if query.shape[1] % key.shape[1]:
        raise UnsupportedModelError(f"layer {name!r} has {query.shape[1]} heads for {key.shape[1]} key-value heads")
    return query.shape[1], key.shape[1], query.shape[3]


def _window(name: str, recorder: _Recorder, mask: torch.Tensor | None, declared: int | None) -> int | None:
    _, window = recorder.masks.get(id(mask), (None, None))
    if id(mask) not in recorder.masks:
        raise UnsupportedModelError(f"layer {name!r} uses a mask that the model builds itself, or none")
    if declared is not None and min(declared, recorder.num_positions) != (window or recorder.num_positions):
        raise UnsupportedModelError(
            f"layer {name!r} declares a sliding window of {declared}, but its mask shows {window or 'all'} positions"
        )
    return window
