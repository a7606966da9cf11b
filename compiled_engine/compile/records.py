"""What the engine can tell of itself, as plain data: one dataclass per kind of line of a recording.

Fields have the names that they have in the file. Nothing here holds prompt text or token ids. Times are seconds since
the zero of the start's ``Ledger``, addresses and sizes are bytes, dtypes are names without ``torch.``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import torch

    from compiled_engine.compile.graphs.backend import GraphRecord
    from compiled_engine.compile.plan import GraphPlan

RECORDING_VERSION = 1

StepMode = Literal["eager", "piecewise", "full", "bucket"]


@dataclass(frozen=True)
class ModelRecord:
    """The model: class name in its config, arithmetic type, logits per row, attention layers."""

    architecture: str | None
    dtype: str
    vocab_size: int
    num_layers: int


@dataclass(frozen=True)
class HeaderRecord:
    """Who made a recording, when (UTC, ISO 8601), and of what. ``model`` is None when the engine did not start.

    ``config``: the fields of ``EngineConfig``; of a path only its last component. ``versions``: by package, None for
    one that is not installed.
    """

    version: int
    engine: str
    created: str
    versions: Mapping[str, str | None]
    device: str
    config: Mapping[str, Any]
    model: ModelRecord | None


@dataclass(frozen=True)
class CacheRecord:
    """The KV cache of one layer. ``shares_with``: the layer whose cache it is. ``address`` None: it has none to tell.

    ``num_bytes`` of a shared cache are those of the one tensor.
    """

    layer: str
    group: int
    address: int | None
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    shares_with: str | None


@dataclass(frozen=True)
class WeightRecord:
    """One weight as the model is given it. ``num_bytes`` counts all of a packed one, ``shape`` is its head's."""

    name: str
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]
    address: int | None

    @property
    def num_bytes_at_address(self) -> int:
        """What lies at ``address``: of a packed weight its head, while the numbers lie elsewhere."""
        import torch  # reading help and most recordings needs none of it

        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            return self.num_bytes
        return min(self.num_bytes, math.prod(self.shape) * dtype.itemsize)


@dataclass(frozen=True)
class BindingRecord:
    """One tensor that a captured graph uses; see ``compile.graphs.bindings.Binding``."""

    role: str
    name: str
    address: int
    num_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    epoch: int


@dataclass(frozen=True)
class CapturedGraphRecord:
    """One captured graph: the ``part``-th of the key ``key``; see ``compile.graphs.backend.GraphRecord``."""

    key: str
    part: int
    bindings: tuple[BindingRecord, ...]
    launches: tuple[str, ...]
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class KeyRecord:
    """A size for which a graph was declared before any step ran. ``num_padded_requests`` of a bucket: sampled rows."""

    key: str
    num_padded_tokens: int
    num_padded_requests: int
    kind: Literal["full", "piecewise", "bucket"]


@dataclass(frozen=True)
class MemoryRecord:
    """Bytes when the engine was ready; None: unknown.

    ``workspaces``: buffers that steps are staged in and that kernels use. ``estimated_working``: what a step was found
    to take beside all of these. ``resident``: of this process. ``device_allocated``: by torch on the GPU.
    """

    weights: int
    kv_cache: int
    graphs: int
    workspaces: int
    estimated_working: int | None
    resident: int | None
    device_allocated: int | None


@dataclass(frozen=True)
class CompileRecord:
    """Something that torch traced or compiled, with torch's reason and a description of the inputs.

    ``after_warmup``: the engine was ready when it began.
    """

    what: str
    reason: str | None
    inputs: str | None
    start: float
    seconds: float
    after_warmup: bool


class ScheduledShare(NamedTuple):
    """One request's share of a step: positions ``num_computed_tokens`` on, ``num_scheduled_tokens`` of them.

    ``samples``: whether it got a new token.
    """

    request_id: str
    num_computed_tokens: int
    num_scheduled_tokens: int
    samples: bool


@dataclass(frozen=True)
class StepRecord:
    """One step. ``index`` counts the steps of the engine from 0; ``seconds`` is the time in the runner.

    ``mode``, ``key``, ``reason``, ``epoch`` and the padded numbers are those of ``StepFacts``.
    """

    index: int
    start: float
    seconds: float
    num_tokens: int
    num_padded_tokens: int
    num_requests: int
    num_padded_requests: int
    num_sampled: int
    mode: StepMode
    key: str | None
    reason: str | None
    epoch: int
    requests: tuple[ScheduledShare, ...]


@dataclass(frozen=True)
class RunnerRecord:
    """What a runner that is ready tells of itself. ``plan`` None: it runs none."""

    model: ModelRecord
    plan: GraphPlan | None = None
    caches: tuple[CacheRecord, ...] = ()
    weights: tuple[WeightRecord, ...] = ()
    graphs: tuple[CapturedGraphRecord, ...] = ()
    keys: tuple[KeyRecord, ...] = ()
    memory: MemoryRecord | None = None


def dtype_name(dtype: torch.dtype) -> str:
    """``dtype`` as records name it: ``float32``."""
    return str(dtype).removeprefix("torch.")


def captured_graph_records(graphs: Iterable[GraphRecord]) -> tuple[CapturedGraphRecord, ...]:
    """The same as plain data, in the same order."""
    return tuple(
        CapturedGraphRecord(
            key=str(graph.part.key),
            part=graph.part.index,
            bindings=tuple(
                BindingRecord(
                    role=binding.role.value,
                    name=binding.name,
                    address=binding.address,
                    num_bytes=binding.num_bytes,
                    shape=binding.shape,
                    stride=binding.stride,
                    dtype=dtype_name(binding.dtype),
                    epoch=binding.epoch,
                )
                for binding in graph.bindings
            ),
            launches=graph.launches,
            num_bytes=graph.num_bytes,
            seconds=graph.seconds,
        )
        for graph in graphs
    )
