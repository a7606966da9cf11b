"""``artifact-of-another-model``: stored graphs that are not those of the model they are used for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from compiled_engine.compile.counters import CompileCounters
from compiled_engine.compile.plan import GraphPlan
from compiled_engine.compile.store_entry import StoredModel
from compiled_engine.config import EngineConfig
from compiled_engine.models import ModelDefinition, ModelFiles, build_definition, resolve_dtype
from compiled_engine.runners.precompile import lookup
from compiled_engine_debug.audit.detector import Detector
from compiled_engine_debug.audit.subject import Subject
from compiled_engine_debug.findings import Finding


class ArtifactOfAnotherModel(Detector):
    """Captures the model anew, without weights or compiling, and compares its plan with the one in use.

    Layers, weights and their shapes, pieces by the hash of what they compute, constants: all must be equal. Where the
    model is not captured on this device, layers, weights' names and the vocabulary are compared alone.
    """

    name = "artifact-of-another-model"
    about = "the plan and constants in use against a capture of the model itself"

    def __init__(self) -> None:
        super().__init__()
        self._expected: Expected | None = None

    def refusal(self, subject: Subject) -> str | None:
        return "XLA's graphs are compiled from the model at every start" if subject.plan is None else None

    def look_at_store(self, config: EngineConfig, files: ModelFiles) -> Iterable[Finding]:
        """Before the runner is made: what the store has for this model, if graphs are taken from there."""
        if config.device_type == "tpu" or config.piece_compiler != "aoti" or not (config.store or config.graphs):
            return []
        _, stored = lookup(config, files)
        return [] if stored is None else list(self._stored(stored, self._expect(config, files)))

    def start(self, subject: Subject) -> Iterable[Finding]:
        if subject.plan is None:
            return []
        return list(self._plan(subject.plan, self._expect(subject.config, subject.files)))

    def _expect(self, config: EngineConfig, files: ModelFiles) -> Expected:
        if self._expected is None:
            self._expected = Expected.of(config, files)
        return self._expected

    def _stored(self, stored: StoredModel, expected: Expected) -> Iterator[Finding]:
        yield from self._plan(stored.plan, expected)
        self.looks += 2
        if stored.class_name != expected.class_name:
            yield self.found(f"the stored graphs are of a {stored.class_name}, the model is a {expected.class_name}")
        constants = expected.constants
        for name in sorted(set(stored.constants) | set(constants)):
            one, other = stored.constants.get(name), constants.get(name)
            if one is None or other is None or not torch.equal(one, other):
                yield self.found(f"the stored constant {name!r} is not the model's", node=name)

    def _plan(self, plan: GraphPlan, expected: Expected) -> Iterator[Finding]:
        present, wanted = _parts(plan), _parts(expected.plan) if expected.plan is not None else expected.parts
        for part, want in wanted.items():
            self.looks += max(len(present[part]), len(want))
            difference = _first_difference(present[part], want)
            if difference is not None:
                index, one, other = difference
                yield self.found(
                    f"the plan in use is of another model: its {part} {index} is {_short(one)}, the model's is "
                    f"{_short(other)}",
                    layer=_layer_of(other) or _layer_of(one),
                    node=part,
                )
                # What follows in a plan follows from its layers and weights.
                return


class Expected:
    """What the model itself says. ``plan``: captured anew; None where only ``parts`` of it are known."""

    def __init__(self, definition: ModelDefinition, plan: GraphPlan | None) -> None:
        self.plan = plan
        self.class_name = type(definition.module).__name__
        self.constants = dict(definition.expected.buffers)
        self.parts: dict[str, list[object]] = {
            "layer": list(definition.layers),
            "vocabulary": [definition.vocab_size],
        }

    @classmethod
    def of(cls, config: EngineConfig, files: ModelFiles) -> Expected:
        """Build the model's definition and, on the CPU, capture it."""
        from compiled_engine.compile.pipeline import plan_model

        definition = build_definition(files, resolve_dtype(config.dtype, files, config.device_type))
        plan = None
        if config.device_type == "cpu":
            device = torch.device("cpu")
            plan = plan_model(definition.module, definition.layers, device, CompileCounters()).plan
        return cls(definition, plan)


def _parts(plan: GraphPlan) -> dict[str, list[object]]:
    """A plan as lists to be compared, causes first."""
    return {
        "layer": list(plan.layers),
        "vocabulary": [plan.vocab_size],
        "weight": list(plan.weights),
        "piece": [piece.key for piece in plan.pieces],
        "step": [*plan.steps, plan.head],
    }


def _first_difference(present: list[object], wanted: list[object]) -> tuple[int, object, object] | None:
    for index in range(max(len(present), len(wanted))):
        one = present[index] if index < len(present) else None
        other = wanted[index] if index < len(wanted) else None
        if one != other:
            return index, one, other
    return None


def _layer_of(part: object) -> str | None:
    name = getattr(part, "layer_name", None)
    return name if isinstance(name, str) else None


def _short(part: object) -> str:
    if part is None:
        return "missing"
    if isinstance(part, str):
        return part[:12]
    return str(part)[:300]
