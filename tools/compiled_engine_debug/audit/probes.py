"""Looking inside a step: attention's launches, the model's inputs, its logits. Everything is put back on leaving."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch

from compiled_engine.compile.graphs.recording import RecordingBackend
from compiled_engine.compile.launch import Launch, Work
from compiled_engine.compile.plan import AttentionStep
from compiled_engine.context import AttentionMetadata
from compiled_engine.ops.attention import LayerAttention, PagedAttention
from compiled_engine_debug.audit.step import AttentionCall
from compiled_engine_debug.audit.subject import Subject


class Listener(Protocol):
    """Told of what goes on in a step."""

    def before_attention(self, call: AttentionCall) -> None: ...

    def after_attention(self, call: AttentionCall) -> None: ...

    def model_given(self, input_ids: torch.Tensor, positions: torch.Tensor) -> None: ...

    def logits_made(self, logits: torch.Tensor) -> None: ...


@contextmanager
def probed(subject: Subject, listener: Listener) -> Iterator[None]:
    """Inside, ``listener`` is told of the steps of ``subject``, as far as they can be seen.

    Attention that runs eagerly is seen everywhere, attention in a replayed graph where graphs are emulated: a CUDA
    graph replays without coming by.
    """
    with ExitStack() as stack:
        for name, layer in subject.context.items():
            if isinstance(layer, PagedAttention):
                wrapped = ProbedAttention(name, layer.group, layer.computation, listener)
                stack.enter_context(replaced(layer, "computation", wrapped))
        if isinstance(subject.backend, RecordingBackend):
            launch = _probed_launch(subject, subject.backend.replay_launch, listener)
            stack.enter_context(replaced(subject.backend, "replay_launch", launch))
        if subject.model is not None:
            stack.enter_context(replaced(subject.model, "hidden_states", _told_of_inputs(subject, listener)))
            stack.enter_context(replaced(subject.model, "logits", _told_of_logits(subject, listener)))
        yield


@contextmanager
def replaced(owner: object, attribute: str, value: object) -> Iterator[None]:
    """Inside, ``owner`` has ``value`` as its ``attribute``."""
    own = attribute in vars(owner)
    before = getattr(owner, attribute)
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, attribute, before)
        else:
            delattr(owner, attribute)


class ProbedAttention:
    """A ``LayerAttention`` that tells a listener what another one is given, before and after it computes."""

    def __init__(self, layer: str, group: int, inner: LayerAttention, listener: Listener) -> None:
        self._layer, self._group, self._inner, self._listener = layer, group, inner, listener

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
        """See ``LayerAttention``."""
        call = call_of(self._layer, self._group, query, key, value, out, kv_cache, slots, metadata)
        self._listener.before_attention(call)
        self._inner.write_and_attend(query, key, value, out, kv_cache, slots, metadata, sinks)
        self._listener.after_attention(call)


def call_of(
    layer: str,
    group: int,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    metadata: AttentionMetadata,
) -> AttentionCall:
    """The arguments of ``LayerAttention.write_and_attend``, with copies of what does not last."""
    arrays = {
        f"slot_mapping of group {group}": slots.clone(),
        "query_start_loc": metadata.query_start_loc.clone(),
        "seq_lens": metadata.seq_lens.clone(),
    }
    return AttentionCall(
        layer=layer,
        group=group,
        query=query,
        key=None if key is None else key.clone(),
        value=None if value is None else value.clone(),
        out=out,
        kv_cache=kv_cache,
        arrays=arrays,
        block_table=metadata.block_table.clone(),
    )


def _probed_launch(subject: Subject, inner: Launch, listener: Listener) -> Launch:
    """A launch for replays that recognises attention by the name of its launch."""
    steps = () if subject.plan is None else subject.plan.steps
    layers = {step.launch_name: step.layer_name for step in steps if isinstance(step, AttentionStep)}

    def launch(name: str, work: Work) -> Sequence[torch.Tensor]:
        arguments: tuple[Any, ...] = getattr(work, "args", ())
        if name not in layers or not arguments:
            return inner(name, work)
        layer = layers[name]
        call = call_of(layer, subject.group_of(layer), *arguments[:7])
        listener.before_attention(call)
        result = inner(name, work)
        listener.after_attention(call)
        return result

    return launch


def _told_of_inputs(subject: Subject, listener: Listener) -> Callable[..., torch.Tensor]:
    inner = subject.model.hidden_states  # type: ignore[union-attr]

    def hidden_states(input_ids: torch.Tensor, positions: torch.Tensor, *rest: Any) -> torch.Tensor:
        listener.model_given(input_ids, positions)
        return inner(input_ids, positions, *rest)

    return hidden_states


def _told_of_logits(subject: Subject, listener: Listener) -> Callable[..., torch.Tensor]:
    inner = subject.model.logits  # type: ignore[union-attr]

    def logits(*arguments: Any) -> torch.Tensor:
        made = inner(*arguments)
        listener.logits_made(made)
        return made

    return logits
