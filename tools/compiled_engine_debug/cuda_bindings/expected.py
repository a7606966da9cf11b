"""What each launch of a plan may use, and what memory there is by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compiled_engine.compile.graphs.bindings import Binding, Role, Tensors, bindings_of
from compiled_engine.compile.model import CompiledModel
from compiled_engine.compile.plan import AttentionStep, GraphPlan
from compiled_engine_debug.cuda_bindings.parameters import AddressRange

_WEIGHT_INPUT = "weight:"


@dataclass(frozen=True)
class Expected:
    """What a launch uses of the roles ``roles``: exactly ``bindings``, by role and name. Of other roles, anything."""

    roles: frozenset[str]
    bindings: frozenset[tuple[str, str]]


ExpectedByLaunch = Mapping[str, Expected]
"""By the name of the launch, as ``CompiledModel`` gives it. Nothing is said of launches that are not in it."""


def expected_by_launch(plan: GraphPlan) -> ExpectedByLaunch:
    """Every piece uses the weights that the plan gives it and no cache, every attention the cache of its layer."""
    cache, weight = Role.CACHE.value, Role.WEIGHT.value
    expected: dict[str, Expected] = {}
    for step in (*plan.steps, plan.head):
        if isinstance(step, AttentionStep):
            expected[step.launch_name] = Expected(frozenset({cache}), frozenset({(cache, step.layer_name)}))
        else:
            keys = (item.removeprefix(_WEIGHT_INPUT) for item in step.inputs if item.startswith(_WEIGHT_INPUT))
            expected[step.launch_name] = Expected(frozenset({cache, weight}), frozenset((weight, key) for key in keys))
    return expected


def known_ranges(model: CompiledModel) -> tuple[AddressRange, ...]:
    """Where the weights of ``model`` and the caches of its layers lie now."""
    layers = model.static_context.items()
    tensors: Tensors = {
        **{(Role.WEIGHT, name): tensor for name, tensor in model.weights.items()},
        **{(Role.CACHE, name): layer.kv_cache for name, layer in layers if layer.is_bound},
    }
    return tuple(range_of(binding) for binding in bindings_of(tensors, model.static_context.epoch))


def range_of(binding: Binding) -> AddressRange:
    """From the first to the last element of ``binding``, with what lies between the elements of a strided view."""
    num_bytes = 0
    if all(binding.shape):
        last = sum((size - 1) * stride for size, stride in zip(binding.shape, binding.stride, strict=True))
        num_bytes = (last + 1) * binding.dtype.itemsize
    return AddressRange(binding.role.value, binding.name, binding.address, num_bytes)
