"""Proving the graphs of a runner: captured once more as it captures them, and watched meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from compiled_engine.compile.graphs.backend import GraphBackend
from compiled_engine.compile.graphs.cuda import CaptureWatcher, CudaGraphBackend
from compiled_engine.compile.graphs.graphed_model import GraphedModel
from compiled_engine.compile.graphs.keys import GraphKey
from compiled_engine.errors import ContextStateError
from compiled_engine.runners.caches import scrub_reserved_block
from compiled_engine.runners.gpu import GpuRunner
from compiled_engine_debug.cuda_bindings.driver import GraphReader
from compiled_engine_debug.cuda_bindings.expected import expected_by_launch, known_ranges
from compiled_engine_debug.cuda_bindings.prove import ProvenBindings, prove_bindings
from compiled_engine_debug.cuda_bindings.watch import LaunchWatcher, current_stream

BackendMaker = Callable[[GpuRunner, CaptureWatcher], GraphBackend]
"""Makes a backend that tells the watcher of its captures."""


def cuda_backend(runner: GpuRunner, watcher: CaptureWatcher) -> GraphBackend:
    """A backend on the device of ``runner``."""
    return CudaGraphBackend(runner.static_context, runner.device.torch_device, watcher)


def prove_runner(
    runner: GpuRunner,
    keys: Sequence[GraphKey],
    reader: GraphReader,
    make_backend: BackendMaker = cuda_backend,
    stream: Callable[[], int] = current_stream,
) -> tuple[ProvenBindings, ...]:
    """Capture ``keys`` again on the buffers, weights and caches of ``runner``, and prove what the new graphs use.

    The runner's own graphs stay as they are; the new ones, and their memory, are gone afterwards. No step may run
    meanwhile. Raises ``ContextStateError`` for a closed runner, ``CaptureError`` and ``DriverError``.
    """
    own = runner.graphed
    if own is None:
        raise ContextStateError("the runner is closed")
    watcher = LaunchWatcher(reader, stream)
    again = GraphedModel(own.model, make_backend(runner, watcher))
    runner.graphed = again
    try:
        with torch.inference_mode():
            records = runner._capture(keys)
            scrub_reserved_block(runner.static_context, runner.config.block_size)
        ranges, expected = known_ranges(own.model), expected_by_launch(own.model.plan)
        return prove_bindings(records, watcher.graphs, reader, ranges, expected)
    finally:
        runner.graphed = own
        again.cleanup()
