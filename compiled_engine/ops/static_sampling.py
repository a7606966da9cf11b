"""Sampling for compilers that want static shapes (XLA): ``ops/sampling.py`` says what is computed.

Pure functions of tensors, to be compiled whole with static shapes. There is no shape that depends on data, no branch on
a value and no wait for the device: every row goes through every filter, and a filter that is off keeps all.

``ops/sampling.py`` finds what ``top_k`` and ``top_p`` keep with the ``k`` or the head of a vocabulary that the rows
need. Here one stable sort of the whole vocabulary serves both. What ``min_p`` and ``top_k`` leave out is at the end of
the sorted row, and what ``top_p`` keeps is its beginning, up to a token that is the edge: others are kept if their
logit is larger, or equal and their id is not larger. So nothing has to be brought back into the order of ids.

Float64 is slow on TPUs, which make it up from pairs of float32. A tensor of float64 is never larger than one number per
block of ``BLOCK`` tokens, or one block per row; within a block numbers are widened while they are added.

XLA's own maximum leaves NaN out and does not go below the least finite number; ``most_likely`` minds both.
"""

from __future__ import annotations

import torch

from compiled_engine.ops.sampling import BLOCK, in_blocks, sum_blocks


def forbid(logits: torch.Tensor, forbidden: torch.Tensor) -> torch.Tensor:
    """``logits`` [n, vocab_size] with -inf where ``forbidden``, bool [n, vocab_size], is set."""
    return logits.masked_fill(forbidden, -torch.inf)


def most_likely(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The token with the largest logit of each row, of equal ones that with the smallest id, and that logit.

    logits: [n, vocab_size]. Returns int64 [n], and float32 [n], NaN where a row holds one. Where the second is not
    finite no token could be chosen; the first is then some id within the vocabulary.
    """
    logits = logits.float()
    last = logits.shape[1] - 1
    is_largest = logits == logits.amax(-1, keepdim=True)
    token_ids = torch.where(is_largest, _all_ids(logits), last).amin(-1).long()
    maxima = logits.gather(1, token_ids[:, None]).flatten()
    return token_ids, torch.where(torch.isnan(logits).any(-1), torch.nan, maxima)


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    least_scaled: torch.Tensor,
    uniforms: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row as ``ops.sampling.sample`` takes it, and the row's largest logit: types as of ``most_likely``.

    logits: [n, vocab_size].   temperature, top_p: float32 [n].   top_k: int64 [n]; as in ``SamplingBatch``, but that a
        temperature must not be so small that the device takes it for 0.
    least_scaled: float32 [n], ``ops.sampling.least_scaled`` of ``min_p``.
    uniforms: float64 [n], ``ops.sampling.uniform`` of the rows' seeds and positions.

    The last two are computed on the host, which has a logarithm and integers that are exact. On the CPU, not
    compiled, tokens are those of ``sample``. A compiler may round exp and sums differently, to a few units of float32:
    then a random token may differ where its row's uniform number or ``top_p`` is that near to an edge.
    """
    logits = logits.float()
    vocab_size = logits.shape[1]
    greedy_ids, maxima = most_likely(logits)
    is_random = temperature > 0
    divisor = torch.where(is_random, temperature, 1.0)
    # -0 equals 0, but a compiler's sort may tell them apart.
    ordered, ordered_ids = torch.where(logits == 0, 0.0, logits).sort(dim=-1, descending=True, stable=True)
    num_kept = torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    smallest = ordered.gather(1, num_kept[:, None] - 1)

    def weigh(values: torch.Tensor) -> torch.Tensor:
        return _weights(values, maxima[:, None], divisor[:, None], least_scaled[:, None], smallest)

    weights = weigh(logits)
    limit = top_p.double()[:, None] * sum_blocks(weights)[1][:, -1:]
    edge = torch.where(top_p[:, None] < 1, _first_reaching(weigh(ordered), limit), vocab_size - 1)
    edge_logit, edge_id = ordered.gather(1, edge), ordered_ids.gather(1, edge)
    is_kept = (logits > edge_logit) | ((logits == edge_logit) & (_all_ids(logits) <= edge_id))
    random_ids = _inverse_cdf(torch.where(is_kept, weights, 0.0), uniforms)
    return torch.where(is_random, random_ids, greedy_ids), maxima


def top_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities by the raw ``logits`` [n, vocab_size]: of the tokens ``token_ids``, int64 [n], and of the
    ``count`` most likely ones.

    Returns float32 [n]; float32 [n, count], most likely first; their ids, int64 [n, count]. All of a row are NaN where
    it holds NaN or +inf, or nothing but -inf.
    """
    logits = logits.float()
    logprobs = logits.log_softmax(-1)
    ids = logits.topk(count).indices
    return logprobs.gather(1, token_ids[:, None]).flatten(), logprobs.gather(1, ids), ids


def _all_ids(logits: torch.Tensor) -> torch.Tensor:
    return torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)


def _weights(
    logits: torch.Tensor, top: torch.Tensor, divisor: torch.Tensor, least: torch.Tensor, smallest: torch.Tensor
) -> torch.Tensor:
    """Weights of ``logits`` [n, m], 1 for the largest and 0 for what ``min_p`` or ``top_k`` leaves out; the others are
    [n, 1]: the largest logit, the temperature, the least scaled logit and the smallest logit that are kept."""
    scaled = (logits - top) / divisor
    return torch.where((scaled < least) | (logits < smallest), 0.0, scaled.exp())


def _first_reaching(weights: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """The first place at which the running sum of ``weights`` [n, m] is not below ``limit`` [n, 1], else the last."""
    blocks = in_blocks(weights)
    cumulative = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    block = (cumulative < limit).sum(-1, keepdim=True).clamp(max=blocks.shape[1] - 1)
    inner = _sum_before(cumulative, block) + _take_block(blocks, block).cumsum(-1, dtype=torch.float64)
    place = block * BLOCK + (inner < limit).sum(-1, keepdim=True)
    return place.clamp(max=weights.shape[1] - 1)


def _inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """What ``_inverse_cdf`` of ``ops/sampling.py`` computes."""
    blocks, cumulative = sum_blocks(weights)
    target = uniforms[:, None] * cumulative[:, -1:]
    block = _first_above(cumulative, target)
    start, end = _sum_before(cumulative, block), cumulative.gather(1, block)
    share = ((target - start) / (end - start)).clamp(0.0, 1.0 - 2.0**-53)
    inner = _take_block(blocks, block).cumsum(-1, dtype=torch.float64)
    return (block * BLOCK + _first_above(inner, share * inner[:, -1:])).flatten()


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The first place at which ``cumulative`` [n, m] exceeds ``target`` [n, 1]; int64 [n, 1].

    The target is below the total, but may be rounded up to it where float64 has fewer bits than it should. So the place
    is never beyond the one that reaches the total, which has weight as all that are found here.
    """
    return ((cumulative <= target) & (cumulative < cumulative[:, -1:])).sum(-1, keepdim=True)


def _sum_before(cumulative: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    return torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)


def _take_block(blocks: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """Of ``blocks`` [n, num_blocks, BLOCK] the one with the number ``block`` [n, 1] in each row: [n, BLOCK]."""
    return blocks[torch.arange(len(blocks), device=blocks.device), block.flatten()]
