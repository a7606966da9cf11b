"""Running a plan: parts that do not fit are refused, every tensor is checked on demand, rebinding is seen."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from small_models import BLOCK_SIZE, ModuleWeights, Running, Small, chunk

from compile_watch import watch_compiles
from compiled_engine.compile.model import CompiledModel
from compiled_engine.compile.weights import materialize
from compiled_engine.context import CacheLayer, StaticForwardContext, bind_kv_cache, unbind_kv_cache
from compiled_engine.errors import CacheNotBound, ForwardContextError, PlanError
from compiled_engine.ops.attention import PagedAttention
from compiled_engine.ops.cpu import CpuAttention
from compiled_engine.ops.cpu.build import load_kernels
from kernel_folder import KERNELS

TOKENS = [3, 1, 4, 1, 5, 9]


class Parts:
    """What ``CompiledModel`` is made of, to be damaged."""

    def __init__(self, small: Small) -> None:
        self.plan = small.planned.plan
        self.pieces = dict(small.pieces)
        self.weights = materialize(self.plan.weights, ModuleWeights(small.module))
        self.layers = {spec.layer_name: spec for spec in self.plan.layers}

    def build(self, layer_class: Callable[..., CacheLayer] | None = None) -> CompiledModel:
        context = StaticForwardContext()
        backend = CpuAttention(torch.float32, load_kernels(KERNELS))
        for name, spec in self.layers.items():
            cache = spec.cache_spec(BLOCK_SIZE, torch.float32)
            layer = layer_class(name, cache) if layer_class else PagedAttention(spec, cache, backend)
            context.register(name, layer)
        context.seal()
        return CompiledModel(self.plan, self.pieces, self.weights, context)


def test_whole_parts_make_a_model(small: Small) -> None:
    assert Parts(small).build().plan is small.planned.plan


@pytest.mark.parametrize("part", ["pieces", "weights", "layers"])
def test_a_missing_part_is_named(small: Small, part: str) -> None:
    parts = Parts(small)
    mapping = getattr(parts, part)
    name = sorted(mapping)[1]
    del mapping[name]
    with pytest.raises(PlanError) as caught:
        parts.build()
    assert part in str(caught.value)
    assert name in str(caught.value)


def test_a_weight_of_another_shape_or_dtype_is_refused(small: Small) -> None:
    parts = Parts(small)
    parts.weights["embed.weight"] = torch.zeros(23, 15)
    with pytest.raises(PlanError, match=r"embed\.weight.*\(23, 15\).*\(23, 16\)"):
        parts.build()
    parts.weights["embed.weight"] = torch.zeros(23, 16, dtype=torch.float64)
    with pytest.raises(PlanError, match=r"embed\.weight.*float64.*float32"):
        parts.build()


def test_a_layer_that_cannot_attend_is_refused(small: Small) -> None:
    with pytest.raises(PlanError, match="is a CacheLayer, the plan needs a PagedAttention"):
        Parts(small).build(CacheLayer)


def test_a_plan_that_contradicts_itself_is_refused(small: Small) -> None:
    parts = Parts(small)
    parts.plan = replace(parts.plan, steps=parts.plan.steps[1:])
    with pytest.raises(PlanError, match="reads what is not there"):
        parts.build()


def prompt(running: Running) -> torch.Tensor:
    return running.run([chunk(0, TOKENS, 0, len(TOKENS))])


def test_checking_finds_nothing_in_a_sound_model(small: Small) -> None:
    running = small.running()
    expected = prompt(running)
    with running.model.verified():
        for length in (2, 3, 6):
            running.run([chunk(0, TOKENS, 0, length)])
        assert torch.equal(prompt(running), expected)


def transposed(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Equal values in another layout."""
    return [*results[:-1], results[-1].transpose(0, 1).contiguous().transpose(0, 1)]


def other_dtype(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [*results[:-1], results[-1].double()]


def other_size(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [*results[:-1], torch.cat([results[-1], results[-1]], dim=-1)]


def fewer_tokens(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [*results[:-1], results[-1][:-1]]


def other_rank(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [*results[:-1], results[-1].flatten()]


def one_less(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(results[:-1])


@pytest.mark.parametrize("damage", [transposed, other_dtype, other_size, fewer_tokens, other_rank, one_less])
def test_checking_catches_what_a_piece_gives(
    small: Small, damage: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
) -> None:
    """The first piece lies about its last output, a value [num_tokens, heads, head_dim]."""
    key = small.planned.plan.steps[0].piece  # type: ignore[union-attr]
    honest = small.pieces[key]
    pieces = small.pieces | {key: lambda arguments: damage(honest(arguments))}
    running = Running(small.planned, pieces, ModuleWeights(small.module))
    with running.model.verified(), pytest.raises(PlanError, match=key[:12]):
        prompt(running)
    if damage is transposed:
        prompt(running)  # right values: an eager piece does not mind, a compiled one would


@pytest.mark.parametrize(
    ("input_ids", "positions"),
    [
        (torch.zeros(3, dtype=torch.int32), torch.arange(3)),
        (torch.zeros(3, dtype=torch.int64), torch.arange(4)),
        (torch.zeros(6, dtype=torch.int64)[::2], torch.arange(3)),
        (torch.zeros(3, 1, dtype=torch.int64), torch.arange(3)),
    ],
    ids=["int32", "lengths differ", "strided", "two dimensions"],
)
def test_checking_catches_what_a_piece_is_given_before_it_runs(
    small: Small, input_ids: torch.Tensor, positions: torch.Tensor
) -> None:
    """A compiled piece would read such a tensor as garbage, or past its end."""
    ran = []
    key = small.planned.plan.steps[0].piece  # type: ignore[union-attr]
    pieces = small.pieces | {key: ran.append}
    running = Running(small.planned, pieces, ModuleWeights(small.module))  # type: ignore[arg-type]
    with running.model.verified(), pytest.raises(PlanError, match=r"input [01] of piece"):
        running.model.hidden_states(input_ids, positions)
    assert not ran


def test_outside_a_step_there_is_an_error(small: Small) -> None:
    with pytest.raises(ForwardContextError):
        small.running().model.hidden_states(torch.zeros(2, dtype=torch.int64), torch.arange(2))


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor"), pytest.param("aoti", marks=pytest.mark.slow)])
def test_rebinding_is_seen_by_a_compiled_model(small: Small, compiler: str) -> None:
    """Unbind, allocate, bind: nothing is compiled again, and the model reads and writes the new caches alone."""
    from small_models import compiled

    running = Running(small.planned, compiled(small.planned, compiler), ModuleWeights(small.module))
    dense = small.module.dense_logits(TOKENS)
    first = running.caches
    running.run([chunk(0, TOKENS, 0, 5)])
    torch.testing.assert_close(running.run([chunk(0, TOKENS, 5, 6)])[0], dense[5], rtol=1e-4, atol=1e-5)
    kept = {name: cache.clone() for name, cache in first.items()}

    with watch_compiles() as log:
        second = running.new_caches()
        running.rebind(second)
        # The new caches are NaN: a decode that leans on the old ones would be right, this one must not be.
        assert running.run([chunk(0, TOKENS, 5, 6)]).isnan().all()
        running.run([chunk(0, TOKENS, 0, 5)])
        torch.testing.assert_close(running.run([chunk(0, TOKENS, 5, 6)])[0], dense[5], rtol=1e-4, atol=1e-5)
        for name, cache in first.items():
            torch.testing.assert_close(cache, kept[name], rtol=0, atol=0, equal_nan=True)
            assert not second[name].isnan().all()

        # And back again: what the first caches held is still there.
        running.rebind(first)
        torch.testing.assert_close(running.run([chunk(0, TOKENS, 5, 6)])[0], dense[5], rtol=1e-4, atol=1e-5)

        alive = [weakref.ref(cache) for cache in second.values()]
        del second
        gc.collect()
        assert not any(reference() is not None for reference in alive), "something kept a cache that was unbound"
    assert log.events == []


def test_unbound_caches_are_an_error_not_a_stale_result(small: Small) -> None:
    running = small.running()
    prompt(running)
    unbind_kv_cache(running.context)
    with pytest.raises(CacheNotBound, match=r"layers\.0\.attention"):
        prompt(running)
    bind_kv_cache(running.caches, running.context)
    prompt(running)


def test_a_step_leaves_nothing_behind_but_its_result(small: Small) -> None:
    """Values of a step, the hidden states among them, are not kept until the next one."""
    made: list[weakref.ref[torch.Tensor]] = []

    def watched(piece: Callable[..., Sequence[torch.Tensor]]) -> Callable[..., Sequence[torch.Tensor]]:
        def run(arguments: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            results = piece(arguments)
            made.extend(weakref.ref(result) for result in results)
            return results

        return run

    pieces = {key: watched(piece) for key, piece in small.pieces.items()}
    running = Running(small.planned, pieces, ModuleWeights(small.module))
    logits = prompt(running)
    gc.collect()
    assert len(made) == 4 + 4 + 4 + 1 + 1
    assert sum(reference() is not None for reference in made) <= 1
    assert logits.shape == (1, 23)


def test_values_are_given_up_as_soon_as_nothing_reads_them(small: Small) -> None:
    """At the last piece only what it reads, and the model's inputs, are alive: memory does not grow with depth."""
    last = small.planned.plan.steps[-1].piece  # type: ignore[union-attr]
    made: dict[int, weakref.ref[torch.Tensor]] = {}
    alive_at_the_end: list[int] = []

    def watched(key: str, piece: Callable[..., Sequence[torch.Tensor]]) -> Callable[..., Sequence[torch.Tensor]]:
        def run(arguments: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            if key == last:
                alive_at_the_end.append(sum(reference() is not None for reference in made.values()))
            results = piece(arguments)
            made.update({len(made) + index: weakref.ref(result) for index, result in enumerate(results)})
            return results

        return run

    pieces = {key: watched(key, piece) for key, piece in small.pieces.items()}
    prompt(Running(small.planned, pieces, ModuleWeights(small.module)))
    # The residual stream.
    assert alive_at_the_end == [1]
