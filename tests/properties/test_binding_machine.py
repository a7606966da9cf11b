"""The binding state machine on contexts of every kind, and on runners with planted faults, which it must find."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from compiled_engine.context import (
    CacheKind,
    CacheLayer,
    KVCacheSpec,
    StaticForwardContext,
    allocate_kv_caches,
    declared_specs,
)
from compiled_engine.errors import BindError
from compiled_engine.testing import ContextRunner, KVBindingMachine

FULL = KVCacheSpec(2, 1, 2, torch.float32)
WINDOW = KVCacheSpec(2, 2, 2, torch.bfloat16, kind=CacheKind.SLIDING_WINDOW, sliding_window=3)


def shared(spec: KVCacheSpec, target: str) -> KVCacheSpec:
    return KVCacheSpec(
        spec.block_size, spec.num_kv_heads, spec.head_dim, spec.dtype, spec.kind, spec.sliding_window, target
    )


HYBRID = {
    "layers.10.attn": FULL,
    "layers.2.attn": WINDOW,
    "layers.2.cross": KVCacheSpec(3, 1, 1, torch.float32, kind=CacheKind.CROSS),
    "encoder.attn": None,
    "layers.11.attn": shared(FULL, "layers.10.attn"),
    "layers.12.attn": shared(FULL, "layers.11.attn"),
    "layers.3.attn": WINDOW,
}


def make_context(specs: Mapping[str, KVCacheSpec | None], *, pad_pages: bool = True) -> StaticForwardContext:
    context = StaticForwardContext()
    for name, spec in specs.items():
        context.register(name, CacheLayer(name, spec))
    context.seal(pad_pages=pad_pages)
    return context


def machine_of(make: Callable[[], ContextRunner]) -> type[KVBindingMachine]:
    return KVBindingMachine.for_runner(make)


def long(machine: type[KVBindingMachine]) -> type:
    """The machine as a test case with long examples."""
    case = machine.TestCase
    case.settings = settings(stateful_step_count=40)
    return case


TestHybridPadded = long(machine_of(lambda: ContextRunner(make_context(HYBRID))))
TestHybridUnpadded = long(machine_of(lambda: ContextRunner(make_context(HYBRID, pad_pages=False))))
TestNoLayers = long(machine_of(lambda: ContextRunner(make_context({}))))
TestOnlyLayersWithoutCache = long(machine_of(lambda: ContextRunner(make_context({"a": None}))))


def target_and_draft() -> ContextRunner:
    """A namespace next to another one that is bound all the while."""
    engine = StaticForwardContext()
    target, draft = engine.namespace("target"), engine.namespace("draft")
    for part in (target, draft):
        for name, spec in HYBRID.items():
            part.register(name, CacheLayer(name, spec))
        part.seal()
    neighbour = ContextRunner(target)
    neighbour.bind(neighbour.allocate(1))
    return ContextRunner(draft)


TestNamespace = long(machine_of(target_and_draft))


class SwapsLayers(ContextRunner):
    """Binds two layers of one shape to each other's caches."""

    def bind(self, kv_caches: Mapping[str, torch.Tensor], runner_kv_caches: list[torch.Tensor] | None = None) -> None:
        super().bind(kv_caches, runner_kv_caches)
        layers = [layer for name, layer in self.static_context.items() if name in ("layers.2.attn", "layers.3.attn")]
        layers[0]._kv_cache, layers[1]._kv_cache = layers[1]._kv_cache, layers[0]._kv_cache


class BindsHalfBeforeItChecks(ContextRunner):
    """Leaves its list half filled when a check fails."""

    def bind(self, kv_caches: Mapping[str, torch.Tensor], runner_kv_caches: list[torch.Tensor] | None = None) -> None:
        try:
            super().bind(kv_caches, runner_kv_caches)
        except BindError:
            if runner_kv_caches is not None:
                runner_kv_caches.append(torch.zeros(1))
            raise


class SharersWrite(ContextRunner):
    """Stores K and V through layers that must only read."""

    def write(self, layer_name: str, block: int, offset: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._write(self.static_context[layer_name], block, offset, key, value)


class OffByOne(ContextRunner):
    """Stores K and V one slot further on."""

    def write(self, layer_name: str, block: int, offset: int, key: torch.Tensor, value: torch.Tensor) -> None:
        size = self.static_context[layer_name].kv_cache.shape[1]
        super().write(layer_name, block, (offset + 1) % size, key, value)


class KeepsAList(ContextRunner):
    """Keeps caches alive after close."""

    def bind(self, kv_caches: Mapping[str, torch.Tensor], runner_kv_caches: list[torch.Tensor] | None = None) -> None:
        super().bind(kv_caches, runner_kv_caches)
        self.kept = list(kv_caches.values())


class FillsInMappingOrder(ContextRunner):
    """Fills its list in the order of the mapping."""

    def bind(self, kv_caches: Mapping[str, torch.Tensor], runner_kv_caches: list[torch.Tensor] | None = None) -> None:
        super().bind(kv_caches, runner_kv_caches)
        if runner_kv_caches is not None:
            runner_kv_caches[:] = [kv_caches[name] for name in declared_specs(self.static_context)]


class LeavesSharersUnbound(ContextRunner):
    """Does not give layers that share a cache their target's tensor."""

    def bind(self, kv_caches: Mapping[str, torch.Tensor], runner_kv_caches: list[torch.Tensor] | None = None) -> None:
        super().bind(kv_caches, runner_kv_caches)
        self.static_context["layers.12.attn"]._kv_cache = None


class RebindsSilently(ContextRunner):
    """Replaces bound caches without being asked to unbind first."""

    def bind(self, kv_caches: Mapping[str, torch.Tensor], runner_kv_caches: list[torch.Tensor] | None = None) -> None:
        try:
            super().bind(kv_caches, runner_kv_caches)
        except BindError as error:
            if not all("bound to another tensor" in fault for fault in error.faults):
                raise
            self.unbind()
            super().bind(kv_caches, runner_kv_caches)


class SharesMemoryWithItsTwin(ContextRunner):
    """All runners give out the same caches."""

    pool = allocate_kv_caches(declared_specs(make_context(HYBRID)), 1)

    def allocate(self, num_blocks: int) -> Mapping[str, torch.Tensor]:
        return self.pool


@pytest.mark.parametrize(
    ("faulty", "message"),
    [
        (SwapsLayers, "has another tensor than was bound"),
        (BindsHalfBeforeItChecks, "a refused bind changed the list"),
        (SharersWrite, "shares another layer's cache, but writes to it"),
        (OffByOne, "went elsewhere"),
        (KeepsAList, "caches are alive after close"),
        (FillsInMappingOrder, "is not that of the layer in this place"),
        (LeavesSharersUnbound, "has no KV cache"),
        (RebindsSilently, "bind accepted what it must refuse"),
        (SharesMemoryWithItsTwin, "is memory in use"),
    ],
)
def test_planted_faults_are_found(faulty: type[ContextRunner], message: str) -> None:
    """The machine finds each of these faults, so its silence about a sound runner means something."""
    machine = machine_of(lambda: faulty(make_context(HYBRID)))
    search = settings(
        max_examples=300,
        stateful_step_count=15,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises(Exception, match=message):
        run_state_machine_as_test(machine, settings=search)
