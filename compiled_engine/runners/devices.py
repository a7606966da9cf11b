"""What a runner with captured graphs needs of a device. One file per kind of device has the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from compiled_engine.compile.graphs.backend import GraphBackend
from compiled_engine.compile.graphs.graphed_model import GraphTail
from compiled_engine.context import StaticForwardContext
from compiled_engine.ops.attention import AttentionSpec, PersistentAttentionBackend
from compiled_engine.ops.sampling import SampledTokens, SamplingBatch

if TYPE_CHECKING:
    from compiled_engine.config import EngineConfig


class StepSampler(Protocol):
    """Samples the rows of a step, inside its graph or after it."""

    def outputs(self, num_rows: int) -> Mapping[str, torch.Tensor]:
        """Where ``graph_tail`` leaves the results of ``num_rows`` rows, by name."""
        ...

    def workspaces(self, num_rows: int) -> Mapping[str, torch.Tensor]:
        """What ``graph_tail`` reads and uses besides the logits, by name."""
        ...

    def stage(self, batch: SamplingBatch, num_rows: int) -> None:
        """Write the parameters of ``batch``, and of padding up to ``num_rows`` rows, for ``graph_tail``."""
        ...

    def graph_tail(self, num_rows: int) -> GraphTail:
        """The end of a graph of ``num_rows`` rows of logits."""
        ...

    def read_results(self, batch: SamplingBatch) -> SampledTokens:
        """The tokens of ``batch`` after a graph that ends with ``graph_tail`` was replayed. Raises ``LogitsError``."""
        ...

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
        """The tokens of ``batch`` for logits [n, vocab_size] that are at hand. Raises ``LogitsError``."""
        ...


class Device(Protocol):
    """One device: how attention, sampling and graphs work there, and its memory."""

    torch_device: torch.device

    def attention_backend(self, layers: Sequence[AttentionSpec]) -> PersistentAttentionBackend:
        """What computes attention in ``layers``."""
        ...

    def graph_backend(self, static_context: StaticForwardContext) -> GraphBackend:
        """What captures and replays."""
        ...

    def sampler(self, vocab_size: int, max_rows: int, dtype: torch.dtype) -> StepSampler:
        """What samples. ``dtype``: of logits."""
        ...

    def max_seq_len_buckets(self, max_model_len: int) -> tuple[int, ...]:
        """Bounds of the cached tokens of a request between which attention is launched otherwise, ascending."""
        ...

    def prepare_step(self, num_tokens: int) -> None:
        """Called before every step is staged."""
        ...

    def free_memory(self) -> int:
        """Bytes that caches may take now."""
        ...

    def default_cache_memory(self, free: int) -> int | None:
        """The most that caches take of ``free`` bytes when nobody says how much; None: see ``size_cache_groups``."""
        ...

    def reset_peak(self) -> None:
        """Forget the most memory that was in use."""
        ...

    def peak_above_current(self) -> int:
        """Bytes that were in use for a while since ``reset_peak``, beyond those in use now; 0 where nobody counts."""
        ...


def create_device(config: EngineConfig, dtype: torch.dtype) -> Device:
    """The device that ``config`` names. Raises ``ConfigError`` where it is not there."""
    if config.device_type == "cpu":
        from compiled_engine.runners.cpu_device import CpuDevice

        return CpuDevice(config, dtype)
    from compiled_engine.runners.cuda_device import CudaDevice

    return CudaDevice(config, dtype)
