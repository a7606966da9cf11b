"""CUDA graphs: one memory pool for all of them, captured on a stream of their own with the garbage collector held."""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from compiled_engine.compile.graphs.backend import Captured, CapturedWork, GraphBackend, GraphPart
from compiled_engine.compile.launch import Launch, Work
from compiled_engine.context import StaticForwardContext
from compiled_engine.errors import CaptureError, CompiledEngineError, OutOfMemoryError


class CaptureWatcher(Protocol):
    """Looks on while graphs are captured, for tools. It may read a graph and must not change it."""

    def launched(self, part: GraphPart, name: str) -> None:
        """The launch ``name`` of ``part`` has just been captured, on the current stream."""

    def captured(self, part: GraphPart, graph: int) -> None:
        """The capture of ``part`` is over. ``graph``: its ``cudaGraph_t``, which the backend keeps."""


class CudaGraphBackend(GraphBackend):
    """Captures on ``device``. Graphs share one pool, so the largest should come first: the others fit into its memory.

    A replay runs on the current stream and does not wait for its end. With a ``watcher``, each graph is kept beside
    what is made of it to replay, which takes memory of the host.
    """

    def __init__(
        self, static_context: StaticForwardContext, device: torch.device, watcher: CaptureWatcher | None = None
    ) -> None:
        super().__init__(static_context)
        self._watcher = watcher
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def cleanup(self) -> None:
        """See ``GraphBackend``. The pool goes with its graphs."""
        torch.cuda.synchronize(self._device)
        super().cleanup()
        self._pool = torch.cuda.graph_pool_handle()
        gc.collect()
        torch.cuda.empty_cache()

    def _capture(self, part: GraphPart, work: CapturedWork) -> Captured:
        names: list[str] = []

        def launch(name: str, launched: Work) -> Sequence[torch.Tensor]:
            names.append(name)
            outputs = launched() or ()
            if self._watcher is not None:
                self._watcher.launched(part, name)
            return outputs

        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free_before = torch.cuda.mem_get_info(self._device)[0]
        graph = torch.cuda.CUDAGraph() if self._watcher is None else torch.cuda.CUDAGraph(keep_graph=True)
        try:
            with _collector_held(), torch.cuda.stream(self._stream):
                outputs = self._record(graph, work, launch)
                if self._watcher is not None:
                    # A graph that is kept is not made ready to replay at the end of its capture.
                    graph.instantiate()
                    self._watcher.captured(part, graph.raw_cuda_graph())
        except torch.cuda.OutOfMemoryError as error:
            raise self._no_memory(part, names, error) from error
        except CompiledEngineError:
            raise
        except Exception as error:
            if "out of memory" in str(error):
                raise self._no_memory(part, names, error) from error
            raise CaptureError(
                f"graph {part} cannot be captured: {_last(names)} failed at {_innermost(error)}: {error}"
            ) from error
        torch.cuda.synchronize(self._device)
        taken = max(0, free_before - torch.cuda.mem_get_info(self._device)[0])
        return Captured(graph, outputs, tuple(names), taken)

    def _record(self, graph: torch.cuda.CUDAGraph, work: CapturedWork, launch: Launch) -> tuple[torch.Tensor, ...]:
        # Not ``with torch.cuda.graph``: after work that failed, the end of the capture fails too, and that error would
        # hide the first. Other threads may go on using the device: their calls are no part of this capture.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            outputs = tuple(work(launch))
        except BaseException:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
        return outputs

    @staticmethod
    def _no_memory(part: GraphPart, names: Sequence[str], error: Exception) -> OutOfMemoryError:
        return OutOfMemoryError(
            f"graph {part} does not fit into the GPU's memory, at {_last(names)}: capture fewer or smaller graphs "
            f"(max_graph_size, graph_sizes, max_num_seqs) or graph_mode='none' ({error})"
        )

    def _replay(self, graph: object) -> None:
        graph.replay()  # type: ignore[attr-defined]


def _last(names: Sequence[str]) -> str:
    return names[-1] if names else "the start"


def _innermost(error: BaseException) -> str:
    """The last source line that the error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "an unknown line"


@contextmanager
def _collector_held() -> Iterator[None]:
    """A collection in the middle of a capture could free CUDA memory, which a capture forbids."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
