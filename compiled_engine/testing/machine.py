"""The state machine that tries to make cache binding go wrong."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from compiled_engine.context import ContextState, declared_specs, layer_order, sharing_roots
from compiled_engine.errors import BindError, CacheNotBound, ContextStateError

from .corruptions import corrupt, possible_corruptions
from .runner import BindableRunner
from .snapshot import ContextSnapshot, StorageContents, token_bytes

_Error = TypeVar("_Error", bound=Exception)

_MAX_CACHE_SETS = 2
_ENGINES = st.integers(0, 1)


@dataclass
class _Engine:
    """One runner, the caches allocated for it, and which of them ought to be bound."""

    runner: BindableRunner
    cache_sets: list[Mapping[str, torch.Tensor]] = field(default_factory=list)
    bound: Mapping[str, torch.Tensor] | None = None
    closed: bool = False

    def tensors(self) -> list[torch.Tensor]:
        return [cache for cache_set in self.cache_sets for cache in cache_set.values()]


class KVBindingMachine(RuleBasedStateMachine):
    """Random sequences of allocate, bind, unbind, write and close, right and wrong, on two runners side by side.

    Use ``for_runner`` to make the class for your runner, and its ``TestCase`` to run it under pytest or unittest.

    What it checks:

    * Identity: ``layer.kv_cache`` is the tensor that was bound. Two layers have one tensor exactly when sharing was
      declared. The list of caches is in layer order.
    * Isolation: a write through a layer changes the bytes of its token and no other byte, of any cache, bound or not,
      of either runner. A layer that shares another's cache changes nothing.
    * Refusal: every ``Corruption``, another set of caches over a bound one, and every operation in the wrong state
      raise the right error, which names the layer, and change nothing: neither layers, list, state nor epoch.
    * Epoch: counts the operations that changed a layer, and only those. Unbound layers raise ``CacheNotBound``.
    * Teardown: after ``close`` no cache is alive.
    """

    runner_factory: ClassVar[Callable[[], BindableRunner]]

    @classmethod
    def for_runner(cls, factory: Callable[[], BindableRunner]) -> type[KVBindingMachine]:
        """The machine for the runners that ``factory`` makes: sealed, unbound, each with a context of its own."""
        return type(cls.__name__, (cls,), {"runner_factory": staticmethod(factory), "__module__": cls.__module__})

    @initialize()
    def start(self) -> None:
        self.engines = [_Engine(type(self).runner_factory()) for _ in range(2)]
        contexts = [engine.runner.static_context for engine in self.engines]
        assert contexts[0] is not contexts[1], "the factory must give every runner a context of its own"
        for context in contexts:
            assert context.state is ContextState.SEALED, f"the factory must hand over a sealed context, not {context!r}"
        for place in range(2):
            self.allocate(place, 2)

    @rule(engine=_ENGINES, num_blocks=st.integers(1, 3))
    def allocate(self, engine: int, num_blocks: int) -> None:
        """New caches, which replace an unbound set when there are enough."""
        it = self.engines[engine]
        if it.closed:
            return
        if len(it.cache_sets) == _MAX_CACHE_SETS:
            it.cache_sets = [cache_set for cache_set in it.cache_sets if cache_set is it.bound]
        new = it.runner.allocate(num_blocks)
        taken = {tensor.untyped_storage().data_ptr() for engine in self.engines for tensor in engine.tensors()}
        for name, cache in new.items():
            assert cache.untyped_storage().data_ptr() not in taken, f"the new cache of {name!r} is memory in use"
        it.cache_sets.append(new)
        self._remember_contents()

    @precondition(lambda self: any(engine.cache_sets for engine in self.engines))
    @rule(engine=_ENGINES, choice=st.integers(0, _MAX_CACHE_SETS - 1), with_list=st.booleans())
    def bind(self, engine: int, choice: int, with_list: bool) -> None:
        """Bind a set: accepted when nothing or the very same set is bound."""
        it = self.engines[engine]
        if not it.cache_sets:
            return
        caches = it.cache_sets[choice % len(it.cache_sets)]
        runner_list: list[torch.Tensor] | None = [] if with_list else None
        before = ContextSnapshot.of(it.runner.static_context)
        if it.bound is not None and caches is not it.bound and caches:
            faults = self._refused(it, caches, runner_list)
            for name in caches:
                assert any(repr(name) in fault for fault in faults), f"no fault names {name!r}: {faults}"
            return
        it.runner.bind(caches, runner_list)
        context = it.runner.static_context
        assert context.epoch == before.epoch + (it.bound is None and len(caches) > 0), "epoch must count changes"
        it.bound = caches
        if runner_list is not None:
            expected = [caches[name] for name in layer_order(declared_specs(context))]
            assert len(runner_list) == len(expected), "the list must hold one cache for each layer with a spec"
            for position, (cache, wanted) in enumerate(zip(runner_list, expected, strict=True)):
                assert cache is wanted, f"the list's cache {position} is not that of the layer in this place"

    @precondition(lambda self: any(engine.cache_sets for engine in self.engines))
    @rule(engine=_ENGINES, data=st.data(), with_list=st.booleans())
    def bind_corrupted(self, engine: int, data: st.DataObject, with_list: bool) -> None:
        """A set with one fault is refused, and the error names the layer."""
        it = self.engines[engine]
        if not it.cache_sets:
            return
        caches = it.bound if it.bound is not None else it.cache_sets[-1]
        context = it.runner.static_context
        # Hypothesis draws names and never tensors: it would keep them alive.
        possible = possible_corruptions(caches, context)
        kind = data.draw(st.sampled_from(list(possible)), label="corruption")
        corruption = corrupt(caches, context, kind, data.draw(st.sampled_from(possible[kind]), label="layers"))
        faults = self._refused(it, corruption.kv_caches, [] if with_list else None)
        assert any(repr(corruption.layer_name) in fault for fault in faults), (
            f"{corruption.kind.value} of {corruption.layer_name!r} is not reported: {faults}"
        )

    @precondition(lambda self: any(engine.cache_sets for engine in self.engines))
    @rule(engine=_ENGINES)
    def bind_with_used_list(self, engine: int) -> None:
        """A list that is not empty is refused and left as it was."""
        it = self.engines[engine]
        if it.cache_sets:
            self._refused(it, it.bound if it.bound is not None else it.cache_sets[-1], [torch.zeros(1)])

    @rule(engine=_ENGINES)
    def unbind(self, engine: int) -> None:
        """Unbinding restores the unbound state and may be repeated."""
        it = self.engines[engine]
        if it.closed:
            return
        context = it.runner.static_context
        epoch = context.epoch
        it.runner.unbind()
        assert context.epoch == epoch + (it.bound is not None and len(it.bound) > 0), "epoch must count changes"
        it.bound = None

    @precondition(lambda self: any(engine.bound for engine in self.engines))
    @rule(data=st.data(), value=st.integers(1, 100))
    def write(self, data: st.DataObject, value: int) -> None:
        """One token through one layer: its bytes change, all others stay."""
        bound = [place for place, engine in enumerate(self.engines) if engine.bound]
        it = self.engines[data.draw(st.sampled_from(bound), label="engine")]
        assert it.bound is not None
        context = it.runner.static_context
        name = data.draw(st.sampled_from(layer_order(declared_specs(context))), label="layer")
        cache = it.bound[name]
        block = data.draw(st.integers(0, cache.shape[0] - 1), label="block")
        offset = data.draw(st.integers(0, cache.shape[1] - 1), label="offset")
        heads, head_dim = cache.shape[3:]
        key = torch.arange(value, value + heads * head_dim).reshape(heads, head_dim).to(cache.device, cache.dtype)
        self._remember_contents()
        it.runner.write(name, block, offset, key, -key)
        changed = self.contents.changed_bytes()
        if context[name].writes_cache:
            assert changed <= set(token_bytes(cache, block, offset)), f"a write through {name!r} went elsewhere"
            assert torch.equal(cache[block, offset], torch.stack((key, -key))), f"{name!r} did not store its K and V"
        else:
            assert not changed, f"{name!r} shares another layer's cache, but writes to it"
        self._remember_contents()

    @rule(engine=_ENGINES)
    def close(self, engine: int) -> None:
        """After closing, no cache is alive and nothing works any more."""
        it = self.engines[engine]
        it.runner.close()
        caches = [weakref.ref(tensor) for tensor in it.tensors()]
        it.cache_sets, it.bound, it.closed = [], None, True
        self._remember_contents()
        alive = sum(reference() is not None for reference in caches)
        assert alive == 0, f"{alive} of {len(caches)} caches are alive after close"
        for operation in (it.runner.unbind, lambda: it.runner.bind({})):
            refusal = _error_of(operation, ContextStateError)
            assert refusal is not None, "a closed context must refuse to bind and unbind"
            assert ContextState.CLOSED.value in str(refusal), "the error must name the state"

    @precondition(lambda self: any(engine.closed for engine in self.engines))
    @rule()
    def start_again(self) -> None:
        """Another runner in the place of a closed one."""
        place = next(place for place, engine in enumerate(self.engines) if engine.closed)
        self.engines[place] = _Engine(type(self).runner_factory())
        self.allocate(place, 2)

    @invariant()
    def layers_have_what_was_bound(self) -> None:
        """Identity, alias matrix, state, and the error for what is unbound."""
        for engine in self.engines:
            context = engine.runner.static_context
            if engine.closed:
                assert context.state is ContextState.CLOSED
                continue
            assert context.state is (ContextState.SEALED if engine.bound is None else ContextState.BOUND)
            for name, layer in context.items():
                if engine.bound is not None and layer.spec is not None:
                    assert layer.kv_cache is engine.bound[name], f"{name!r} has another tensor than was bound"
                    continue
                refusal = _error_of(lambda layer=layer: layer.kv_cache, CacheNotBound)  # type: ignore[misc]
                assert refusal is not None, f"{name!r} is unbound, but has a cache"
                assert refusal.layer_name == layer.layer_name, "the error must name the layer"
            if engine.bound is not None:
                roots = sharing_roots(declared_specs(context))
                for name, root in roots.items():
                    for other, other_root in roots.items():
                        alike = context[name].kv_cache is context[other].kv_cache
                        assert alike == (root == other_root), f"{name!r} and {other!r}: one tensor is {alike}"

    @invariant()
    def bytes_stay(self) -> None:
        """Nothing but a write changes a byte."""
        assert not self.contents.changed_bytes(), "a cache changed without a write"

    def teardown(self) -> None:
        for engine in getattr(self, "engines", []):
            engine.runner.close()

    def _remember_contents(self) -> None:
        self.contents = StorageContents(tensor for engine in self.engines for tensor in engine.tensors())

    def _refused(
        self, engine: _Engine, caches: Mapping[str, torch.Tensor], runner_list: list[torch.Tensor] | None
    ) -> tuple[str, ...]:
        """Bind what must be refused; the faults. Checks that nothing changed."""
        context = engine.runner.static_context
        before = ContextSnapshot.of(context)
        given = None if runner_list is None else list(map(id, runner_list))
        refusal = _error_of(lambda: engine.runner.bind(caches, runner_list), BindError)
        assert refusal is not None, "bind accepted what it must refuse"
        assert ContextSnapshot.of(context) == before, "a refused bind changed the context"
        assert (None if runner_list is None else list(map(id, runner_list))) == given, "a refused bind changed the list"
        return refusal.faults


def _error_of(operation: Callable[[], object], kind: type[_Error]) -> _Error | None:
    """The error of this kind that ``operation`` raises, without the frames it passed, which hold tensors."""
    try:
        operation()
    except kind as error:
        return error.with_traceback(None)
    return None
