"""Sampling inside a captured graph, by the Triton kernel, with parameters in memory that stays where it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from compiled_engine.compile.graphs.graphed_model import GraphTail
from compiled_engine.compile.launch import Launch, copying
from compiled_engine.ops.sampling import SampledTokens, SamplingBatch, logprobs_of, no_choice_error, sample
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

    That is log-probabilities, and rows with forbidden tokens, which ``ops.sampling.sample`` samples from the logits.
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

    def graph_tail(self, num_rows: int) -> GraphTail:
        """See ``StepSampler``."""
        return partial(self._tail, num_rows)

    def read_results(self, batch: SamplingBatch) -> SampledTokens:
        """See ``StepSampler``."""
        return self._results(self._logits[: len(batch.num_logprobs)], batch)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
        """See ``StepSampler``."""
        logits = logits.contiguous()
        self.stage(batch, len(logits))
        self._launch(logits)
        return self._results(logits, batch)

    def _tail(self, num_rows: int, logits: torch.Tensor, launch: Launch) -> Sequence[torch.Tensor]:
        kept = self._logits[:num_rows]
        launch("copy of the logits", copying([(kept, logits)]))
        launch("sampling", partial(self._launch, kept))
        return self._token_ids[:num_rows], self._maxima[:num_rows]

    def _launch(self, logits: torch.Tensor) -> None:
        num_rows = len(logits)
        parameters = SamplingBuffers(**{name: buffer.tensor[:num_rows] for name, buffer in self._parameters.items()})
        self._kernel.launch(logits, parameters, self._token_ids[:num_rows], self._maxima[:num_rows])

    def _results(self, logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
        """What the kernel has sampled from ``logits``, and what it does not do. Each row is computed in a way that the
        row alone decides on, so that none depends on its company."""
        num_rows = len(logits)
        token_ids = self._fetch(num_rows)
        forbidding = [row for row, ids in enumerate(batch.forbidden_token_ids) if ids]
        if forbidding:
            again = sample(logits[torch.tensor(forbidding, device=logits.device)], batch.take(forbidding))
            for row, token_id in zip(forbidding, again.token_ids, strict=True):
                token_ids[row] = token_id
        logprobs: tuple[dict[int, float] | None, ...] = (None,) * num_rows
        if any(count >= 0 for count in batch.num_logprobs):
            logprobs = logprobs_of(logits, torch.tensor(token_ids, device=logits.device), batch.num_logprobs)
        return SampledTokens(tuple(token_ids), logprobs)

    def _fetch(self, num_rows: int) -> list[int]:
        """The kernel's tokens, once the device has them. Raises ``LogitsError``."""
        self._host_token_ids[:num_rows].copy_(self._token_ids[:num_rows], non_blocking=True)
        self._host_maxima[:num_rows].copy_(self._maxima[:num_rows], non_blocking=True)
        if self._fetched is not None:
            self._fetched.record()
            self._fetched.synchronize()
        for row, maximum in enumerate(self._host_maxima[:num_rows].tolist()):
            if not math.isfinite(maximum):
                raise no_choice_error(row, maximum)
        return self._host_token_ids[:num_rows].tolist()
