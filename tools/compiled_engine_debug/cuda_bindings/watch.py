"""Which node of a CUDA graph was made by which launch, noted while the graph is captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from compiled_engine.compile.graphs.backend import GraphPart
from compiled_engine_debug.cuda_bindings.driver import GraphReader


@dataclass(frozen=True)
class WatchedGraph:
    """A captured graph. ``graph``: its ``CUgraph``, valid while the backend that captured it keeps it.

    ``launches``: of each of its nodes, by handle, the name of the launch that made it.
    """

    part: GraphPart
    graph: int
    launches: Mapping[int, str]


def current_stream() -> int:
    """The ``CUstream`` that PyTorch uses now."""
    return torch.cuda.current_stream().cuda_stream


class LaunchWatcher:
    """A ``CaptureWatcher`` that keeps what it sees of every captured part, the last time if there are several.

    ``reader``: asked during captures. ``stream``: gives the ``CUstream`` of the capture.
    """

    def __init__(self, reader: GraphReader, stream: Callable[[], int] = current_stream) -> None:
        self.graphs: dict[GraphPart, WatchedGraph] = {}
        self._reader = reader
        self._stream = stream
        self._capturing: tuple[GraphPart, int] | None = None
        self._launches: dict[int, str] = {}

    def launched(self, part: GraphPart, name: str) -> None:
        """See ``CaptureWatcher``. Nodes that were not there at the last launch are this one's."""
        graph = self._reader.graph_being_captured(self._stream())
        if graph is None:
            return
        if self._capturing != (part, graph):
            self._capturing, self._launches = (part, graph), {}
        for node in self._reader.node_handles(graph):
            self._launches.setdefault(node, name)

    def captured(self, part: GraphPart, graph: int) -> None:
        """See ``CaptureWatcher``."""
        launches = self._launches if self._capturing == (part, graph) else {}
        self.graphs[part] = WatchedGraph(part, graph, launches)
        self._capturing, self._launches = None, {}
