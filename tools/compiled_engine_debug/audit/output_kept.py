"""``output-kept``: somebody holds an output of a captured graph that the next replay overwrites."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import torch

from compiled_engine.compile.graphs.backend import GraphPart
from compiled_engine.errors import GraphOutputKept
from compiled_engine_debug.audit.detector import Detector
from compiled_engine_debug.audit.probes import replaced
from compiled_engine_debug.audit.step import Step
from compiled_engine_debug.audit.subject import Subject
from compiled_engine_debug.findings import Finding


class OutputKept(Detector):
    """Counts who holds the memory of every output that a step handed out, before the next step begins.

    The engine sees a view that is held as it was handed out; a slice of one, kept without it, is seen here alone.
    """

    name = "output-kept"
    about = "holders of graph outputs, between steps"

    def __init__(self) -> None:
        super().__init__()
        self._handed_out: list[_HandedOut] = []
        self._hooks = ExitStack()

    def refusal(self, subject: Subject) -> str | None:
        return "no graph is captured" if subject.backend is None or not subject.backend.records else None

    def start(self, subject: Subject) -> Iterable[Finding]:
        backend = subject.backend
        if backend is not None:
            original = backend.hand_out

            def hand_out(part: GraphPart, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
                self._handed_out += [_HandedOut(part, index, tensor) for index, tensor in enumerate(tensors)]
                return original(part, tensors)

            self._hooks.enter_context(replaced(backend, "hand_out", hand_out))
        return ()

    def before_step(self, subject: Subject, step: Step) -> Iterable[Finding]:
        handed_out, self._handed_out = self._handed_out, []
        self.looks += len(handed_out)
        for item in handed_out:
            if item.is_held():
                yield self.found(
                    f"output {item.index} of graph {item.part}, handed out in step {step.index - 1}, is still held "
                    f"when step {step.index} begins, whose replay overwrites it: clone what is to outlive a step",
                    step=step.index - 1,
                    key=str(item.part.key),
                    node=f"output {item.index}",
                )

    def after_step(self, subject: Subject, step: Step) -> Iterable[Finding]:
        if isinstance(step.error, GraphOutputKept):
            key = None if step.key is None else str(step.key)
            yield self.found(str(step.error), step=step.index, key=key)

    def close(self) -> None:
        self._handed_out.clear()
        self._hooks.close()


class _HandedOut:
    """An output, and how many tensors had its memory when it was handed out."""

    def __init__(self, part: GraphPart, index: int, tensor: torch.Tensor) -> None:
        self.part, self.index = part, index
        self._storage = tensor.untyped_storage()
        self._holders = self._count()

    def is_held(self) -> bool:
        """Whether more have it now."""
        return self._count() > self._holders

    def _count(self) -> int:
        return torch._C._storage_Use_Count(self._storage._cdata)
