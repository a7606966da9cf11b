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
    """As much of ``torch.cuda.CUDAGraph`` as is called."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


class FakeCuda:
    """Stands in for the parts of torch.cuda that a capture uses; notes what it is asked for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.captures: list[dict[str, Any]] = []
        self.graphs: list[FakeGraph] = []
        self.free = 10_000
        self.pools = 0
        patch.setattr(torch.cuda, "Stream", lambda device: f"stream of {device}")
        patch.setattr(torch.cuda, "graph_pool_handle", self.pool)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, 20_000))
        patch.setattr(torch.cuda, "CUDAGraph", self.graph)
        patch.setattr(torch.cuda, "graph", self.capture)

    def pool(self) -> int:
        self.pools += 1
        return self.pools

    def graph(self) -> FakeGraph:
        self.graphs.append(FakeGraph())
        return self.graphs[-1]

    @contextmanager
    def capture(self, graph: FakeGraph, **options: Any) -> Iterator[None]:
        self.captures.append({**options, "gc": gc.isenabled()})
        yield
        self.free -= 700


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


def test_a_failure_names_the_launch_and_the_line(backend: CudaGraphBackend) -> None:
    message = (
        r"graph full decode 4 requests.*attention of layer 'layers\.7' failed at .*test_cuda_graphs\.py:\d+ in "
        r"not_permitted: operation not permitted"
    )
    with pytest.raises(CaptureError, match=message):
        backend.capture_one(PART, fail, {})
    assert gc.isenabled()
    assert not backend.can_run(PART)


def test_memory_that_is_short_names_the_settings(backend: CudaGraphBackend) -> None:
    def out_of_memory(launch: Launch) -> Sequence[torch.Tensor]:
        return launch("piece one", lambda: (_ for _ in ()).throw(torch.cuda.OutOfMemoryError("CUDA out of memory")))

    with pytest.raises(OutOfMemoryError, match=r"at piece one: capture fewer or smaller graphs \(max_graph_size"):
        backend.capture_one(PART, out_of_memory, {})
