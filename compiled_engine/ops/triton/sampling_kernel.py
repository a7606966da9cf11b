"""The kernel of ``TritonSampler``: one program per row, and no vocabulary is sorted.

1. A pass over the logits finds the largest and its first id, in each of ``TILE`` lanes and from these in the row. A
   greedy row is done.
2. A row without ``top_k`` and ``min_p``: another pass adds up the weights, for ``top_p`` also of the tokens above some
   thresholds at growing distances from the largest logit.
3. A row with a filter: a pass gathers the ids of the *candidates*. These are the tokens that ``min_p`` keeps, those not
   below a lower bound of the k-th largest logit, which is the k-th largest of the lanes' largest, or those above the
   highest threshold of step 2 that has the mass of ``top_p``.
4. The exact edges of ``top_k`` and ``top_p`` are found among the candidates by a search over the bits of the logits:
   each round counts or weighs the tokens above some thresholds.
5. The token is looked up in the running sum over the candidates, or over the row, in order of their ids.

So the logits are read once for a greedy row, 2.5 times on average for a random one without filters, 2 times with
``top_k`` or ``min_p``, and 3 times with ``top_p`` alone. Where the candidates are more than ``CAPACITY`` (flat rows, a
``top_k`` above the number of lanes), steps 4 and 5 read the whole row in each round, of which there are at most 11 per
filter for float32 logits and 7 for 16-bit ones.

Weights are integers, multiples of 2^-42 of that of the most likely token. Their sums are exact, so that all steps agree
on them to the last bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

# log2 of the weight of a row's most likely token.
_WEIGHT_BITS = tl.constexpr(42)
# Thresholds that a round of the search tries at a time.
_RADIX = tl.constexpr(8)
_INFINITY = tl.constexpr(float("inf"))


class Scale(NamedTuple):
    """What a row's weights depend on: its largest logit, its temperature and the least scaled logit of ``min_p``."""

    top: Any
    temperature: Any
    least: Any


class Tokens(NamedTuple):
    """``size`` tokens of a row of logits: those at ``ids`` if ``is_gathered``, else the first of the row."""

    row: Any
    ids: Any
    size: Any
    is_gathered: Any


class Edge(NamedTuple):
    """Two int64 keys around an edge, and the tokens from each of them up: their number and amount."""

    low: Any
    high: Any
    count_low: Any
    count_high: Any
    amount_low: Any
    amount_high: Any


@triton.jit
def _keys(logits, CONSTANT_BITS: tl.constexpr):
    """int32 that are ordered as the float32 ``logits`` are, -0 and 0 being equal."""
    bits = logits.to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(keys == -1, 0, keys) >> CONSTANT_BITS


@triton.jit
def _scaled(logits, scale):
    # The first case is for temperatures that the device takes for 0.
    return tl.where(logits == scale.top, 0.0, tl.div_rn(logits - scale.top, scale.temperature))


@triton.jit
def _weights(scaled, least):
    """int64, 2^_WEIGHT_BITS for the most likely token, 0 below ``least``."""
    return tl.where(scaled >= least, (tl.exp(scaled) * 2.0**_WEIGHT_BITS).to(tl.int64), 0)


@triton.jit
def _find_maxima(row, VOCAB_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Per lane the largest logit of its tokens (NaN if one is) and the first id that has it."""
    lanes = tl.arange(0, TILE)
    best = tl.full([TILE], -_INFINITY, tl.float32)
    best_ids = lanes
    for start in range(0, VOCAB_SIZE, TILE):
        token_ids = start + lanes
        logits = tl.load(row + token_ids, mask=token_ids < VOCAB_SIZE, other=-_INFINITY).to(tl.float32)
        is_better = (logits > best) | (logits != logits)
        best = tl.where(is_better, logits, best)
        best_ids = tl.where(is_better, token_ids, best_ids)
    return best, best_ids


@triton.jit
def _gather(
    row,
    ids,
    scale,
    low,
    VOCAB_SIZE: tl.constexpr,
    CONSTANT_BITS: tl.constexpr,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Writes the ids of tokens with keys from ``low`` up that ``min_p`` keeps to ``ids``, ascending.

    Returns their number, of which the first ``CAPACITY`` were written.
    """
    lanes = tl.arange(0, TILE)
    low = low.to(tl.int32)
    size = 0
    for start in range(0, VOCAB_SIZE, TILE):
        token_ids = start + lanes
        is_inside = token_ids < VOCAB_SIZE
        logits = tl.load(row + token_ids, mask=is_inside, other=-_INFINITY).to(tl.float32)
        is_kept = (_keys(logits, CONSTANT_BITS) >= low) & (_scaled(logits, scale) >= scale.least)
        is_candidate = (is_inside & is_kept).to(tl.int32)
        num_candidates = tl.sum(is_candidate, 0)
        if num_candidates > 0:
            places = size + tl.cumsum(is_candidate, 0) - 1
            tl.store(ids + places, token_ids, mask=(is_candidate != 0) & (places < CAPACITY))
        size += num_candidates
    return size


@triton.jit
def _load_tile(tokens, start, CONSTANT_BITS: tl.constexpr, TILE: tl.constexpr):
    """Ids, logits, keys and validity of the ``TILE`` tokens from place ``start``."""
    places = start + tl.arange(0, TILE)
    is_inside = places < tokens.size
    gathered = tl.load(tokens.ids + places, mask=is_inside & tokens.is_gathered, other=0)
    token_ids = tl.where(tokens.is_gathered, gathered, places)
    logits = tl.load(tokens.row + token_ids, mask=is_inside, other=-_INFINITY).to(tl.float32)
    return token_ids, logits, _keys(logits, CONSTANT_BITS), is_inside


@triton.jit
def _measure(tokens, scale, thresholds, BY_MASS: tl.constexpr, CONSTANT_BITS: tl.constexpr, TILE: tl.constexpr):
    """Of the tokens whose keys are not below each of ``thresholds`` int32 [n]: their number, and their amount, which
    is the sum of their weights or again the number."""
    counts = tl.zeros(thresholds.shape, tl.int32)
    masses = tl.zeros(thresholds.shape, tl.int64)
    start = 0
    while start < tokens.size:
        _, logits, keys, is_inside = _load_tile(tokens, start, CONSTANT_BITS, TILE)
        is_above = (keys[None, :] >= thresholds[:, None]) & is_inside[None, :]
        counts += tl.sum(is_above.to(tl.int32), 1)
        if BY_MASS:
            weights = _weights(_scaled(logits, scale), scale.least)
            masses += tl.sum(tl.where(is_above, weights[None, :], 0), 1)
        start += TILE
    return counts, masses if BY_MASS else counts.to(tl.int64)


@triton.jit
def _entry(values, index):
    return tl.sum(tl.where(tl.arange(0, _RADIX) == index, values, 0), 0)


@triton.jit
def _find_edge(tokens, scale, edge, target, BY_MASS: tl.constexpr, CONSTANT_BITS: tl.constexpr, TILE: tl.constexpr):
    """Narrows ``edge`` to where the amount of the tokens, taken from the largest key down, reaches ``target``.

    In the end the tokens from ``low`` up reach it (unless none did at first), those from ``high`` up do not, and
    between the two is one token or one key.
    """
    low, high, count_low, count_high, amount_low, amount_high = edge
    branches = tl.arange(0, _RADIX)
    while (high - low > 1) & (count_low - count_high > 1):
        step = tl.maximum((high - low) // _RADIX, 1)
        thresholds = (low + branches * step).to(tl.int32)
        counts, amounts = _measure(tokens, scale, thresholds, BY_MASS, CONSTANT_BITS, TILE)
        num_reached = tl.maximum(tl.sum((amounts >= target).to(tl.int32), 0), 1)
        first_missed = low + num_reached * step
        if (num_reached < _RADIX) & (first_missed < high):
            high = first_missed
            count_high = _entry(counts, num_reached)
            amount_high = _entry(amounts, num_reached)
        low += (num_reached - 1) * step
        count_low = _entry(counts, num_reached - 1)
        amount_low = _entry(amounts, num_reached - 1)
    return Edge(low, high, count_low, count_high, amount_low, amount_high)


@triton.jit
def _pick(tokens, scale, low, high, num_equal_kept, target, CONSTANT_BITS: tl.constexpr, TILE: tl.constexpr):
    """The first token at which the running sum of the weights of the kept tokens exceeds ``target``.

    Kept are those with keys from ``high`` up, and of those from ``low`` to ``high`` the first ``num_equal_kept``.
    """
    lanes = tl.arange(0, TILE)
    low = low.to(tl.int32)
    high = high.to(tl.int32)
    token = 0
    start = 0
    num_equal = 0
    mass = tl.zeros([], tl.int64)
    while start < tokens.size:
        token_ids, logits, keys, is_inside = _load_tile(tokens, start, CONSTANT_BITS, TILE)
        is_kept = keys >= high
        is_equal = (is_inside & (keys >= low) & (keys < high)).to(tl.int32)
        num_equal_here = tl.sum(is_equal, 0)
        if num_equal_here > 0:
            is_kept = is_kept | ((is_equal != 0) & (num_equal + tl.cumsum(is_equal, 0) <= num_equal_kept))
        weights = tl.where(is_inside & is_kept, _weights(_scaled(logits, scale), scale.least), 0)
        mass_here = tl.sum(weights, 0)
        start += TILE
        if mass + mass_here > target:
            lane = tl.sum((mass + tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
            token = tl.sum(tl.where(lanes == lane, token_ids, 0), 0)
            start = tokens.size
        mass += mass_here
        num_equal += num_equal_here
    return token


@triton.jit
def _random_part(total, seed, position):
    """int64: the row's uniform number, 53 bits in [0, 1), times the positive int64 ``total``, rounded down."""
    word_0, word_1, _, _ = tl.randint4x(seed, position)
    mantissa = ((word_0 >> 5).to(tl.uint64) << 26) | (word_1 >> 6).to(tl.uint64)
    return tl.umulhi(mantissa << 11, total.to(tl.uint64)).to(tl.int64)


@triton.jit
def _mass_from(tokens, scale, low, CONSTANT_BITS: tl.constexpr, TILE: tl.constexpr):
    """Number and mass of the tokens with keys from ``low`` up."""
    counts, masses = _measure(tokens, scale, tl.full([1], low, tl.int64).to(tl.int32), True, CONSTANT_BITS, TILE)
    return tl.sum(counts, 0), tl.sum(masses, 0)


@triton.jit
def _share(total, top_p):
    """The least int64 that is not below ``top_p`` of the mass ``total``, and not 0."""
    return tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _bound_of_top_p(tokens, scale, top_p, lowest, CONSTANT_BITS: tl.constexpr, TILE: tl.constexpr):
    """A key from which up the tokens have the share ``top_p`` of the mass of all; and that mass."""
    branches = tl.arange(0, _RADIX)
    # 0.5 to 14 below the largest scaled logit, and all.
    logits = scale.top - scale.temperature * ((branches + 1) * (branches + 2)).to(tl.float32) * 0.25
    keys = tl.where(branches == _RADIX - 1, lowest, _keys(logits, CONSTANT_BITS))
    _, masses = _measure(tokens, scale, keys.to(tl.int32), True, CONSTANT_BITS, TILE)
    total = tl.max(masses, 0)
    return tl.max(tl.where(masses >= _share(total, top_p), keys, lowest), 0), total


@triton.jit
def _sample_random(
    row,
    ids,
    best_ids,
    scale,
    top_k,
    top_p,
    seed,
    position,
    VOCAB_SIZE: tl.constexpr,
    CONSTANT_BITS: tl.constexpr,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """The token of a row whose largest logit, ``scale.top``, is finite."""
    has_top_k = (top_k > 0) & (top_k < VOCAB_SIZE)
    has_top_p = top_p < 1
    is_cut = has_top_k | (scale.least > -_INFINITY)
    none = tl.zeros([], tl.int64)
    low = _keys(tl.full([], -_INFINITY, tl.float32), CONSTANT_BITS).to(tl.int64)
    high = _keys(scale.top, CONSTANT_BITS).to(tl.int64) + 1
    all_tokens = Tokens(row, ids, VOCAB_SIZE, False)

    bound = low
    total = none
    if is_cut == 0:
        if has_top_p:
            bound, total = _bound_of_top_p(all_tokens, scale, top_p, low, CONSTANT_BITS, TILE)
        else:
            _, total = _mass_from(all_tokens, scale, low, CONSTANT_BITS, TILE)
    num_lanes: tl.constexpr = min(TILE, VOCAB_SIZE)
    if has_top_k:
        # The k-th largest of some logits is not above the k-th largest of all. Fewer than k bound nothing.
        lanes = tl.arange(0, TILE)
        tl.store(ids + lanes, best_ids, mask=lanes < VOCAB_SIZE)
        tl.debug_barrier()
        edge = Edge(low, high, num_lanes, 0, none + num_lanes, none)
        bound = _find_edge(Tokens(row, ids, num_lanes, True), scale, edge, top_k, False, CONSTANT_BITS, TILE).low
        tl.debug_barrier()
    size = CAPACITY + 1
    if is_cut | has_top_p:
        size = _gather(row, ids, scale, bound, VOCAB_SIZE, CONSTANT_BITS, TILE, CAPACITY)
        tl.debug_barrier()
    is_gathered = size <= CAPACITY
    tokens = Tokens(row, ids, tl.where(is_gathered, size, VOCAB_SIZE), is_gathered)

    if has_top_k:
        edge = Edge(bound, high, tokens.size, 0, none + tokens.size, none)
        low = _find_edge(tokens, scale, edge, top_k, False, CONSTANT_BITS, TILE).low
    count_low = tokens.size
    amount_low = total
    if is_cut | has_top_p:
        count_low, amount_low = _mass_from(tokens, scale, low, CONSTANT_BITS, TILE)
        total = tl.where(is_cut, amount_low, total)
    high_kept = low
    num_equal_kept = none
    if has_top_p:
        wanted = tl.minimum(_share(total, top_p), amount_low)
        edge = Edge(low, high, count_low, 0, amount_low, none)
        edge = _find_edge(tokens, scale, edge, wanted, True, CONSTANT_BITS, TILE)
        weight = (edge.amount_low - edge.amount_high) // (edge.count_low - edge.count_high)
        num_equal_kept = (wanted - edge.amount_high + weight - 1) // weight
        total = edge.amount_high + num_equal_kept * weight
        low = edge.low
        high_kept = edge.high
    target = _random_part(total, seed, position)
    return _pick(tokens, scale, low, high_kept, num_equal_kept, target, CONSTANT_BITS, TILE)


_PARAMETERS = ["temperature", "top_k", "top_p", "min_p", "seeds", "positions", "token_ids", "maxima"]


# Nothing is gained by knowing how the entries of rows are aligned, and another alignment would be another variant.
@triton.jit(do_not_specialize_on_alignment=_PARAMETERS)
def sample_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    candidates,
    token_ids,
    maxima,
    VOCAB_SIZE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    CONSTANT_BITS: tl.constexpr,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Samples the row of its program: see the module's docstring, and ``TritonSampler.launch`` for the arguments."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * ROW_STRIDE
    best, best_ids = _find_maxima(row, VOCAB_SIZE, TILE)
    is_nan = best != best
    top = tl.max(tl.where(is_nan, -_INFINITY, best), 0)
    top = tl.where(tl.max(is_nan.to(tl.int32), 0) > 0, float("nan"), top)
    tl.store(maxima + index, top)
    row_temperature = tl.load(temperature + index)
    token = 0
    if tl.abs(top) < _INFINITY:
        if row_temperature > 0:
            least = tl.log(tl.load(min_p + index).to(tl.float64)).to(tl.float32)
            token = _sample_random(
                row,
                candidates + index * CAPACITY,
                best_ids,
                Scale(top, row_temperature, least),
                tl.load(top_k + index),
                tl.load(top_p + index),
                tl.load(seeds + index),
                tl.load(positions + index),
                VOCAB_SIZE,
                CONSTANT_BITS,
                TILE,
                CAPACITY,
            )
        else:
            token = tl.min(tl.where(best == top, best_ids, VOCAB_SIZE), 0)
    tl.store(token_ids + index, token)
