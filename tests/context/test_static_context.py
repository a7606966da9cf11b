"""The registry: names, states, epoch, groups, and errors that say what to do."""

from __future__ import annotations

import pytest
import torch

from compiled_engine.context import (
    CacheKind,
    CacheLayer,
    ContextState,
    KVCacheSpec,
    StaticForwardContext,
    allocate_kv_caches,
    bind_kv_cache,
    cache_groups,
    declared_specs,
    project_groups,
    unbind_kv_cache,
)
from compiled_engine.errors import BindError, CacheNotBound, ConfigError, ContextStateError, DuplicateLayerError

FULL = KVCacheSpec(4, 2, 8, torch.float32)
WINDOW = KVCacheSpec(4, 2, 8, torch.float32, kind=CacheKind.SLIDING_WINDOW, sliding_window=16)
CROSS = KVCacheSpec(4, 2, 8, torch.float32, kind=CacheKind.CROSS)


def make_context(**specs: KVCacheSpec | None) -> StaticForwardContext:
    context = StaticForwardContext()
    for name, spec in specs.items():
        context.register(name, CacheLayer(name, spec))
    return context


def bound_context(**specs: KVCacheSpec | None) -> StaticForwardContext:
    context = make_context(**specs)
    context.seal()
    bind_kv_cache(allocate_kv_caches(declared_specs(context), 2), context)
    return context


def test_layers_are_kept_in_registration_order() -> None:
    context = make_context(b=FULL, a=None, c=WINDOW)
    assert list(context) == ["b", "a", "c"]
    assert len(context) == 3
    assert "a" in context
    assert "d" not in context
    with pytest.raises(KeyError):
        context["d"]


@pytest.mark.parametrize("name", ["", None])
def test_a_name_must_not_be_empty(name: str) -> None:
    with pytest.raises(DuplicateLayerError, match="full dotted path"):
        StaticForwardContext().register(name, CacheLayer("a", FULL))


def test_a_taken_name_is_refused_with_both_owners() -> None:
    context = make_context(a=FULL)

    class Other(CacheLayer):
        pass

    with pytest.raises(DuplicateLayerError) as refused:
        context.register("a", Other("model.b", FULL))
    assert "CacheLayer 'a'" in str(refused.value)
    assert "Other 'model.b'" in str(refused.value)


def test_one_layer_is_registered_once() -> None:
    layer = CacheLayer("a", FULL)
    context = StaticForwardContext()
    context.register("a", layer)
    with pytest.raises(DuplicateLayerError, match="registered already"):
        context.register("b", layer)
    with pytest.raises(DuplicateLayerError, match="registered already"):
        StaticForwardContext().register("a", layer)
    context.close()
    StaticForwardContext().register("a", layer)


def test_only_cache_layers_are_registered() -> None:
    with pytest.raises(ConfigError, match="Linear"):
        StaticForwardContext().register("a", torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def test_a_module_can_be_a_cache_layer() -> None:
    class Attention(torch.nn.Module, CacheLayer):
        def __init__(self, name: str) -> None:
            torch.nn.Module.__init__(self)
            CacheLayer.__init__(self, name, FULL)

    layer = Attention("a")
    context = StaticForwardContext()
    context.register("a", layer)
    context.seal()
    caches = allocate_kv_caches({"a": FULL}, 1)
    bind_kv_cache(caches, context)
    assert layer.kv_cache is caches["a"]
    assert "kv_cache" not in layer.state_dict()
    assert list(layer.parameters()) == []


def test_contexts_are_equal_only_to_themselves() -> None:
    one, other = StaticForwardContext(), StaticForwardContext()
    assert one == one
    assert one != other
    assert len({one, other}) == 2


def in_state(state: ContextState) -> StaticForwardContext:
    context = make_context(a=FULL)
    if state is not ContextState.OPEN:
        context.seal()
    if state is ContextState.BOUND:
        bind_kv_cache(allocate_kv_caches({"a": FULL}, 1), context)
    if state is ContextState.CLOSED:
        context.close()
    assert context.state is state
    return context


OPERATIONS = {
    "register": lambda context: context.register("b", CacheLayer("b", FULL)),
    "seal": lambda context: context.seal(),
    "bind": lambda context: bind_kv_cache(allocate_kv_caches({"a": FULL}, 1), context),
    "unbind": unbind_kv_cache,
    "namespace": lambda context: context.namespace("draft"),
    "groups": cache_groups,
}
REFUSED = {
    ContextState.OPEN: {"bind"},
    ContextState.SEALED: {"register", "seal", "namespace"},
    ContextState.BOUND: {"register", "seal", "namespace"},
    ContextState.CLOSED: {"register", "seal", "bind", "unbind", "namespace"},
}


@pytest.mark.parametrize("operation", list(OPERATIONS))
@pytest.mark.parametrize("state", list(ContextState))
def test_what_each_state_allows(state: ContextState, operation: str) -> None:
    """An operation that the state does not allow is refused, and the error names the state."""
    context = in_state(state)
    if operation in REFUSED[state]:
        with pytest.raises(ContextStateError, match=f"the context is {state.value}"):
            OPERATIONS[operation](context)
        assert context.state is state
    elif operation == "bind" and state is ContextState.BOUND:
        with pytest.raises(BindError, match="bound to another tensor"):
            OPERATIONS[operation](context)
    elif operation == "namespace":
        with pytest.raises(ContextStateError, match="layers of its own"):
            OPERATIONS[operation](context)
    else:
        OPERATIONS[operation](context)


def test_an_unbound_layer_names_itself_and_the_state() -> None:
    layer = CacheLayer("a", FULL)
    context = StaticForwardContext()

    def state_in_error() -> str:
        with pytest.raises(CacheNotBound, match="'a'") as refused:
            _ = layer.kv_cache
        return str(refused.value).split("state: ")[1].split(")")[0]

    assert state_in_error() == "not registered"
    context.register("a", layer)
    assert state_in_error() == "open"
    context.seal()
    assert state_in_error() == "sealed"
    bind_kv_cache(allocate_kv_caches({"a": FULL}, 1), context)
    assert layer.kv_cache.shape[0] == 1
    unbind_kv_cache(context)
    assert state_in_error() == "sealed"
    context.close()
    assert state_in_error() == "closed"


def test_a_layer_without_a_cache_is_left_out() -> None:
    context = bound_context(a=FULL, encoder=None)
    assert not context["encoder"].is_bound
    assert not context["encoder"].writes_cache
    with pytest.raises(CacheNotBound, match="no cache declared"):
        _ = context["encoder"].kv_cache
    unbind_kv_cache(context)
    assert context.state is ContextState.SEALED


def test_a_context_without_layers_can_be_bound() -> None:
    context = make_context()
    context.seal()
    runner_list: list[torch.Tensor] = []
    bind_kv_cache({}, context, runner_list)
    assert (context.state, context.epoch, runner_list) == (ContextState.BOUND, 0, [])
    unbind_kv_cache(context)
    assert context.state is ContextState.SEALED


def test_epoch_counts_changes() -> None:
    context = make_context(a=FULL, b=FULL)
    context.seal()
    caches = allocate_kv_caches(declared_specs(context), 1)
    epochs = []
    for step in (
        lambda: bind_kv_cache(caches, context),
        lambda: bind_kv_cache(caches, context),
        lambda: unbind_kv_cache(context),
        lambda: unbind_kv_cache(context),
        lambda: bind_kv_cache(caches, context),
        context.close,
        context.close,
    ):
        step()
        epochs.append(context.epoch)
    assert epochs == [1, 1, 2, 2, 3, 4, 4]


def test_group_numbers_do_not_depend_on_registration() -> None:
    wide = KVCacheSpec(4, 2, 8, torch.float32, kind=CacheKind.SLIDING_WINDOW, sliding_window=32)
    coarse = KVCacheSpec(8, 2, 8, torch.float32)
    specs = {"a": CROSS, "b": wide, "c": WINDOW, "d": coarse, "e": FULL, "f": WINDOW}
    forwards, backwards = bound_context(**specs), bound_context(**dict(reversed(specs.items())))
    assert forwards.groups == backwards.groups
    assert [group.layer_names for group in forwards.groups] == [("e",), ("d",), ("c", "f"), ("b",), ("a",)]
    assert {name: layer.group for name, layer in forwards.items()} == {"e": 0, "d": 1, "c": 2, "f": 2, "b": 3, "a": 4}
    second = forwards.groups[2]
    assert (second.kind, second.sliding_window, second.block_size) == (CacheKind.SLIDING_WINDOW, 16, 4)


def test_groups_of_specs_and_of_contexts_agree() -> None:
    specs = {"a": FULL, "b": WINDOW}
    context = make_context(**specs, encoder=None)
    assert cache_groups(specs) == cache_groups(context)
    context.seal()
    assert cache_groups(context) == context.groups == cache_groups(specs)
    with pytest.raises(BindError, match="no registered layer"):
        cache_groups({"a": KVCacheSpec(4, 2, 8, torch.float32, shares_with="b")})


def test_sharers_are_in_their_targets_group() -> None:
    context = bound_context(a=WINDOW, b=FULL, c=KVCacheSpec(4, 2, 8, torch.float32, shares_with="b"))
    assert context["c"].group == context["b"].group == 0
    assert context.groups[0].layer_names == ("b", "c")


def test_padding_can_be_left_out() -> None:
    wide = KVCacheSpec(4, 4, 8, torch.float32, kind=CacheKind.CROSS)
    context = make_context(a=FULL, b=wide)
    context.seal(pad_pages=False)
    assert [group.page_bytes for group in context.groups] == [FULL.page_bytes, wide.page_bytes]
    assert context["a"].spec is FULL
    padded = make_context(a=FULL, b=wide)
    padded.seal()
    assert [group.page_bytes for group in padded.groups] == [wide.page_bytes] * 2


def test_a_stage_takes_the_groups_of_the_whole_model() -> None:
    whole = make_context(**{f"layers.{i}": WINDOW if i % 2 else FULL for i in range(40)})
    whole.seal()
    stage = make_context(**{f"layers.{i}": WINDOW for i in range(21, 40, 2)})
    stage.seal(groups=whole.groups)
    assert [len(group.layer_names) for group in stage.groups] == [0, 10]
    assert {layer.group for layer in stage.values()} == {1}
    empty = make_context()
    empty.seal(groups=whole.groups)
    assert [group.layer_names for group in empty.groups] == [(), ()]


def test_local_layers_that_no_group_has_are_listed() -> None:
    groups = cache_groups({"a": FULL})
    stage = make_context(a=WINDOW, b=FULL, c=FULL, encoder=None)
    with pytest.raises(BindError, match="cannot project cache groups") as refused:
        project_groups(groups, stage)
    assert len(refused.value.faults) == 3
    for name in "abc":
        assert any(repr(name) in fault for fault in refused.value.faults)
    with pytest.raises(BindError):
        stage.seal(groups=groups)
    assert stage.state is ContextState.OPEN
    assert stage["a"].group == 0


def test_a_context_shows_itself() -> None:
    assert repr(bound_context(a=FULL)) == "StaticForwardContext(1 layers, bound, epoch 1)"
