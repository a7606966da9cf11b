"""An emulation of CUDA graphs for tensors on the CPU, so that what goes wrong with them goes wrong here too.

Like a CUDA graph it replays on the very memory that it saw at capture, whatever is bound, staged or passed since; it
computes with the Python values of its capture; and its outputs are overwritten by the next replay. Unlike a CUDA graph
it also computes while it captures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_engine.compile.graphs.backend import Captured, CapturedWork, GraphBackend, GraphPart
from compiled_engine.compile.launch import Launch, Work, launch_now
from compiled_engine.context import StaticForwardContext
from compiled_engine.errors import CaptureError

# What makes no numbers: it may run between launches.
_ALLOCATIONS = ("aten.empty", "aten.new_empty", "aten.empty_strided", "aten.empty_like", "prim.device")


@dataclass(frozen=True)
class _Launch:
    name: str
    work: Work
    results: tuple[torch.Tensor, ...]

    def run(self, launch: Launch) -> None:
        for recorded, new in zip(self.results, launch(self.name, self.work), strict=True):
            recorded.copy_(new)


class RecordingBackend(GraphBackend):
    """Records the launches of work and does them again, each into the tensors of its first time.

    ``replay_launch`` runs every launch of a replay: who debugs puts one here that also looks.
    """

    def __init__(self, static_context: StaticForwardContext) -> None:
        super().__init__(static_context)
        self.replay_launch: Launch = launch_now

    def _capture(self, part: GraphPart, work: CapturedWork) -> Captured:
        launches: list[_Launch] = []
        outside = _NothingOutsideLaunches(part)

        def record(name: str, launched: Work) -> Sequence[torch.Tensor]:
            with outside.suspended():
                results = tuple(launched() or ())
            launches.append(_Launch(name, launched, results))
            return results

        with outside:
            outputs = tuple(work(record))
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for launch in launches
            for tensor in launch.results
        }
        return Captured(tuple(launches), outputs, tuple(launch.name for launch in launches), sum(storages.values()))

    def _replay(self, graph: object) -> None:
        launches: tuple[_Launch, ...] = graph  # type: ignore[assignment]
        for launch in launches:
            launch.run(self.replay_launch)


class _NothingOutsideLaunches(TorchDispatchMode):
    """Refuses what computes outside a launch: it would not be replayed."""

    def __init__(self, part: GraphPart) -> None:
        super().__init__()
        self._part = part

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """For what runs in a launch."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view and not str(func).startswith(_ALLOCATIONS):
            raise CaptureError(f"{func} runs outside every launch of graph {self._part}: it would not be replayed")
        return func(*args, **(kwargs or {}))
