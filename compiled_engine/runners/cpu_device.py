"""The CPU as a device with captured graphs: an emulation, by which all of that path is tested without a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from compiled_engine.compile.graphs.graphed_model import GraphTail
from compiled_engine.compile.graphs.recording import RecordingBackend
from compiled_engine.compile.launch import Launch, copying
from compiled_engine.context import StaticForwardContext
from compiled_engine.ops.attention import AttentionSpec
from compiled_engine.ops.cpu import CpuAttention
from compiled_engine.ops.cpu.build import load_kernels
from compiled_engine.ops.cpu.sampling import CpuSampler
from compiled_engine.ops.cpu.threads import CpuThreads
from compiled_engine.ops.sampling import SampledTokens, SamplingBatch
from compiled_engine.runners.memory import available_memory
from compiled_engine.runners.precompile import kernel_folder
from compiled_engine.threads import usable_cores

if TYPE_CHECKING:
    from compiled_engine.config import EngineConfig


class CpuDevice:
    """A ``Device``. Graphs are emulated by ``RecordingBackend``; they end with the logits, and sampling follows."""

    def __init__(self, config: EngineConfig, dtype: torch.dtype) -> None:
        self.torch_device = torch.device("cpu")
        kernels = load_kernels(kernel_folder(config))
        self._attention = CpuAttention(dtype, kernels)
        self._threads = CpuThreads(kernels, config.num_threads or usable_cores())
        self._sampler = CpuSampler(kernels)

    def attention_backend(self, layers: Sequence[AttentionSpec]) -> CpuAttention:
        """See ``Device``. One kernel computes all layers."""
        return self._attention

    def graph_backend(self, static_context: StaticForwardContext) -> RecordingBackend:
        """See ``Device``."""
        return RecordingBackend(static_context)

    def sampler(self, vocab_size: int, max_rows: int, dtype: torch.dtype) -> LogitsSampler:
        """See ``Device``."""
        return LogitsSampler(self._sampler, torch.zeros(max_rows, vocab_size, dtype=dtype))

    def max_seq_len_buckets(self, max_model_len: int) -> tuple[int, ...]:
        """See ``Device``. The kernel decides by itself how to share its work out."""
        return (max_model_len,)

    def prepare_step(self, num_tokens: int) -> None:
        """See ``Device``."""
        self._threads.prepare_step(num_tokens)

    def free_memory(self) -> int:
        """See ``Device``."""
        return available_memory()

    def default_cache_memory(self, free: int) -> int | None:
        """See ``Device``."""
        return None

    def reset_peak(self) -> None:
        """See ``Device``."""

    def peak_above_current(self) -> int:
        """See ``Device``."""
        return 0


class LogitsSampler:
    """A ``StepSampler`` whose graphs end with the logits, in ``logits`` [max_rows, vocab_size]."""

    def __init__(self, sampler: CpuSampler, logits: torch.Tensor) -> None:
        self._sampler = sampler
        self._logits = logits

    def outputs(self, num_rows: int) -> Mapping[str, torch.Tensor]:
        """See ``StepSampler``."""
        return {"logits": self._logits[:num_rows]}

    def workspaces(self, num_rows: int) -> Mapping[str, torch.Tensor]:
        """See ``StepSampler``."""
        return {}

    def stage(self, batch: SamplingBatch, num_rows: int) -> None:
        """See ``StepSampler``."""

    def graph_tail(self, num_rows: int) -> GraphTail:
        """See ``StepSampler``."""
        return partial(_copy_logits, self._logits[:num_rows])

    def read_results(self, batch: SamplingBatch) -> SampledTokens:
        """See ``StepSampler``."""
        return self.sample(self._logits[: len(batch.num_logprobs)], batch)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
        """See ``StepSampler``."""
        return self._sampler.sample(logits, batch)


def _copy_logits(to: torch.Tensor, logits: torch.Tensor, launch: Launch) -> Sequence[torch.Tensor]:
    launch("copy of the logits", copying([(to, logits)]))
    return (to,)
