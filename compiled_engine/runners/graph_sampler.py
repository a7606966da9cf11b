"""Sampling inside a captured graph, by the Triton kernel, with parameters in memory that stays where it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from compiled_engine.compile.graphs.graphed_model import Finish
from compiled_engine.compile.launch import Launch
from compiled_engine.ops.sampling import SampledTokens, SamplingBatch, no_choice_error, sample
from compiled_engine.ops.triton.sampling import SamplingBuffers, TritonSampler
from compiled_engine.runners.step_buffers import PersistentTensor

# Parameters of a row of padding: greedy. By name, with the type.
_PADDING: Mapping[str, tuple[torch.dtype, float]] = {
    "temperature": (torch.float32, 0),
    "top_k": (torch.int64, 0),
    "top_p": (torch.float32, 1),
    "min_p": (torch.float32, 0),
    "seeds": (torch.int64, 0),
    "positions": (torch.int64, 0),
}


class GraphSampler:
    """A ``StepSampler`` whose graphs end with token ids; their logits stay for what is not done in a graph.

    That is log-probabilities and forbidden tokens, which only some requests ask for: such steps are sampled from the
    logits by ``ops.sampling.sample``.
    """

    def __init__(self, vocab_size: int, max_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self._kernel = TritonSampler(vocab_size, max_rows, device)
        self._parameters = {name: PersistentTensor([max_rows], kind, device) for name, (kind, _) in _PADDING.items()}
        self._logits = torch.zeros(max_rows, vocab_size, dtype=dtype, device=device)
        self._token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._maxima = torch.zeros(max_rows, dtype=torch.float32, device=device)
        on_gpu = device.type == "cuda"
        self._host_token_ids = torch.zeros(max_rows, dtype=torch.int64, pin_memory=on_gpu)
        self._host_maxima = torch.zeros(max_rows, dtype=torch.float32, pin_memory=on_gpu)
        self._fetched = torch.cuda.Event() if on_gpu else None

    def outputs(self, num_rows: int) -> Mapping[str, torch.Tensor]:
        """See ``StepSampler``."""
        return {
            "token_ids": self._token_ids[:num_rows],
            "maxima": self._maxima[:num_rows],
            "logits": self._logits[:num_rows],
        }

    def workspaces(self, num_rows: int) -> Mapping[str, torch.Tensor]:
        """See ``StepSampler``."""
        parameters = {name: buffer.tensor[:num_rows] for name, buffer in self._parameters.items()}
        return {**parameters, **self._kernel.workspaces()}

    def stage(self, batch: SamplingBatch, num_rows: int) -> None:
        """See ``StepSampler``."""
        for name, buffer in self._parameters.items():
            buffer.write(getattr(batch, name).numpy(), num_rows, _PADDING[name][1])

    def finish(self, num_rows: int) -> Finish:
        """See ``StepSampler``."""
        return partial(self._finish, num_rows)

    def finished(self, batch: SamplingBatch) -> SampledTokens:
        """See ``StepSampler``."""
        num_rows = len(batch.num_logprobs)
        if _needs_logits(batch):
            return sample(self._logits[:num_rows], batch)
        return self._fetch(num_rows)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
        """See ``StepSampler``."""
        if _needs_logits(batch):
            return sample(logits, batch)
        num_rows = len(logits)
        self.stage(batch, num_rows)
        self._launch(logits.contiguous())
        return self._fetch(num_rows)

    def _finish(self, num_rows: int, logits: torch.Tensor, launch: Launch) -> Sequence[torch.Tensor]:
        kept = self._logits[:num_rows]
        launch("copy of the logits", partial(_copy, kept, logits))
        launch("sampling", partial(self._launch, kept))
        return self._token_ids[:num_rows], self._maxima[:num_rows]

    def _launch(self, logits: torch.Tensor) -> None:
        num_rows = len(logits)
        parameters = SamplingBuffers(**{name: buffer.tensor[:num_rows] for name, buffer in self._parameters.items()})
        self._kernel.launch(logits, parameters, self._token_ids[:num_rows], self._maxima[:num_rows])

    def _fetch(self, num_rows: int) -> SampledTokens:
        """The sampled tokens, once the device has them."""
        self._host_token_ids[:num_rows].copy_(self._token_ids[:num_rows], non_blocking=True)
        self._host_maxima[:num_rows].copy_(self._maxima[:num_rows], non_blocking=True)
        if self._fetched is not None:
            self._fetched.record()
            self._fetched.synchronize()
        for row, maximum in enumerate(self._host_maxima[:num_rows].tolist()):
            if not math.isfinite(maximum):
                raise no_choice_error(row, maximum)
        return SampledTokens(tuple(self._host_token_ids[:num_rows].tolist()), (None,) * num_rows)


def _needs_logits(batch: SamplingBatch) -> bool:
    return any(count >= 0 for count in batch.num_logprobs) or any(batch.forbidden_token_ids)


def _copy(to: torch.Tensor, value: torch.Tensor) -> None:
    to.copy_(value)
