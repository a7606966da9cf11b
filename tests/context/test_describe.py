"""The printable and the JSON view of a context."""

from __future__ import annotations

import json

import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.context import (
    CacheKind,
    CacheLayer,
    KVCacheSpec,
    StaticForwardContext,
    allocate_kv_caches,
    bind_kv_cache,
    declared_specs,
    describe,
)
from compiled_engine.testing import ContextSnapshot, kv_caches_for, static_forward_contexts

FULL = KVCacheSpec(4, 2, 8, torch.float32)
SPECS = {
    "layers.0": FULL,
    "layers.1": KVCacheSpec(4, 1, 8, torch.bfloat16, kind=CacheKind.SLIDING_WINDOW, sliding_window=16),
    "layers.2": KVCacheSpec(4, 2, 8, torch.float32, shares_with="layers.0"),
    "encoder": None,
}


def fill(part: StaticForwardContext) -> StaticForwardContext:
    for name, spec in SPECS.items():
        part.register(name, CacheLayer(name, spec))
    return part


def test_table_of_a_bound_context() -> None:
    context = fill(StaticForwardContext())
    context.seal(pad_pages=False)
    bind_kv_cache(allocate_kv_caches(declared_specs(context), 3), context)
    address = {name: f"{context[name].kv_cache.data_ptr():#x}" for name in declared_specs(context)}
    title, *rows = str(describe(context)).splitlines()
    assert title == f"4 layers, {3 * (512 + 128)} bytes, state bound, epoch 1"
    assert [row.split() for row in rows] == [
        ["layer", "kind", "group", "shape", "dtype", "bytes", "address", "shares", "with", "epoch", "state"],
        ["layers.0", "full", "0", "3x4x2x2x8", "float32", "1536", address["layers.0"], "-", "1", "bound"],
        [
            *("layers.1", "sliding_window", "16", "1", "3x4x2x1x8", "bfloat16"),
            *("384", address["layers.1"], "-", "1", "bound"),
        ],
        ["layers.2", "full", "0", "3x4x2x2x8", "float32", "1536", address["layers.0"], "layers.0", "1", "bound"],
        ["encoder", "no", "cache", "-", "-", "-", "-", "-", "-", "1", "bound"],
    ]
    assert len({row.index(cell) for row, cell in zip(rows[1:], ["bound"] * 4, strict=True)}) == 1, "columns line up"


def test_unbound_contexts_have_no_shape_and_no_address() -> None:
    context = fill(StaticForwardContext())
    open_view = describe(context).to_json()
    assert open_view["state"] == "open"
    assert all(
        layer["group"] is layer["shape"] is layer["address"] is layer["bytes"] is None for layer in open_view["layers"]
    )
    context.seal()
    sealed = describe(context).to_json()
    assert [layer["group"] for layer in sealed["layers"]] == [0, 1, 0, None]
    assert [layer["page_bytes"] for layer in sealed["layers"]] == [512, 512, 512, None]
    assert sealed["total_bytes"] == 0
    context.close()
    assert str(describe(context)).startswith("0 layers, 0 bytes, state closed, epoch 1")


def test_namespaces_have_a_state_each() -> None:
    engine = StaticForwardContext()
    target, draft = fill(engine.namespace("target")), fill(engine.namespace("draft"))
    for part in (target, draft):
        part.seal()
    bind_kv_cache(allocate_kv_caches(declared_specs(target), 1), target)
    view = describe(engine)
    assert view.namespaces == ("target", "draft")
    assert "namespaces target, draft" in str(view)
    assert [(layer.layer, layer.state, layer.epoch) for layer in view.layers] == [
        *((f"target/{name}", "bound", 1) for name in SPECS),
        *((f"draft/{name}", "sealed", 0) for name in SPECS),
    ]
    assert view.layers[2].shares_with == "target/layers.0"
    assert [layer.layer for layer in describe(target).layers] == list(SPECS)


@given(data=st.data(), context=static_forward_contexts())
def test_view_equals_the_context(data: st.DataObject, context: StaticForwardContext) -> None:
    """Property: the JSON view survives a round trip, says what the context holds, and looking changes nothing."""
    if data.draw(st.booleans()):
        bind_kv_cache(data.draw(kv_caches_for(context)), context)
    before = ContextSnapshot.of(context)
    view = describe(context)
    assert ContextSnapshot.of(context) == before
    loaded = json.loads(json.dumps(view.to_json()))
    assert loaded == view.to_json()
    assert [row["layer"] for row in loaded["layers"]] == list(context)
    for row, layer in zip(loaded["layers"], context.values(), strict=True):
        assert (row["kind"] is None) == (layer.spec is None)
        assert row["address"] == (layer.kv_cache.data_ptr() if layer.is_bound else None)
        assert row["shape"] == (list(layer.kv_cache.shape) if layer.is_bound else None)
        assert row["group"] == (None if layer.spec is None else layer.group)
    owners = {id(layer.kv_cache): layer for layer in context.values() if layer.is_bound}
    assert loaded["total_bytes"] == sum(
        layer.kv_cache.shape[0] * layer.spec.padded_page_bytes for layer in owners.values() if layer.spec is not None
    )
