"""Sampling of a step by a few compiled functions of static shapes: rows are filled up to a bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F

from compiled_engine.errors import LogitsError
from compiled_engine.ops import static_sampling
from compiled_engine.ops.sampling import (
    SampledTokens,
    SamplingBatch,
    check_maxima,
    greedy_batch,
    least_scaled,
    logprobs_of,
    uniform,
)
from compiled_engine.runners.platforms import Function

# Most log-probabilities of a row that are computed on the device; rows that want more are looked up on the host.
COMPILED_LOGPROBS = 32


class Compile(Protocol):
    """Compiles a function of tensors as a whole, anew for each combination of shapes."""

    def __call__(self, function: Function, /) -> Function: ...


class BucketedSampler:
    """``ops.sampling.sample`` for logits of ``vocab_size`` tokens, in functions compiled by ``compile``.

    A step runs: ``forbid`` if some row forbids tokens; ``draw`` if some row has a temperature, else ``most_likely``;
    ``top_logprobs`` if some row wants log-probabilities. What they take has the same types in every step and a shape
    that depends on the number of rows alone, so ``warm_up_batches`` runs everything that will ever be compiled. Outside
    of them nothing is computed on the device: results are sliced and looked at on the host.
    """

    def __init__(self, compile: Compile, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._num_logprobs = min(COMPILED_LOGPROBS, vocab_size)
        self._forbid = compile(static_sampling.forbid)
        self._most_likely = compile(static_sampling.most_likely)
        self._draw = compile(static_sampling.draw)
        self._top_logprobs = compile(static_sampling.top_logprobs)

    def host_inputs(self, batch: SamplingBatch, num_rows: int) -> tuple[torch.Tensor, ...]:
        """CPU tensors that ``sample`` reads on the device, for the rows of ``batch`` and padding up to ``num_rows``.

        bool [num_rows, vocab_size] if some row forbids tokens (ids outside of the vocabulary are ignored); then the
        parameters of ``static_sampling.draw`` if some row has a temperature. None for rows that are only greedy.
        Raises ``LogitsError`` if ``batch`` has more than ``num_rows`` rows.
        """
        padding = num_rows - len(batch.num_logprobs)
        if padding < 0:
            raise LogitsError(f"{len(batch.num_logprobs)} rows are to be sampled in a bucket of {num_rows}")
        masks = (self._mask(batch, num_rows),) if _forbids(batch) else ()
        if not _is_random(batch):
            return masks
        return (
            *masks,
            F.pad(_normal(batch.temperature), (0, padding)),
            F.pad(batch.top_k.long(), (0, padding)),
            F.pad(batch.top_p.float(), (0, padding), value=1.0),
            F.pad(least_scaled(batch.min_p), (0, padding), value=-torch.inf),
            F.pad(uniform(batch.seeds, batch.positions), (0, padding)),
        )

    def sample(self, logits: torch.Tensor, batch: SamplingBatch, inputs: Sequence[torch.Tensor]) -> SampledTokens:
        """Sample a token for each row of ``batch``.

        logits: [num_rows, vocab_size] on the device; rows beyond those of ``batch`` are padding and may hold anything.
        inputs: ``host_inputs(batch, num_rows)``, moved to the device.

        Waits for the device. Raises ``LogitsError`` as ``ops.sampling.sample`` does, and for logits of another shape.
        """
        num_rows = len(batch.num_logprobs)
        if logits.dim() != 2 or logits.shape[0] < num_rows or logits.shape[1] != self._vocab_size:
            raise LogitsError(
                f"logits have shape {list(logits.shape)}, expected [at least {num_rows}, {self._vocab_size}]"
            )
        if num_rows == 0:
            return SampledTokens((), ())
        allowed, parameters = logits, inputs
        if _forbids(batch):
            allowed, parameters = self._forbid(logits, inputs[0]), inputs[1:]
        token_ids, maxima = self._draw(allowed, *parameters) if _is_random(batch) else self._most_likely(allowed)
        check_maxima(maxima.cpu()[:num_rows], range(num_rows))
        logprobs = self._logprobs(logits, token_ids, batch.num_logprobs)
        return SampledTokens(tuple(token_ids.cpu()[:num_rows].tolist()), logprobs)

    def warm_up_batches(self, num_rows: int) -> Iterator[SamplingBatch]:
        """Batches of ``num_rows`` rows which together run every function, with all that can come before it."""
        greedy = greedy_batch(num_rows)
        random = replace(greedy, temperature=torch.ones(num_rows))
        yield greedy
        yield random
        yield replace(greedy, num_logprobs=(1,) * num_rows)
        if self._vocab_size > 1:
            forbidden = ((0,),) * num_rows
            yield replace(greedy, forbidden_token_ids=forbidden)
            yield replace(random, forbidden_token_ids=forbidden)

    def _mask(self, batch: SamplingBatch, num_rows: int) -> torch.Tensor:
        mask = torch.zeros(num_rows, self._vocab_size, dtype=torch.bool)
        for row, ids in enumerate(batch.forbidden_token_ids):
            mask[row, [token_id for token_id in ids if token_id < self._vocab_size]] = True
        return mask

    def _logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: tuple[int, ...]
    ) -> tuple[dict[int, float] | None, ...]:
        """What ``ops.sampling.logprobs_of`` gives for the first rows, as many as ``num_logprobs`` has."""
        num_rows = len(num_logprobs)
        if max(num_logprobs) < 0:
            return (None,) * num_rows
        results = (token_ids, *self._top_logprobs(logits, token_ids, self._num_logprobs))
        sampled, logprobs, top_logprobs, top_ids = (tensor.cpu()[:num_rows] for tensor in results)
        # Where they are not numbers the row's logits cannot be used, and the host finds out why.
        is_nan = logprobs.isnan().tolist()
        on_host = tuple(
            count if is_nan[row] or min(count, self._vocab_size) > self._num_logprobs else -1
            for row, count in enumerate(num_logprobs)
        )
        columns = (column.tolist() for column in (sampled, logprobs, top_logprobs, top_ids))
        entries = list(map(_entry, num_logprobs, *columns))
        if max(on_host) >= 0:
            from_host = logprobs_of(logits.cpu()[:num_rows], sampled, on_host)
            entries = [entry if late is None else late for entry, late in zip(entries, from_host, strict=True)]
        return tuple(entries)


def _entry(
    count: int, token_id: int, logprob: float, top_logprobs: Sequence[float], top_ids: Sequence[int]
) -> dict[int, float] | None:
    """Of one row: the sampled token first, then the ``count`` most likely ones; None for a negative ``count``."""
    if count < 0:
        return None
    return {token_id: logprob} | dict(zip(top_ids[:count], top_logprobs[:count], strict=True))


def _normal(temperature: torch.Tensor) -> torch.Tensor:
    """``temperature`` with the least normal number for subnormal ones, which XLA takes for 0."""
    return torch.where(temperature > 0, temperature.clamp(min=torch.finfo(torch.float32).tiny), 0.0)


def _forbids(batch: SamplingBatch) -> bool:
    return any(batch.forbidden_token_ids)


def _is_random(batch: SamplingBatch) -> bool:
    return bool((batch.temperature > 0).any())
