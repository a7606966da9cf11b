"""The mathematics of sampling: logits and per-row parameters in, token ids out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from compiled_engine.errors import LogitsError

# Sizes of the sorted heads that are tried before a whole vocabulary is sorted for top_p: most distributions are narrow.
_TOP_P_HEADS = (256, 2048)
# Tokens per block of the two-level cumulative distribution.
BLOCK = 128


@dataclass(frozen=True)
class SamplingBatch:
    """Sampling parameters of the rows of one step, ``n`` rows; CPU tensors.

    temperature: float32 [n]; 0 means greedy.   top_k: int64 [n]; 0 means all.   top_p, min_p: float32 [n].
    seeds: int64 [n], one per request.   positions: int64 [n], index of the token to be sampled in its sequence.
    forbidden_token_ids: per row, tokens that may not be sampled now (stop tokens before ``min_tokens``).
    num_logprobs: per row, how many top log-probabilities are wanted (-1: none).
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    forbidden_token_ids: tuple[tuple[int, ...], ...]
    num_logprobs: tuple[int, ...]

    def take(self, rows: Sequence[int]) -> SamplingBatch:
        """The parameters of ``rows`` alone."""
        index = torch.tensor(rows, dtype=torch.int64)
        return SamplingBatch(
            temperature=self.temperature[index],
            top_k=self.top_k[index],
            top_p=self.top_p[index],
            min_p=self.min_p[index],
            seeds=self.seeds[index],
            positions=self.positions[index],
            forbidden_token_ids=tuple(self.forbidden_token_ids[row] for row in rows),
            num_logprobs=tuple(self.num_logprobs[row] for row in rows),
        )


def greedy_batch(num_rows: int) -> SamplingBatch:
    """``num_rows`` rows that take the most likely token and ask for nothing else."""
    none, zeros = torch.zeros(num_rows, dtype=torch.int64), torch.zeros(num_rows)
    return SamplingBatch(zeros, none, torch.ones(num_rows), zeros, none, none, ((),) * num_rows, (-1,) * num_rows)


@dataclass(frozen=True)
class SampledTokens:
    """token_ids: one per row.  logprobs: per row, None or ``{token_id: log-probability}``, the sampled one included."""

    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, float] | None, ...]


def sample(logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
    """Sample one token per row of ``logits`` [n, vocab_size], float32, bfloat16 or float16, on any device.

    A row with temperature 0 takes the token with the largest logit, of equal ones that with the smallest id. The others
    are computed in float32, in vLLM's order: forbidden tokens out, divide by the temperature, ``min_p``, ``top_k``,
    ``top_p``. Each filter works on what the one before left. ``min_p`` keeps the tokens whose scaled logit is at most
    ``-log(min_p)`` below the largest; ``top_k`` keeps those whose logit is not below the k-th largest; ``top_p`` keeps
    the smallest set of tokens whose share of the remaining mass reaches it, in order of their logits, equal ones in
    order of their ids. Then one uniform number per row, a function of (seed, position) alone, is looked up in the
    cumulative distribution over ids. A row's token therefore does not depend on the other rows.

    Of these steps only exp and the sums depend on who computes them: ``ops/cpu/sampling.py`` does the same with others.

    Log-probabilities are those of the raw logits (log-softmax), before all of this: the sampled token first, then the
    most likely ones, most likely first.

    ``logits`` is not changed. Raises ``LogitsError`` if a row holds NaN or +inf, or nothing but -inf; forbidden tokens
    count only where log-probabilities are wanted.
    """
    num_rows = len(batch.num_logprobs)
    check_shape(logits, num_rows)
    if num_rows == 0:
        return SampledTokens((), ())
    allowed = _without_forbidden(logits, batch.forbidden_token_ids)
    random_rows = torch.nonzero(batch.temperature > 0).flatten()
    if len(random_rows) == 0:
        token_ids = _argmax(allowed)
    elif len(random_rows) == num_rows:
        token_ids = _sample_random(allowed, batch, random_rows)
    else:
        greedy_rows = torch.nonzero(batch.temperature <= 0).flatten()
        token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        token_ids[greedy_rows.to(logits.device)] = _argmax(allowed[greedy_rows.to(logits.device)])
        random_ids = _sample_random(allowed[random_rows.to(logits.device)], batch, random_rows)
        token_ids[random_rows.to(logits.device)] = random_ids
    check_maxima(allowed.gather(1, token_ids[:, None]).flatten(), range(num_rows))
    return SampledTokens(tuple(token_ids.tolist()), logprobs_of(logits, token_ids, batch.num_logprobs))


def check_shape(logits: torch.Tensor, num_rows: int) -> None:
    """Raises ``LogitsError`` unless ``logits`` are [num_rows, vocab_size] with at least one token."""
    if logits.dim() != 2 or logits.shape[0] != num_rows or logits.shape[1] == 0:
        raise LogitsError(f"logits have shape {list(logits.shape)}, expected [{num_rows}, vocab_size]")


def no_choice_error(row: int, maximum: float) -> LogitsError:
    """What is raised for a row of logits whose largest, ``maximum``, is not finite."""
    return LogitsError(
        f"row {row} of the logits has no token that can be chosen: its maximum is {maximum}. The model computed NaN or "
        "infinity (dtype='float32' helps where a 16-bit type overflows), or all tokens are forbidden"
    )


def check_maxima(maxima: torch.Tensor, rows: Sequence[int]) -> None:
    """Raises ``LogitsError`` for the first of ``rows`` whose largest logit, in ``maxima``, is not finite.

    NaN and +inf win every maximum and -inf only among equals, so one look at the maximum tells about the whole row.
    """
    finite = torch.isfinite(maxima)
    if not bool(finite.all()):
        index = int(torch.nonzero(~finite)[0])
        raise no_choice_error(rows[index], float(maxima[index]))


def least_scaled(min_p: torch.Tensor) -> torch.Tensor:
    """The least scaled logit, relative to the largest, that ``min_p`` keeps: float32, -inf for a ``min_p`` of 0."""
    return min_p.double().log().float()


def philox4x32(counters: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Philox4x32-10: four random 32-bit words per counter and key.

    counters: uint32 [n, 4].   keys: uint32 [n, 2].   Returns uint32 [n, 4].
    Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); the generator that Triton's
    ``tl.randint4x(seed, offset)`` uses with counter (offset, 0, 0, 0) and key (low, high word of seed).
    """
    multiplier_0, multiplier_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
    weyl_0, weyl_1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
    shift = np.uint64(32)
    c0, c1, c2, c3 = (counters[:, i].astype(np.uint32) for i in range(4))
    k0, k1 = (keys[:, i].astype(np.uint32) for i in range(2))
    for _ in range(10):
        product_0, product_1 = c0.astype(np.uint64) * multiplier_0, c2.astype(np.uint64) * multiplier_1
        c0, c2 = (
            (product_1 >> shift).astype(np.uint32) ^ c1 ^ k0,
            (product_0 >> shift).astype(np.uint32) ^ c3 ^ k1,
        )
        c1, c3 = product_1.astype(np.uint32), product_0.astype(np.uint32)
        k0, k1 = k0 + weyl_0, k1 + weyl_1
    return np.stack([c0, c1, c2, c3], axis=1)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One number in [0, 1) per row, float64 with 53 random bits, a function of (seed, position) alone.

    seeds, positions: int64 [n] on the CPU. The first two words of ``philox4x32`` with the position as counter and the
        seed as key.
    """
    seed_words = seeds.numpy().astype("<i8").view("<u4").reshape(-1, 2)
    position_words = positions.numpy().astype("<i8").view("<u4").reshape(-1, 2)
    counters = np.zeros((len(position_words), 4), np.uint32)
    counters[:, :2] = position_words
    words = philox4x32(counters, seed_words).astype(np.uint64)
    mantissa = (words[:, 0] >> np.uint64(5) << np.uint64(26)) | (words[:, 1] >> np.uint64(6))
    return torch.from_numpy(mantissa.astype(np.float64) * 2.0**-53)


def in_blocks(weights: torch.Tensor) -> torch.Tensor:
    """``weights`` [m, vocab_size] as [m, num_blocks, BLOCK]; the last block is filled up with zeros."""
    padding = -weights.shape[1] % BLOCK
    blocks = torch.nn.functional.pad(weights, (0, padding)) if padding else weights
    return blocks.view(len(weights), -1, BLOCK)


def sum_blocks(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``in_blocks(weights)``, and the float64 running sum over blocks [m, num_blocks].

    Rows are added up in one order whatever their number, so that no row's sum depends on the others.
    """
    blocks = in_blocks(weights)
    return blocks, blocks.sum(-1).double().cumsum(-1)


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    # numpy's argmax on the CPU is ten times faster than torch's. Both give the first of equal values, and NaN wins.
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.float().numpy().argmax(-1))
    return logits.argmax(-1)


def _without_forbidden(logits: torch.Tensor, forbidden: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    rows = [row for row, ids in enumerate(forbidden) for _ in ids]
    if not rows:
        return logits
    columns = [token_id for ids in forbidden for token_id in ids]
    allowed = logits.clone()
    allowed[torch.tensor(rows, device=logits.device), torch.tensor(columns, device=logits.device)] = -torch.inf
    return allowed


def _sample_random(logits: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor) -> torch.Tensor:
    """Token ids [m] for ``logits`` [m, vocab_size], whose parameters stand in ``rows`` of ``batch``."""
    device = logits.device
    logits = logits.float()
    top = logits.amax(-1, keepdim=True)
    check_maxima(top.flatten(), rows.tolist())
    # With the maximum taken off first, no temperature above 0 can overflow, and the most likely token has weight 1.
    scaled = logits.sub(top).div_(batch.temperature[rows].to(device)[:, None])
    min_p = batch.min_p[rows]
    if bool((min_p > 0).any()):
        scaled.masked_fill_(scaled < least_scaled(min_p).to(device)[:, None], -torch.inf)
    weights = scaled.exp_()
    top_k = batch.top_k[rows]
    limited = torch.nonzero((top_k > 0) & (top_k < logits.shape[1])).flatten()
    if len(limited):
        _apply_top_k(weights, logits, top_k[limited], limited.to(device))
    top_p = batch.top_p[rows]
    limited = torch.nonzero(top_p < 1).flatten().to(device)
    if len(limited):
        weights[limited] = _apply_top_p(weights[limited], logits[limited], top_p.to(device)[limited])
    return _inverse_cdf(weights, uniform(batch.seeds[rows], batch.positions[rows]).to(device))


def _inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Per row the token at which the cumulative share of ``weights`` [m, vocab_size] first exceeds ``uniforms`` [m].

    ``uniforms`` lie in [0, 1). Two levels, first blocks and then the tokens of one block, because a running sum over
    the whole vocabulary costs more than all the rest. At both levels the target is below the total, and the first entry
    above it has weight: a token without is never taken.
    """
    blocks, cumulative = sum_blocks(weights)
    target = uniforms[:, None] * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, target, right=True)
    end = cumulative.gather(1, block)
    start = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)
    share = ((target - start) / (end - start)).clamp(0.0, 1.0 - 2.0**-53)
    inner = blocks[torch.arange(len(blocks), device=blocks.device), block.flatten()].cumsum(-1, dtype=torch.float64)
    token = torch.searchsorted(inner, share * inner[:, -1:], right=True)
    return (block * BLOCK + token).flatten()


def _apply_top_k(weights: torch.Tensor, logits: torch.Tensor, top_k: torch.Tensor, rows: torch.Tensor) -> None:
    """Set to 0 the weights of tokens below the k-th largest logit, in ``rows``, in place."""
    head = logits[rows].topk(int(top_k.max())).values
    smallest = head.gather(1, top_k.to(head.device)[:, None] - 1)
    weights[rows] = weights[rows].masked_fill_(logits[rows] < smallest, 0.0)


def _apply_top_p(weights: torch.Tensor, logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """``weights`` [m, vocab_size] without the tokens outside the smallest most likely set of mass ``top_p`` [m].

    In order of ``logits`` [m, vocab_size], not of weights, which are equal for many that differ a little.
    """
    limit = top_p.double() * sum_blocks(weights)[1][:, -1]
    left = logits.masked_fill(weights == 0, -torch.inf)
    smallest = torch.empty_like(limit, dtype=logits.dtype)
    num_kept = torch.empty_like(limit, dtype=torch.int64)
    open_rows = torch.arange(len(weights), device=weights.device)
    vocab_size = weights.shape[1]
    for size in (*(size for size in _TOP_P_HEADS if size < vocab_size), vocab_size):
        rows = left[open_rows]
        head, ids = rows.topk(size) if size < vocab_size else rows.sort(dim=-1, descending=True)
        cumulative = weights[open_rows].gather(1, ids).cumsum(-1, dtype=torch.float64)
        kept = ((cumulative < limit[open_rows][:, None]).sum(-1) + 1).clamp(max=size)
        smallest[open_rows] = head.gather(1, kept[:, None] - 1).flatten()
        num_kept[open_rows] = kept
        open_rows = open_rows[cumulative[:, -1] < limit[open_rows]]
        if len(open_rows) == 0:
            break
    above = left > smallest[:, None]
    equal = left == smallest[:, None]
    wanted_of_equal = num_kept - above.sum(-1)
    if bool((equal.sum(-1) > wanted_of_equal).any()):
        equal &= equal.cumsum(-1) <= wanted_of_equal[:, None]
    return weights.masked_fill(~(above | equal), 0.0)


def logprobs_of(
    logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: tuple[int, ...]
) -> tuple[dict[int, float] | None, ...]:
    """Log-probabilities of the raw ``logits`` [n, vocab_size] as ``SampledTokens`` has them, for the sampled
    ``token_ids`` [n]. Raises ``LogitsError`` as ``sample`` does."""
    wanted = [row for row, count in enumerate(num_logprobs) if count >= 0]
    result: list[dict[int, float] | None] = [None] * len(num_logprobs)
    if not wanted:
        return tuple(result)
    rows = torch.tensor(wanted, device=logits.device)
    raw = logits[rows].float()
    check_maxima(raw.amax(-1), wanted)
    logprobs = raw.log_softmax(-1)
    sampled = token_ids[rows]
    sampled_values = logprobs.gather(1, sampled[:, None]).flatten().tolist()
    head = raw.topk(min(max(num_logprobs), logits.shape[1])).indices
    head_ids, head_values = head.tolist(), logprobs.gather(1, head).tolist()
    for index, row in enumerate(wanted):
        count = num_logprobs[row]
        entry = {int(sampled[index]): sampled_values[index]}
        for token_id, value in zip(head_ids[index][:count], head_values[index][:count], strict=True):
            entry.setdefault(token_id, value)
        result[row] = entry
    return tuple(result)
