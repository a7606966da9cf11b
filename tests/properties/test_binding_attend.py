"""Attention as it binds in a step: who writes, and which group's slots and tables a layer uses."""

from __future__ import annotations

import threading
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.context import (
    AttentionMetadata,
    CacheLayer,
    ForwardContext,
    KVCacheSpec,
    StaticForwardContext,
    bind_kv_cache,
    get_forward_context,
    key_cache,
    set_forward_context,
    token_slots,
    value_cache,
)
from compiled_engine.ops.attention import AttentionSpec, PagedAttention, attend
from compiled_engine.testing import StorageContents, kv_caches_for, static_forward_contexts


class RecordingBackend:
    """Stores K and V at their slots, and notes which metadata attention was given."""

    def __init__(self) -> None:
        self.attended: list[AttentionMetadata] = []

    def for_layer(self, spec: AttentionSpec) -> RecordingBackend:
        return self

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
        if key is not None and value is not None:
            token_slots(kv_cache)[slots] = torch.stack((key, value), 1)
        self.attended.append(metadata)


def make_attention(name: str, spec: KVCacheSpec | None) -> CacheLayer:
    assert spec is not None
    attention = AttentionSpec(name, spec.num_kv_heads, spec.num_kv_heads, spec.head_dim, 1.0, spec.sliding_window)
    return PagedAttention(attention, spec, RecordingBackend())  # type: ignore[arg-type]


def make_step(context: StaticForwardContext, slots: list[int]) -> ForwardContext:
    """One token in each group, each group with a slot and metadata of its own."""
    metadata = tuple(AttentionMetadata(*(torch.zeros(1),) * 3) for _ in context.groups)
    return ForwardContext(context, metadata, tuple(torch.tensor([slot]) for slot in slots), 1, 1)


@given(
    data=st.data(),
    context=static_forward_contexts(min_layers=1, without_cache=False, pad_pages=False, make_layer=make_attention),
)
def test_attention_writes_its_own_slot_and_sharers_write_nothing(
    data: st.DataObject, context: StaticForwardContext
) -> None:
    """Property: ``attend`` puts K and V at the slot of the layer's group, in the layer's cache and nowhere else.

    Through a layer that shares another's cache it writes no byte. Attention gets the metadata of the layer's group.
    """
    caches = data.draw(kv_caches_for(context))
    bind_kv_cache(caches, context)
    slots = []
    for group in context.groups:
        num_blocks = caches[group.layer_names[0]].shape[0]
        slots.append(data.draw(st.integers(0, num_blocks * group.block_size - 1)))
    step = make_step(context, slots)
    for value, (name, layer) in enumerate(context.items(), start=1):
        assert isinstance(layer, PagedAttention)
        spec = layer.spec
        assert spec is not None
        key = torch.full((1, spec.num_kv_heads, spec.head_dim), float(value), dtype=spec.dtype)
        contents = StorageContents(caches.values())
        attend(layer, key, key, -key, torch.empty_like(key), step)
        assert layer.backend.attended[-1] is step.attention_metadata[layer.group]
        changed = contents.changed_bytes()
        if spec.shares_with is not None:
            assert changed == set(), f"{name!r} shares a cache, but wrote to it"
            continue
        token = token_slots(layer.kv_cache)[slots[layer.group]]
        assert changed <= set(range(token.data_ptr(), token.data_ptr() + token.nbytes))
        block, offset = divmod(slots[layer.group], spec.block_size)
        assert torch.equal(key_cache(layer.kv_cache)[block, offset], key[0])
        assert torch.equal(value_cache(layer.kv_cache)[block, offset], -key[0])


@given(data=st.data(), spec=st.just(KVCacheSpec(2, 1, 2, torch.float32)))
def test_steps_of_two_engines_in_two_threads(data: st.DataObject, spec: KVCacheSpec) -> None:
    """Property: two engines with equal layer names, run in two threads at once, write only to their own caches."""
    values = data.draw(st.lists(st.integers(1, 100), min_size=1, max_size=4))
    failures: list[BaseException] = []
    barrier = threading.Barrier(2)

    def engine(sign: int) -> None:
        try:
            context = StaticForwardContext()
            context.register("a", make_attention("a", spec))
            context.register("b", make_attention("b", replace(spec, shares_with="a")))
            context.seal()
            cache = torch.zeros(spec.shape(2))
            bind_kv_cache({"a": cache, "b": cache}, context)
            for value in values:
                barrier.wait()
                with set_forward_context(make_step(context, [1])):
                    layer = get_forward_context().static_context["a"]
                    assert isinstance(layer, PagedAttention)
                    key = torch.full((1, 1, 2), float(sign * value))
                    attend(layer, key, key, key, torch.empty_like(key), get_forward_context())
                    barrier.wait()
                    assert torch.equal(token_slots(cache)[1], key.expand(2, 1, 2))
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=engine, args=(sign,)) for sign in (1, -1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
