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

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.replays = 0

    def capture_begin(self, **options: Any) -> None:
        self._cuda.captures.append({**options, "stream": self._cuda.current_stream, "gc": gc.isenabled()})

    def capture_end(self) -> None:
        if self._cuda.invalidated:
            raise RuntimeError("operation failed due to a previous error during capture")
        self._cuda.free -= 700

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

    def graph(self) -> FakeGraph:
        self.graphs.append(FakeGraph(self))
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
    backend.replay(other, dict)
    assert [graph.replays for graph in cuda.graphs] == [0, 1]
    assert backend.outputs(PART)[0].tolist() == [2, 2]
    backend.cleanup()
    assert cuda.pools == 2, "a pool is never used after its graphs are gone"


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
