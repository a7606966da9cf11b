"""The lowest rung: transformers' own module with its own eager attention, one request at a time, without a cache."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from compiled_engine.compile.ledger import Ledger
from compiled_engine.compile.pipeline import Progress
from compiled_engine.config import EngineConfig
from compiled_engine.errors import UnsupportedModelError
from compiled_engine.models import ModelDefinition, ModelFiles, build_definition
from compiled_engine.models.attention_interface import IMPLEMENTATION, LAYER_NAME, switch_implementation
from compiled_engine.runners.loading import load_module
from compiled_engine_debug.bisect.compare import difference
from compiled_engine_debug.bisect.trace import Rows, Site, TensorName, Trace
from compiled_engine_debug.bisect.workload import Text

_WATCHED_EAGER = "compiled_engine_debug_eager"

Listener = Callable[[str | None, TensorName, torch.Tensor], None]
"""Called with a layer, the name of one of its tensors, and that tensor, [num_tokens, ...]."""

_LISTENER: ContextVar[Listener | None] = ContextVar("compiled_engine_debug_listener", default=None)


class TransformersOracle:
    """The model definition with the checkpoint's weights, in ``dtype`` and on the engine's device.

    Its attention is the ``eager_attention_forward`` of the file that defines the model. Raises
    ``UnsupportedModelError`` for a definition without one, and ``WeightsError``.
    """

    def __init__(self, config: EngineConfig, files: ModelFiles, dtype: torch.dtype) -> None:
        self._device = torch.device(config.device)
        self._definition = build_definition(files, dtype)
        load_module(self._definition, files, Ledger(), lambda tensors: [tensor.to(self._device) for tensor in tensors])
        self._module: Any = self._definition.module
        _use_eager_attention(self._definition)

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary."""
        return self._definition.vocab_size

    @property
    def max_position(self) -> int | None:
        """The most tokens of a text; None: no limit."""
        return self._definition.max_position

    def write(self, prompts: Sequence[Sequence[int]], max_tokens: int, progress: Progress) -> list[Text]:
        """Continue each of ``prompts`` by its ``max_tokens`` likeliest tokens, each computed from all before it."""
        texts = []
        for number, prompt in enumerate(prompts):
            progress("transformers: choosing tokens", number, len(prompts))
            ids = list(prompt)
            for _ in range(max_tokens):
                ids.append(int(self._logits(ids, 1)[-1].argmax()))
            texts.append(Text(str(number), tuple(prompt), tuple(ids[len(prompt) :])))
        return texts

    def trace(self, texts: Sequence[Text], progress: Progress) -> Trace:
        """All tensors of ``texts``, each computed in one pass."""
        trace = Trace(texts)
        for number, text in enumerate(texts):
            progress("transformers: computing", number, len(texts))
            for site, values in self._observe(text):
                start = len(text.prompt) - 1 if site.tensor is TensorName.LOGITS else 0
                trace.write(Rows(0, text.request_id, site, start, values))
        return trace

    def _observe(self, text: Text) -> list[tuple[Site, torch.Tensor]]:
        seen: list[tuple[Site, torch.Tensor]] = []

        def listen(layer: str | None, tensor: TensorName, values: torch.Tensor) -> None:
            seen.append((Site(layer, tensor), values.cpu()))

        ids = [*text.prompt, *text.continuation][: text.num_computed]
        with _listening(self._module.base_model, listen):
            logits = self._logits(ids, len(text.continuation))
        # The cache of the engine holds what its attention is given.
        stored = {TensorName.KEY: TensorName.STORED_KEY, TensorName.VALUE: TensorName.STORED_VALUE}
        seen += [(Site(site.layer, stored[site.tensor]), values) for site, values in seen if site.tensor in stored]
        return [*seen, (Site(None, TensorName.LOGITS), logits.cpu())]

    @torch.inference_mode()
    def _logits(self, ids: Sequence[int], num_rows: int) -> torch.Tensor:
        tokens = torch.tensor([list(ids)], device=self._device)
        positions = torch.arange(len(ids), device=self._device)[None]
        return self._module(input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=num_rows).logits[
            0
        ]


def measure_noise(trace: Trace, exact: Trace) -> dict[Site, float]:
    """By site, how far two traces of the same texts are apart at most, relative to the second one's scale."""
    wider = {(request, site): values for request, site, values in exact.items()}
    noise: dict[Site, float] = {}
    for request, site, values in trace.items():
        found = difference(values, wider[request, site])
        if not found.not_finite:
            noise[site] = max(noise.get(site, 0.0), found.relative)
    return noise


def _use_eager_attention(definition: ModelDefinition) -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for module in definition.module.modules():
        if hasattr(module, LAYER_NAME):
            _eager_attention(module)
    ALL_ATTENTION_FUNCTIONS.register(_WATCHED_EAGER, _watched_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_WATCHED_EAGER, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    switch_implementation(definition.module, IMPLEMENTATION, _WATCHED_EAGER)


def _eager_attention(module: torch.nn.Module) -> Callable[..., tuple[torch.Tensor, Any]]:
    function = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if function is None:
        raise UnsupportedModelError(
            f"{type(module).__module__} has no eager_attention_forward, so transformers cannot be the oracle"
        )
    return function


def _watched_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    """The definition's own eager attention; query, key and value are [1, heads, tokens, head_dim]."""
    out, weights = _eager_attention(module)(module, query, key, value, attention_mask, **kwargs)
    listener = _LISTENER.get()
    if listener is not None:
        layer = getattr(module, LAYER_NAME)
        for name, tensor in ((TensorName.QUERY, query), (TensorName.KEY, key), (TensorName.VALUE, value)):
            listener(layer, name, tensor[0].transpose(0, 1))
        listener(layer, TensorName.OUT, out[0])
    return out, weights


@contextmanager
def _listening(backbone: torch.nn.Module, listener: Listener) -> Iterator[None]:
    def hear(module: torch.nn.Module, arguments: Any, output: Any) -> None:
        listener(None, TensorName.HIDDEN, output.last_hidden_state[0])

    token = _LISTENER.set(listener)
    hook = backbone.register_forward_hook(hear)
    try:
        yield
    finally:
        hook.remove()
        _LISTENER.reset(token)
