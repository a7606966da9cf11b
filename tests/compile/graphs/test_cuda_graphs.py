"""The CUDA graph backend against a stand-in for torch's graphs: pool, stream, order of calls, and failures by name.

Nothing here says that a GPU does what torch promises: that is what ``tools/gpu_check`` is for.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from compiled_engine.compile.graphs.backend import GraphPart
from compiled_engine.compile.graphs.cuda import CudaGraphBackend
from compiled_engine.compile.graphs.keys import GraphKey, GraphKind
from compiled_engine.compile.launch import Launch
from compiled_engine.context import StaticForwardContext
from compiled_engine.errors import CaptureError, OutOfMemoryError

PART = GraphPart(GraphKey(GraphKind.FULL, 4, 4, 1, 64, 1))


class FakeGraph:
    """As much of ``torch.cuda.CUDAGraph`` as is called. Like it, it cannot end a capture that has failed."""

    def __init__(self, cuda: FakeCuda, keep_graph: bool) -> None:
        self._cuda = cuda
        self.keeps_graph = keep_graph
        self.is_ready = False
        self.replays = 0

    def capture_begin(self, **options: Any) -> None:
        self._cuda.captures.append({**options, "stream": self._cuda.current_stream, "gc": gc.isenabled()})

    def capture_end(self) -> None:
        if self._cuda.invalidated:
            raise RuntimeError("operation failed due to a previous error during capture")
        if not self.keeps_graph:
            self.instantiate()

    def instantiate(self) -> None:
        self.is_ready = True
        self._cuda.free -= 700

    def raw_cuda_graph(self) -> int:
        if not self.keeps_graph:
            raise RuntimeError("You cannot access the raw graph unless it was made with keep_graph")
        return 1000 + self._cuda.graphs.index(self)

    def replay(self) -> None:
        self.replays += 1


class FakeCuda:
    """Stands in for the parts of torch.cuda that a capture uses; notes what it is asked for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.captures: list[dict[str, Any]] = []
        self.graphs: list[FakeGraph] = []
        self.free = 10_000
        self.pools = 0
        self.invalidated = False
        self.current_stream = "default stream"
        patch.setattr(torch.cuda, "Stream", lambda device: f"stream of {device}")
        patch.setattr(torch.cuda, "graph_pool_handle", self.pool)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, 20_000))
        patch.setattr(torch.cuda, "CUDAGraph", self.graph)
        patch.setattr(torch.cuda, "stream", self.stream)

    def pool(self) -> int:
        self.pools += 1
        return self.pools

    def graph(self, keep_graph: bool = False) -> FakeGraph:
        self.graphs.append(FakeGraph(self, keep_graph))
        return self.graphs[-1]

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.current_stream = self.current_stream, stream
        try:
            yield
        finally:
            self.current_stream = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


@pytest.fixture
def backend(cuda: FakeCuda) -> CudaGraphBackend:
    return CudaGraphBackend(StaticForwardContext(), torch.device("cuda:1"))


def double(launch: Launch) -> Sequence[torch.Tensor]:
    return launch("double", lambda: (torch.ones(2) * 2,))


def test_graphs_share_a_pool_and_a_stream_and_hold_the_collector(cuda: FakeCuda, backend: CudaGraphBackend) -> None:
    other = GraphPart(GraphKey(GraphKind.FULL, 2, 2, 1, 64, 1))
    record = backend.capture_one(PART, double, {})
    backend.capture_one(other, double, {})
    assert (
        cuda.captures
        == [{"pool": 1, "stream": "stream of cuda:1", "capture_error_mode": "thread_local", "gc": False}] * 2
    )
    assert gc.isenabled()
    assert (record.launches, record.num_bytes) == (("double",), 700)
    assert not any(graph.keeps_graph for graph in cuda.graphs)
    backend.replay(other, dict)
    assert [graph.replays for graph in cuda.graphs] == [0, 1]
    assert backend.outputs(PART)[0].tolist() == [2, 2]
    backend.cleanup()
    assert cuda.pools == 2, "a pool is never used after its graphs are gone"


class Watcher:
    """Notes what it is told, and on which stream."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.seen: list[tuple[object, ...]] = []

    def launched(self, part: GraphPart, name: str) -> None:
        self.seen.append((part, name, self._cuda.current_stream))

    def captured(self, part: GraphPart, graph: int) -> None:
        self.seen.append((part, graph))


def test_a_watcher_sees_every_launch_and_the_graph(cuda: FakeCuda) -> None:
    watcher = Watcher(cuda)
    backend = CudaGraphBackend(StaticForwardContext(), torch.device("cuda:1"), watcher)
    other = GraphPart(PART.key, 2)

    def twice(launch: Launch) -> Sequence[torch.Tensor]:
        launch("first", lambda: watcher.seen.append(("now", "first")))  # type: ignore[func-returns-value]
        return double(launch)

    record = backend.capture_one(PART, twice, {})
    backend.capture_one(other, double, {})
    stream = "stream of cuda:1"
    assert watcher.seen == [
        ("now", "first"),
        (PART, "first", stream),
        (PART, "double", stream),
        (PART, 1000),
        (other, "double", stream),
        (other, 1001),
    ]
    assert all(graph.is_ready for graph in cuda.graphs)
    assert record.num_bytes == 700
    assert backend.outputs(PART)[0].tolist() == [2, 2]


def fail(launch: Launch) -> Sequence[torch.Tensor]:
    launch("piece one", lambda: ())
    return launch("attention of layer 'layers.7'", not_permitted)


def not_permitted() -> Sequence[torch.Tensor]:
    raise RuntimeError("operation not permitted when stream is capturing")


def test_a_failure_names_the_launch_and_the_line(cuda: FakeCuda, backend: CudaGraphBackend) -> None:
    cuda.invalidated = True
    message = (
        r"graph full decode 4 requests.*attention of layer 'layers\.7' failed at .*test_cuda_graphs\.py:\d+ in "
        r"not_permitted: operation not permitted"
    )
    with pytest.raises(CaptureError, match=message):
        backend.capture_one(PART, fail, {})
    assert gc.isenabled()
    assert cuda.current_stream == "default stream"
    assert not backend.can_run(PART)


def test_memory_that_is_short_names_the_settings(cuda: FakeCuda, backend: CudaGraphBackend) -> None:
    cuda.invalidated = True

    def out_of_memory(launch: Launch) -> Sequence[torch.Tensor]:
        return launch("piece one", lambda: (_ for _ in ()).throw(torch.cuda.OutOfMemoryError("CUDA out of memory")))

    with pytest.raises(OutOfMemoryError, match=r"at piece one: capture fewer or smaller graphs \(max_graph_size"):
        backend.capture_one(PART, out_of_memory, {})
