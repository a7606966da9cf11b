"""``address-changed``: what a captured graph uses is not where it was at capture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from compiled_engine.compile.graphs.bindings import Binding, Role
from compiled_engine.errors import StaleGraph
from compiled_engine_debug.audit.detector import Detector
from compiled_engine_debug.audit.step import Step
from compiled_engine_debug.audit.subject import Subject
from compiled_engine_debug.findings import Finding


class AddressChanged(Detector):
    """Compares every binding of every captured graph with what is there now, before every step.

    The engine compares on a graph's first replay and when bindings of caches have changed through the front door; this
    also sees what moved behind its back.
    """

    name = "address-changed"
    about = "bindings of captured graphs against what is there now, before every step"

    def refusal(self, subject: Subject) -> str | None:
        if subject.backend is None or not subject.backend.records:
            return "no graph is captured"
        return None

    def before_step(self, subject: Subject, step: Step) -> Iterable[Finding]:
        return self._moved(subject, step, "before")

    def after_step(self, subject: Subject, step: Step) -> Iterable[Finding]:
        found = list(self._moved(subject, step, "after"))
        yield from found
        error = step.error
        if found or not isinstance(error, StaleGraph):
            return
        key = None if step.key is None else str(step.key)
        layer = error.name if error.role == Role.CACHE.value else None
        yield self.found(str(error), step=step.index, layer=layer, key=key, node=error.name)

    def _moved(self, subject: Subject, step: Step, when: str) -> Iterator[Finding]:
        backend = subject.backend
        if backend is None:
            return
        present = {place: _Present(tensor) for place, tensor in subject.tensors(1).items()}
        seen: set[tuple[Role, str]] = set()
        for record in backend.records:
            for binding in record.bindings:
                place = (binding.role, binding.name)
                self.looks += 1
                if place in seen:
                    continue
                difference = _difference(binding, present.get(place))
                if difference is not None:
                    seen.add(place)
                    says = f"{when} step {step.index} the {binding.role.value} {binding.name!r} {difference}"
                    yield self._finding(binding, says, str(record.part.key), subject, step)

    def _finding(self, binding: Binding, says: str, key: str, subject: Subject, step: Step) -> Finding:
        changed_by = subject.context.changed_by if binding.role is Role.CACHE else None
        by = "" if changed_by is None else f"; bindings were changed last by {changed_by}"
        return self.found(
            f"{says}; graph {key} uses it{by}",
            step=step.index,
            layer=binding.name if binding.role is Role.CACHE else None,
            key=key,
            node=binding.name,
        )


class _Present:
    """What is compared of a tensor, read once per step."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.address = tensor.data_ptr()
        self.dtype = tensor.dtype
        self.shape = tuple(tensor.shape)
        self.stride = tuple(tensor.stride())


# Of these a graph uses the whole tensor; of the others a part from the start on, as large as its key.
_WHOLE = (Role.CACHE, Role.WEIGHT)


def _difference(captured: Binding, present: _Present | None) -> str | None:
    if present is None:
        return f"was at {captured.address:#x} at its capture and is gone now"
    if present.address != captured.address:
        return f"was at {captured.address:#x} at its capture and is at {present.address:#x} now"
    if present.dtype != captured.dtype:
        return f"was {captured.dtype} at its capture and is {present.dtype} now, both at {captured.address:#x}"
    layout, now = (captured.shape, captured.stride), (present.shape, present.stride)
    if captured.role in _WHOLE and layout != now:
        return f"had shape and strides {layout} at its capture and has {now} now, both at {captured.address:#x}"
    return None
