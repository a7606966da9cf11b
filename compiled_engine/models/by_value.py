"""A model whose attention layers read their caches in traced code, for compilers that take caches by value."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from compiled_engine.errors import UnsupportedModelError
from compiled_engine.models.attention_interface import BY_VALUE, IMPLEMENTATION, LAYER_NAME, switch_implementation
from compiled_engine.models.definition import ModelDefinition
from compiled_engine.ops.by_value import ByValueAttention, ByValueLayer

GroupInputs = tuple[tuple[torch.Tensor, ...], ...]
"""Per cache group, what ``ByValueAttention.host_inputs`` made, on the device."""


class ByValueModel:
    """A causal language model in two parts, both to be compiled: up to its last hidden states, and its head.

    ``definition``'s module attends through ``attention`` over the caches of ``layers`` from then on; its parameters
    are used where they are. Raises ``UnsupportedModelError`` for a model whose head cannot be called alone.
    """

    def __init__(
        self, definition: ModelDefinition, layers: Mapping[str, ByValueLayer], attention: ByValueAttention
    ) -> None:
        module = definition.module
        self._step = _Step(attention)
        for part in module.modules():
            if (name := getattr(part, LAYER_NAME, None)) is not None:
                setattr(part, BY_VALUE, _LayerCall(layers[name], self._step))
        switch_implementation(module, IMPLEMENTATION, BY_VALUE)
        self._backbone = module.base_model
        self._head = _head_of(module)

    def hidden_states(
        self, input_ids: torch.Tensor, positions: torch.Tensor, inputs: GroupInputs | None
    ) -> torch.Tensor:
        """Last hidden states [num_tokens, hidden_size] of ``input_ids`` at ``positions``, both int64 [num_tokens].

        Writes the tokens' K/V into the caches. ``inputs`` None: a profile run, which has no caches; attention gives
        zeros.
        """
        self._step.inputs = inputs
        output = self._backbone(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        # Tracing sees no change then, and nothing of the step stays alive.
        self._step.inputs = None
        hidden_states: torch.Tensor = output.last_hidden_state[0]
        return hidden_states

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [num_rows, vocab_size] of ``hidden_states`` [num_rows, hidden_size]."""
        output = self._head(inputs_embeds=hidden_states[None], use_cache=False)
        logits: torch.Tensor = output.logits[0]
        return logits


class _Step:
    """What the layers of a model find during one call."""

    def __init__(self, attention: ByValueAttention) -> None:
        self.attention = attention
        self.inputs: GroupInputs | None = None


class _LayerCall:
    """What an attention module calls."""

    def __init__(self, layer: ByValueLayer, step: _Step) -> None:
        self._layer = layer
        self._step = step

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        inputs = self._step.inputs
        if inputs is None:
            return torch.zeros_like(query)
        return self._step.attention.attend(self._layer, query, key, value, inputs[self._layer.group])


class _GivenHiddenStates(torch.nn.Module):
    """In the place of a model's body: it answers with the hidden states that it is called with."""

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> _BodyOutput:
        return _BodyOutput(inputs_embeds)


class _BodyOutput:
    """What a head takes from its model's body: hidden states, and None for all else, whatever its class calls that."""

    def __init__(self, hidden_states: torch.Tensor) -> None:
        self.last_hidden_state = hidden_states

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]


def _head_of(module: Any) -> Any:
    """A second module that shares all of ``module`` but its body, so that its forward computes the head alone.

    What a model does after its body, such as a cap of its logits, stays transformers' own code.
    """
    prefix = module.base_model_prefix
    if prefix not in module._modules:
        raise UnsupportedModelError(f"{type(module).__name__} has no body apart from its head ({prefix!r})")
    head = copy.copy(module)
    # A copy of a module shares the table of its parts, where the body is to be exchanged in one of them alone.
    head._modules = dict(module._modules)
    setattr(head, prefix, _GivenHiddenStates())
    return head
