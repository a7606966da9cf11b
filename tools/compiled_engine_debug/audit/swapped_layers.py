"""``swapped-layers``: a layer that computes under the name, or with the cache, of another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest

from compiled_engine.compile.plan import AttentionStep, GraphPlan, PieceStep
from compiled_engine_debug.audit.detector import Detector
from compiled_engine_debug.audit.step import Step
from compiled_engine_debug.audit.subject import Subject
from compiled_engine_debug.findings import Finding


class SwappedLayers(Detector):
    """Compares what weights, plan, context and attention's arguments say of which layer is which.

    The weights decide: a plan's attention belongs to the module whose projections made its query and read its output.
    """

    name = "swapped-layers"
    about = "the plan's layers against their weights, the context and the caches that attention is given"

    def refusal(self, subject: Subject) -> str | None:
        return "XLA's graphs have no plan" if subject.plan is None else None

    def start(self, subject: Subject) -> Iterable[Finding]:
        plan = subject.plan
        if plan is None:
            return []
        return [*self._names_against_weights(plan), *self._names_against_context(subject)]

    def after_step(self, subject: Subject, step: Step) -> Iterable[Finding]:
        plan = subject.plan
        if plan is None or step.error is not None or not step.calls:
            return
        planned = [item.layer_name for item in plan.steps if isinstance(item, AttentionStep)]
        for call, layer in zip_longest(step.calls, planned):
            self.looks += 1
            if call is None or layer is None or call.layer != layer:
                ran = "none" if call is None else call.layer
                yield self.found(
                    f"in step {step.index} attention of layer {ran!r} ran where the plan has {layer!r}",
                    step=step.index,
                    layer=layer,
                    node=ran,
                )
                return
            used, bound = call.kv_cache.data_ptr(), subject.context[layer].kv_cache.data_ptr()
            if used != bound:
                yield self.found(
                    f"in step {step.index} attention of layer {layer!r} used the cache at "
                    f"{used:#x}{_owner_of(subject, used)}, and the one bound to it is at {bound:#x}",
                    step=step.index,
                    layer=layer,
                )

    def _names_against_weights(self, plan: GraphPlan) -> Iterator[Finding]:
        sources = {f"weight:{recipe.key}": recipe.sources for recipe in plan.weights}
        names = {layer.layer_name for layer in plan.layers}
        pieces = [item for item in plan.steps if isinstance(item, PieceStep)]
        for item in plan.steps:
            if not isinstance(item, AttentionStep):
                continue
            makers = [piece for piece in pieces if item.query in piece.outputs]
            readers = [piece for piece in pieces if f"value:{item.out}" in piece.inputs]
            owners = _modules_of(makers, sources, names) & _modules_of(readers, sources, names)
            self.looks += 1
            if len(owners) == 1 and item.layer_name not in owners:
                (owner,) = owners
                yield self.found(
                    f"the plan calls the attention of {owner!r}, by its weights, {item.layer_name!r}: it uses that "
                    "layer's cache",
                    layer=owner,
                    node=item.layer_name,
                )

    def _names_against_context(self, subject: Subject) -> Iterator[Finding]:
        model, plan = subject.model, subject.plan
        if model is None or plan is None:
            return
        steps = [item for item in plan.steps if isinstance(item, AttentionStep)]
        layers = [item.layer for item in model.instructions if item.layer is not None]
        for item, layer in zip(steps, layers, strict=True):
            self.looks += 1
            registered = subject.context.get(item.layer_name)
            if layer is not registered or layer.layer_name != item.layer_name:
                there = "nothing" if registered is None else repr(registered.layer_name)
                yield self.found(
                    f"the plan's attention of layer {item.layer_name!r} runs {layer.layer_name!r}, and the context has "
                    f"{there} under that name",
                    layer=item.layer_name,
                    node=None if registered is None else registered.layer_name,
                )


def _modules_of(pieces: list[PieceStep], sources: dict[str, tuple[str, ...]], names: set[str]) -> set[str]:
    """Of the layers ``names`` those that have a weight among what ``pieces`` read."""
    weights = [source for piece in pieces for name in piece.inputs for source in sources.get(name, ())]
    return {name for name in names if any(weight.startswith(f"{name}.") for weight in weights)}


def _owner_of(subject: Subject, address: int) -> str:
    names = [name for name, layer in subject.context.items() if layer.is_bound and layer.kv_cache.data_ptr() == address]
    return f", that of layer {names[0]!r}" if names else ""
