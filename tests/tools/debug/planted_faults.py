"""Faults of graph capture and cache binding, planted into runners that are sound, and taken out again.

Each planter is a context manager that gives a ``Planted``: what a tool that looks for the fault has to name. Planters
count the steps of the runner that they are given from 0, and act in one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from compiled_engine.compile.graphs.keys import GraphKey, GraphKind
from compiled_engine.compile.plan import AttentionStep, GraphPlan
from compiled_engine.context import bind_kv_cache, token_slots, unbind_kv_cache
from compiled_engine.runners import cpu as cpu_module
from compiled_engine.runners import gpu as gpu_module
from compiled_engine.runners.batch import ScheduledBatch, StepOutput
from compiled_engine.runners.cpu import CpuRunner
from compiled_engine.runners.gpu import GpuRunner
from compiled_engine.runners.inputs import StepInputs, build_step_inputs
from compiled_engine_debug.audit.probes import probed
from compiled_engine_debug.audit.step import AttentionCall
from compiled_engine_debug.audit.subject import Subject

AnyRunner = CpuRunner | GpuRunner


@dataclass
class Planted:
    """Where a fault is, as far as it has a place. ``happened``: whether the step in which it acts has come."""

    detector: str
    step: int | None = None
    layer: str | None = None
    request: str | None = None
    slot: int | None = None
    key: str | None = None
    node: str | None = None
    happened: bool = False


@contextmanager
def around_step(
    runner: AnyRunner,
    step: int,
    before: Callable[[ScheduledBatch], None] = lambda batch: None,
    after: Callable[[ScheduledBatch], None] = lambda batch: None,
) -> Iterator[None]:
    """Call ``before`` and ``after`` around step ``step`` of the runner, inside its ``execute``."""
    original, count = runner.execute, iter(range(10**9))

    def execute(batch: ScheduledBatch) -> StepOutput:
        if next(count) != step:
            return original(batch)
        with torch.inference_mode():
            before(batch)
            output = original(batch)
            after(batch)
        return output

    with patched(runner, "execute", execute):
        yield


@contextmanager
def patched(owner: Any, attribute: str, value: object) -> Iterator[None]:
    """Inside, ``owner`` has ``value`` as its ``attribute``."""
    with pytest.MonkeyPatch.context() as patch:
        own = attribute in vars(owner)
        patch.setattr(owner, attribute, value)
        try:
            yield
        finally:
            patch.undo()
            if not own and not isinstance(owner, type) and attribute in vars(owner):
                delattr(owner, attribute)


@contextmanager
def cache_rebound(runner: AnyRunner, layer: str, *, step: int, quietly: bool) -> Iterator[Planted]:
    """During step ``step``, ``layer`` gets another cache; ``quietly``: not through ``bind_kv_cache``."""
    planted = Planted("address-changed", step=step, layer=layer, node=layer)
    context = runner.static_context
    caches = {name: item.kv_cache for name, item in context.items()}

    def bind(bound: dict[str, torch.Tensor]) -> None:
        if quietly:
            for name, cache in bound.items():
                context[name]._kv_cache = cache
        else:
            unbind_kv_cache(context)
            bind_kv_cache(bound, context)

    def after(batch: ScheduledBatch) -> None:
        bind({**caches, layer: caches[layer].clone()})
        planted.happened = True

    try:
        with around_step(runner, step, after=after):
            yield planted
    finally:
        if planted.happened:
            bind(caches)


@contextmanager
def weight_moved(runner: GpuRunner, weight: str, *, step: int) -> Iterator[Planted]:
    """During step ``step`` a weight is replaced by an equal one elsewhere."""
    planted = Planted("address-changed", step=step, node=weight)
    assert runner.graphed is not None
    model = runner.graphed.model
    place = model._places[f"weight:{weight}"]
    original = model._initial[place]
    assert original is not None

    def after(batch: ScheduledBatch) -> None:
        model._initial[place] = original.clone()
        planted.happened = True

    try:
        with around_step(runner, step, after=after):
            yield planted
    finally:
        model._initial[place] = original


@contextmanager
def buffer_moved(runner: GpuRunner, *, step: int) -> Iterator[Planted]:
    """During step ``step`` the buffer of sequence lengths is made anew."""
    planted = Planted("address-changed", step=step, node="seq_lens")
    original = runner.buffers.seq_lens.tensor

    def after(batch: ScheduledBatch) -> None:
        runner.buffers.seq_lens.tensor = original.clone()
        planted.happened = True

    try:
        with around_step(runner, step, after=after):
            yield planted
    finally:
        runner.buffers.seq_lens.tensor = original


@contextmanager
def registration_swapped(runner: AnyRunner, one: str, other: str) -> Iterator[tuple[Planted, Planted]]:
    """The static context has two layers under each other's names."""
    layers = runner.static_context._layers
    swap = {one: layers[other], other: layers[one]}
    back = {name: layers[name] for name in swap}
    layers.update(swap)
    try:
        yield Planted("swapped-layers", layer=one, node=other), Planted("swapped-layers", layer=other, node=one)
    finally:
        layers.update(back)


def plan_with_swapped_layers(plan: GraphPlan, one: str, other: str) -> GraphPlan:
    """``plan`` with the names of two of its attentions swapped."""
    names = {one: other, other: one}
    steps = tuple(
        replace(step, layer_name=names.get(step.layer_name, step.layer_name))
        if isinstance(step, AttentionStep)
        else step
        for step in plan.steps
    )
    return replace(plan, steps=steps)


@contextmanager
def plans_edited(edit: Callable[[GraphPlan], GraphPlan]) -> Iterator[None]:
    """Runners that are made inside get plans that went through ``edit``."""
    original = gpu_module.graphs_for

    def graphs_for(*arguments: Any) -> Any:
        graphs = original(*arguments)
        return replace(graphs, plan=edit(graphs.plan))

    with patched(gpu_module, "graphs_for", graphs_for), patched(cpu_module, "graphs_for", graphs_for):
        yield


@contextmanager
def slot_overwritten(runner: AnyRunner, layer: str, *, step: int, mapped: bool, place: int) -> Iterator[Planted]:
    """In step ``step`` one slot of a request is overwritten in the cache of ``layer``.

    ``mapped``: one that the step writes, too; else one that an earlier step wrote, or the last of a block that the
    request has. ``place`` chooses among them.
    """
    planted = Planted("slot-outside-mapping", step=step, layer=layer)
    size, group = runner.limits.block_size, runner.static_context[layer].group

    def after(batch: ScheduledBatch) -> None:
        choices = []
        for request in batch.requests:
            table = request.block_tables[group]
            first, end = request.num_computed_tokens, request.seq_len
            positions = range(first, end) if mapped else [*range(first), *range(end, len(table) * size)]
            choices += [
                (table[position // size] * size + position % size, request.request_id)
                for position in positions
                if table[position // size]
            ]
        if choices:
            planted.slot, planted.request = choices[place % len(choices)]
            token_slots(runner.static_context[layer].kv_cache)[planted.slot] += 1
            planted.happened = True

    with around_step(runner, step, after=after):
        yield planted


@contextmanager
def write_dropped(runner: AnyRunner, layer: str, *, step: int, place: int) -> Iterator[Planted]:
    """In step ``step`` the K/V of one token is not written to the cache of ``layer``."""
    planted = Planted("slot-outside-mapping", step=step, layer=layer)
    size, group = runner.limits.block_size, runner.static_context[layer].group
    kept: list[torch.Tensor] = []

    def slots() -> torch.Tensor:
        return token_slots(runner.static_context[layer].kv_cache)

    def before(batch: ScheduledBatch) -> None:
        tokens = [
            (request, position)
            for request in batch.requests
            for position in range(request.num_computed_tokens, request.seq_len)
        ]
        request, position = tokens[place % len(tokens)]
        planted.slot = request.block_tables[group][position // size] * size + position % size
        planted.request = request.request_id
        kept.append(slots()[planted.slot].clone())

    def after(batch: ScheduledBatch) -> None:
        slots()[planted.slot] = kept[0]
        planted.happened = True

    with around_step(runner, step, before=before, after=after):
        yield planted


@contextmanager
def inputs_edited(
    runner: AnyRunner, planted: Planted, edit: Callable[[StepInputs, ScheduledBatch], StepInputs]
) -> Iterator[Planted]:
    """In step ``planted.step`` the runner lays out other inputs than were scheduled."""
    active: list[ScheduledBatch] = []

    def build(*arguments: Any) -> StepInputs:
        inputs = build_step_inputs(*arguments)
        return edit(inputs, active[0]) if active else inputs

    def after(batch: ScheduledBatch) -> None:
        active.clear()
        planted.happened = True

    with ExitStack() as stack:
        for module in (cpu_module, gpu_module):
            stack.enter_context(patched(module, "build_step_inputs", build))
        assert planted.step is not None
        stack.enter_context(around_step(runner, planted.step, before=active.append, after=after))
        yield planted


@contextmanager
def slot_mapping_shifted(runner: AnyRunner, *, step: int, row: int) -> Iterator[Planted]:
    """In step ``step`` the slot of one token of group 0 is that after its own."""
    planted = Planted("metadata-mismatch", step=step, node="slot_mapping of group 0")
    num_slots = runner.limits.cache_groups[0].num_blocks * runner.limits.block_size

    def edit(inputs: StepInputs, batch: ScheduledBatch) -> StepInputs:
        owners = [request.request_id for request in batch.requests for _ in request.token_ids]
        index = row % len(owners)
        planted.request = owners[index]
        first, *others = inputs.slot_mappings
        shifted = first.clone()
        shifted[index] = (shifted[index] + 1) % num_slots
        return replace(inputs, slot_mappings=(shifted, *others))

    with inputs_edited(runner, planted, edit):
        yield planted


@contextmanager
def row_stale(runner: GpuRunner, array: str, *, step: int, row: int) -> Iterator[Planted]:
    """In step ``step`` one row of a staged array is left as it was: of ``seq_lens``, ``positions`` or ``block_tables``.

    Where it was the same, or too short for the kernel to stay inside its memory, it is one more. Rows of padding count:
    ``Planted.request`` is None then.
    """
    is_table = array == "block_tables"
    planted = Planted("metadata-mismatch", step=step, node="block_table of group 0" if is_table else array)
    buffer = runner.buffers.block_tables[0] if is_table else getattr(runner.buffers, array)
    original = buffer.write
    active: list[ScheduledBatch] = []

    def write(values: Any, size: int, fill: Any = 0) -> torch.Tensor:
        if not active:
            return original(values, size, fill)
        requests = active[0].requests
        lengths = [request.num_scheduled_tokens for request in requests]
        owners = [request.request_id for request in requests]
        if array == "positions":
            owners = [owner for owner, length in zip(owners, lengths, strict=True) for _ in range(length)]
        index = row % size
        old = buffer.tensor[index].clone()
        staged = original(values, size, fill)
        too_short = array == "seq_lens" and index < len(lengths) and int(old) < lengths[index]
        if is_table and torch.equal(old, staged[index]):
            staged[index][-1] = 1
        else:
            staged[index] = staged[index] + 1 if too_short or torch.equal(old, staged[index]) else old
        planted.request = owners[index] if index < len(owners) else None
        planted.happened = True
        return staged

    with (
        patched(buffer, "write", write),
        around_step(runner, step, before=active.append, after=lambda batch: active.clear()),
    ):
        yield planted


@contextmanager
def key_added(num_requests: int, max_seq_len: int) -> Iterator[Planted]:
    """Runners that are made inside declare and capture one more decode graph, to which nothing is dispatched."""
    key = GraphKey(GraphKind.FULL, num_requests, num_requests, 1, max_seq_len, 1)
    original = gpu_module.make_dispatcher

    def make_dispatcher(*arguments: Any) -> Any:
        dispatcher = original(*arguments)
        keys = sorted((*dispatcher._keys, key), key=lambda item: item.num_padded_tokens, reverse=True)
        dispatcher._keys = tuple(keys)
        return dispatcher

    with patched(gpu_module, "make_dispatcher", make_dispatcher):
        yield Planted("unused-graph", key=str(key), happened=True)


class _Attending:
    """A ``probes.Listener`` that acts after one layer has attended in one step."""

    def __init__(self, layer: str, act: Callable[[AttentionCall], None]) -> None:
        self.layer, self.act, self.active = layer, act, False

    def before_attention(self, call: AttentionCall) -> None:
        """Nothing to do."""

    def after_attention(self, call: AttentionCall) -> None:
        if self.active and call.layer == self.layer:
            self.act(call)

    def model_given(self, input_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Nothing to do."""

    def logits_made(self, logits: torch.Tensor) -> None:
        """Nothing to do."""


@contextmanager
def padding_leaking(runner: AnyRunner, subject: Subject, layer: str, *, step: int) -> Iterator[Planted]:
    """In step ``step``, and whenever its batch runs again, ``layer`` adds nothing of block 0 to its first real row.

    Nothing is zero times what is there: it shows only where that is NaN.
    """
    planted = Planted("padding-leak", step=step, layer=layer, node="attention output")
    leaking: list[ScheduledBatch] = []

    def act(call: AttentionCall) -> None:
        call.out[0] += 0 * call.kv_cache[0, 0].sum()

    listener = _Attending(layer, act)
    original, count = runner.execute, iter(range(10**9))

    def execute(batch: ScheduledBatch) -> StepOutput:
        if next(count) == step:
            leaking.append(batch)
            planted.request, planted.happened = batch.requests[0].request_id, True
        listener.active = any(batch is one for one in leaking)
        return original(batch)

    with probed(subject, listener), patched(runner, "execute", execute):
        yield planted


@contextmanager
def compile_in_step(runner: AnyRunner, subject: Subject, layer: str, *, step: int) -> Iterator[Planted]:
    """In step ``step`` something is compiled after ``layer`` has attended."""
    planted = Planted("compile-after-warmup", step=step)

    def act(call: AttentionCall) -> None:
        planted.happened = True
        torch._dynamo.reset()
        torch.compile(lambda tensor: tensor + 1, backend="eager")(torch.ones(2))

    listener = _Attending(layer, act)

    def begin(batch: ScheduledBatch) -> None:
        listener.active = True

    def end(batch: ScheduledBatch) -> None:
        listener.active = False

    with probed(subject, listener), around_step(runner, step, before=begin, after=end):
        yield planted


@contextmanager
def output_held(runner: GpuRunner, *, step: int, whole: bool) -> Iterator[Planted]:
    """From step ``step`` on somebody holds the outputs that its graph handed out, or a slice of each."""
    planted = Planted("output-kept", step=step)
    assert runner.graphed is not None
    backend = runner.graphed.backend
    original, kept, active = backend.hand_out, [], []

    def hand_out(part: Any, tensors: Any) -> tuple[torch.Tensor, ...]:
        views = original(part, tensors)
        if active:
            kept.extend(views if whole else [view[:1] for view in views])
            planted.key, planted.happened = str(part.key), True
        return views

    try:
        with (
            patched(backend, "hand_out", hand_out),
            around_step(runner, step, before=active.append, after=lambda batch: active.clear()),
        ):
            yield planted
    finally:
        kept.clear()
