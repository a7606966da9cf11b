"""What CUDA graphs declare that they use, against the addresses that their nodes are given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import torch

from compiled_engine.compile.graphs.bindings import Role
from compiled_engine.compile.graphs.keys import GraphKey, GraphKind
from compiled_engine.compile.model import CompiledModel, Values
from compiled_engine.context import AttentionMetadata
from compiled_engine.ops.attention import LayerAttention, PagedAttention
from compiled_engine.runners.gpu import GpuRunner
from compiled_engine_debug.cuda_bindings.driver import DriverUnavailable, GraphReader, load_driver
from compiled_engine_debug.cuda_bindings.prove import ProvenBindings
from compiled_engine_debug.cuda_bindings.recapture import prove_runner
from gpu_checks.lab import Lab
from gpu_checks.report import Outcome, passed_if, skipped

Pair = tuple[str, str]


def check(lab: Lab) -> Outcome:
    """A decode graph and a piecewise one must use exactly what they declare; a swap of two layers' caches, and one of
    two weights, must be named."""
    if not lab.on_gpu:
        return skipped("not available: the emulation's graphs are no CUDA graphs, use a GPU")
    try:
        reader = load_driver()
    except DriverUnavailable as error:
        return skipped(f"not available: {error}")
    folder = lab.model or lab.random_llama(min(lab.sizes.layers, 2), torch.float32)
    settings: dict[str, Any] = {"graph_mode": "full_and_piecewise", "dtype": "float32", "max_model_len": 64}
    with lab.runner(folder, max_num_seqs=2, max_num_batched_tokens=16, **settings) as runner:
        return prove_and_plant(runner, reader)


def prove_and_plant(runner: GpuRunner, reader: GraphReader, **how: Any) -> Outcome:
    """The check of ``runner``. ``how``: see ``prove_runner``."""
    keys = _smallest_of_each_kind(runner)
    rows, faults, told = [], [], []
    for proven in prove_runner(runner, keys, reader, **how):
        rows.append(_row("-", proven, proven.findings()[0].message if proven.findings() else "-"))
        faults += [f"{proven.key}: {fault}" for fault in _faults(proven)]
        told += [str(item) for item in proven.unproven]
    full = [key for key in keys if key.kind is GraphKind.FULL]
    for role, pair, swapped in (
        (Role.CACHE, two_caches(runner), _caches_swapped),
        (Role.WEIGHT, two_weights(_model(runner)), _weights_swapped),
    ):
        if pair is None:
            faults.append(f"the model has no two alike of the role {role.value!r}: give another --model")
            continue
        planted = f"{role.value}: {pair[0]} and {pair[1]} swapped"
        with swapped(runner, pair):
            (proven,) = prove_runner(runner, full, reader, **how)
        named = _named(proven, role, pair)
        rows.append(_row(planted, proven, named or "-"))
        faults += [] if named else [f"not found: {planted}"]
    summary = "every launch is given its caches and weights and no others; two swaps were named by launch and kernel"
    if told:
        summary += f"; declared and given to no kernel of some graph: {', '.join(dict.fromkeys(told))}"
    return passed_if(faults, summary, rows=rows)


def two_caches(runner: GpuRunner) -> Pair | None:
    """Two layers whose caches are different and could be taken for each other."""
    for (first, one), (second, other) in combinations(runner.static_context.items(), 2):
        alike = one.group == other.group and one.kv_cache.shape == other.kv_cache.shape
        if alike and one.kv_cache.data_ptr() != other.kv_cache.data_ptr():
            return first, second
    return None


def two_weights(model: CompiledModel) -> Pair | None:
    """Two weights of different pieces that could be taken for each other."""
    steps_of: dict[str, list[int]] = {}
    for index, step in enumerate((*model.plan.steps, model.plan.head)):
        for name in getattr(step, "inputs", ()):
            steps_of.setdefault(name, []).append(index)
    head = len(model.plan.steps)
    users = {name: steps_of.get(f"weight:{name}", []) for name in model.weights}
    once = {name: tensor for name, tensor in model.weights.items() if len(users[name]) == 1 and head not in users[name]}
    for (first, one), (second, other) in combinations(once.items(), 2):
        alike = (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        if alike and users[first] != users[second] and one.data_ptr() != other.data_ptr():
            return first, second
    return None


class _OtherCache(LayerAttention):
    """A layer's attention over a cache that is not the layer's."""

    def __init__(self, computation: LayerAttention, cache: torch.Tensor) -> None:
        self._computation = computation
        self._cache = cache

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
        self._computation.write_and_attend(query, key, value, out, self._cache, slots, metadata, sinks)


@contextmanager
def _caches_swapped(runner: GpuRunner, pair: Pair) -> Iterator[None]:
    layers = [layer for name in pair if isinstance(layer := runner.static_context[name], PagedAttention)]
    own = [layer.computation for layer in layers]
    try:
        for layer, other in zip(layers, reversed(layers), strict=True):
            layer.computation = _OtherCache(layer.computation, other.kv_cache)
        yield
    finally:
        for layer, computation in zip(layers, own, strict=True):
            layer.computation = computation


@contextmanager
def _weights_swapped(runner: GpuRunner, pair: Pair) -> Iterator[None]:
    model = _model(runner)
    first, second = (model.weights[name] for name in pair)
    own = model.initial_values

    def swapped(input_ids: torch.Tensor, positions: torch.Tensor) -> Values:
        return [
            second if value is first else first if value is second else value for value in own(input_ids, positions)
        ]

    model.initial_values = swapped  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.initial_values


def _named(proven: ProvenBindings, role: Role, pair: Pair) -> str | None:
    """The first message of a swap that is named from both sides; None where it is not."""
    uses = [use for use in proven.foreign if any((item.role, item.name) == (role.value, pair[1]) for item in use.meant)]
    lacking = {(item.role, item.name) for item in proven.unused}
    if not uses or not {(role.value, name) for name in pair} <= lacking:
        return None
    return str(uses[0])


def _faults(proven: ProvenBindings) -> list[str]:
    """A launch without its caches and weights is one. That kernels have no use for some metadata or workspace of their
    step, or a piecewise graph for the head's weights, is none."""
    faults = [f"not declared: {use}" for use in proven.undeclared]
    faults += [f"another's memory: {use}" for use in proven.foreign]
    faults += [f"{item.launch!r} is not given {item.role} {item.name!r}" for item in proven.unused]
    faults += [f"{node.name} cannot be read: {node.unread}" for _, node in proven.unread]
    faults += [f"no launch is known of {use}" for use in proven.uses if use.launch is None]
    return faults


def _row(planted: str, proven: ProvenBindings, said: str) -> dict[str, Any]:
    return {
        "graph": str(proven.key),
        "planted": planted,
        "addresses": len(proven.uses),
        "proven": len(proven.proven),
        "unproven": len(proven.unproven),
        "undeclared": len(proven.undeclared),
        "foreign": len(proven.foreign),
        "weak": len(proven.weak),
        "unread": len(proven.unread),
        "said": said,
    }


def _smallest_of_each_kind(runner: GpuRunner) -> Sequence[GraphKey]:
    largest_first = runner.dispatcher.keys()
    return tuple({key.kind: key for key in largest_first}.values())


def _model(runner: GpuRunner) -> CompiledModel:
    if runner.graphed is None:
        raise ValueError("the runner is closed")
    return runner.graphed.model
