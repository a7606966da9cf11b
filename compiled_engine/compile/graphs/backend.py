"""What captures work once and replays it: the same for CUDA graphs and for their emulation on the CPU."""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from compiled_engine.compile.graphs.bindings import Binding, Tensors, bindings_of, check_bindings
from compiled_engine.compile.graphs.keys import GraphKey
from compiled_engine.compile.launch import Launch
from compiled_engine.context import StaticForwardContext
from compiled_engine.errors import CaptureError, CompiledAfterWarmup, GraphOutputKept

CapturedWork = Callable[[Launch], Sequence[torch.Tensor]]
"""Work that runs everything through the launch it is given, and returns its outputs."""


@dataclass(frozen=True)
class GraphPart:
    """One captured graph: the ``index``-th stretch of pieces of a piecewise ``key``; a full graph has one part, 0."""

    key: GraphKey
    index: int = 0

    def __str__(self) -> str:
        return f"{self.key}, part {self.index}"


@dataclass(frozen=True)
class GraphRecord:
    """What is known of one captured graph.

    ``launches``: their names, in order. ``num_bytes``: memory that the capture took; ``seconds``: its time.
    """

    part: GraphPart
    bindings: tuple[Binding, ...]
    launches: tuple[str, ...]
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class Captured:
    """What a backend makes of work. ``graph``: the backend's own. ``outputs``: where every replay leaves them."""

    graph: object
    outputs: tuple[torch.Tensor, ...]
    launches: tuple[str, ...]
    num_bytes: int


@dataclass
class _Kept:
    record: GraphRecord
    captured: Captured
    # The context's epoch under which every address was last found in its place.
    verified_epoch: int | None = None


class GraphBackend(ABC):
    """Captures work by part and replays it, after checking that everything the graph uses is where it was.

    The first replay of a part and every one after the static forward context's epoch has changed compare all addresses,
    shapes and strides; one that differs raises ``StaleGraph``. Outputs live until the next replay of any graph: who
    still holds one then is told by ``GraphOutputKept``.
    """

    def __init__(self, static_context: StaticForwardContext) -> None:
        self._static_context = static_context
        self._graphs: dict[GraphPart, _Kept] = {}
        self._handed_out: list[tuple[GraphPart, int, weakref.ref[torch.Tensor]]] = []
        self._sealed = False

    def capture_one(self, part: GraphPart, work: CapturedWork, tensors: Tensors) -> GraphRecord:
        """Capture ``work``, which uses ``tensors`` and nothing else that lives longer than itself.

        Raises ``CaptureError`` naming the launch that cannot be captured, and for a part that is captured already;
        ``CompiledAfterWarmup`` once the backend is sealed.
        """
        if self._sealed:
            raise CompiledAfterWarmup(f"capture of graph {part}")
        if part in self._graphs:
            raise CaptureError(f"graph {part} is captured already")
        begin = time.perf_counter()
        captured = self._capture(part, work)
        record = GraphRecord(
            part,
            bindings_of(tensors, self._static_context.epoch),
            captured.launches,
            captured.num_bytes,
            time.perf_counter() - begin,
        )
        self._graphs[part] = _Kept(record, captured)
        return record

    def can_run(self, part: GraphPart) -> bool:
        """Whether ``part`` has been captured."""
        return part in self._graphs

    def replay(self, part: GraphPart, present: Callable[[], Tensors]) -> None:
        """Do the captured work again.

        ``present`` gives what the runner holds now; it is asked for only when something is to be compared. Raises
        ``StaleGraph``, ``GraphOutputKept``, and ``CaptureError`` for a part that was never captured.
        """
        kept = self._kept(part)
        epoch = self._static_context.epoch
        if kept.verified_epoch != epoch:
            check_bindings(kept.record.bindings, present(), self._static_context.changed_by)
            kept.verified_epoch = epoch
        self._check_dropped()
        self._replay(kept.captured.graph)

    def outputs(self, part: GraphPart) -> tuple[torch.Tensor, ...]:
        """The outputs of the last replay of ``part``: see ``hand_out``."""
        return self.hand_out(part, self._kept(part).captured.outputs)

    def hand_out(self, part: GraphPart, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Views of ``tensors``, which replays overwrite; to be dropped before the next replay.

        What is held is told by the views themselves: a slice of one, kept without it, is not seen.
        """
        views = tuple(tensor.view(tensor.shape) for tensor in tensors)
        self._handed_out += [(part, index, weakref.ref(view)) for index, view in enumerate(views)]
        return views

    def seal(self) -> None:
        """From now on nothing may be captured."""
        self._sealed = True

    def forget(self, key: GraphKey) -> None:
        """Drop the graphs of ``key``, as far as there are any."""
        for part in [part for part in self._graphs if part.key == key]:
            del self._graphs[part]

    @property
    def records(self) -> tuple[GraphRecord, ...]:
        """Of all captured graphs, in the order of their capture."""
        return tuple(kept.record for kept in self._graphs.values())

    def cleanup(self) -> None:
        """Forget every graph and free its memory."""
        self._graphs.clear()
        self._handed_out.clear()

    @abstractmethod
    def _capture(self, part: GraphPart, work: CapturedWork) -> Captured:
        """Capture ``work``."""

    @abstractmethod
    def _replay(self, graph: object) -> None:
        """Do the work of ``graph`` again."""

    def _kept(self, part: GraphPart) -> _Kept:
        if part not in self._graphs:
            raise CaptureError(f"graph {part} was never captured")
        return self._graphs[part]

    def _check_dropped(self) -> None:
        for part, index, tensor in self._handed_out:
            if tensor() is not None:
                raise GraphOutputKept(
                    f"output {index} of graph {part} is still held, and this replay overwrites it: clone what is to "
                    "outlive a step"
                )
        self._handed_out.clear()
