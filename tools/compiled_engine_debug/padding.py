"""How much of what steps compute is padding, and which capture sizes would leave the least of it.

A step is padded to the smallest captured size that holds it; one above the largest size runs eagerly, without padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

# Above every possible number of tokens, and far enough from the end of int64 to be added to one.
_IMPOSSIBLE = np.int64(1) << 61


@dataclass(frozen=True, eq=False)
class Demand:
    """Steps of one kind, whose sizes decide what is captured for them.

    ``kind``: such as "full decode". ``unit``: what ``values`` count. ``values``: int64 [num_steps], sizes before
    padding. ``recorded_values``: int64 [num_steps], the sizes that the recording shows after padding. ``steps``: int64
    [num_steps], their places in the recording. ``recorded_sizes``: what was captured, ascending. ``always``: a size
    that the engine captures for this kind whatever sizes it is given, and no step is above it; None: there is none.
    """

    kind: str
    unit: str
    values: IntArray
    recorded_values: IntArray
    steps: IntArray
    recorded_sizes: tuple[int, ...] = ()
    always: int | None = None

    @cached_property
    def histogram(self) -> tuple[IntArray, IntArray]:
        """The distinct values, ascending, and how many steps have each: int64 [num_distinct], twice."""
        sizes, counts = np.unique(self.values, return_counts=True)
        return sizes.astype(np.int64), counts.astype(np.int64)

    def captured(self, sizes: Iterable[int]) -> tuple[int, ...]:
        """What the engine captures for this kind when it is given ``sizes``, ascending."""
        if self.always is None:
            return tuple(sorted(set(sizes)))
        return tuple(sorted({size for size in sizes if size < self.always} | {self.always}))


@dataclass(frozen=True)
class Padding:
    """Steps replayed with some sizes: ``num_real`` tokens (or whatever the unit is) became ``num_padded``.

    ``num_eager`` of ``num_steps`` steps were above every size; they are in both sums as they are.
    """

    num_steps: int
    num_eager: int
    num_real: int
    num_padded: int

    @property
    def num_wasted(self) -> int:
        return self.num_padded - self.num_real

    @property
    def share(self) -> float:
        """The part of all that is computed that is padding; 0 where nothing is."""
        return self.num_wasted / self.num_padded if self.num_padded else 0.0

    def __add__(self, other: Padding) -> Padding:
        return Padding(
            self.num_steps + other.num_steps,
            self.num_eager + other.num_eager,
            self.num_real + other.num_real,
            self.num_padded + other.num_padded,
        )


def pad(values: IntArray, sizes: Sequence[int]) -> IntArray:
    """``values``, each as the smallest of the ascending ``sizes`` that holds it, or itself where none does."""
    if not sizes:
        return values
    table = np.asarray(sizes, dtype=np.int64)
    place = np.searchsorted(table, values)
    return np.where(place < len(table), table[np.minimum(place, len(table) - 1)], values)


def replay(demand: Demand, sizes: Sequence[int]) -> Padding:
    """What padding to the captured ``sizes``, which ascend, makes of the steps of ``demand``."""
    values, counts = demand.histogram
    padded = pad(values, sizes)
    largest = sizes[-1] if sizes else 0
    return Padding(
        num_steps=int(counts.sum()),
        num_eager=int(counts[values > largest].sum()),
        num_real=int(values @ counts),
        num_padded=int(padded @ counts),
    )


def powers_of_two(largest: int, limit: int | None = None) -> tuple[int, ...]:
    """1, 2, 4, ... up to the first that holds ``largest``, or ``limit`` where that is less."""
    sizes = [1]
    while sizes[-1] < largest:
        sizes.append(2 * sizes[-1])
    if limit is not None:
        sizes = [size for size in sizes if size < limit] + ([limit] if sizes[-1] >= limit else [])
    return tuple(sizes)


def best_sizes(demands: Sequence[Demand], count: int, maximum: int | None = None) -> tuple[int, ...]:
    """At most ``count`` sizes, shared by ``demands``, with which all their steps together are padded least; ascending.

    Sizes are chosen among those that steps have, and every step fits: into a size of the list, or into what the engine
    captures always. ``maximum``: choose no larger size; steps above it are left out. Of lists that are equally good,
    the one with fewest sizes, then the one whose sizes are smaller, the first one before all. Raises ``ValueError``
    for a ``count`` below 1.

    Exact, by dynamic programming over distinct sizes. The cost of putting an interval of sizes into one satisfies the
    quadrangle inequality, so the best next size never moves back when the interval starts later, and each of ``count``
    rounds takes O(D log D) instead of O(D^2) (F. F. Yao, "Efficient dynamic programming using quadrangle
    inequalities", 1980; found here by divide and conquer).
    """
    if count < 1:
        raise ValueError(f"count is {count}: choose at least one size")
    costs = _Costs(demands, maximum)
    # rounds[k][i]: the fewest padded tokens of all sizes from the i-th on, with at most k more sizes of the list.
    rounds = [costs.without_sizes]
    nexts: list[IntArray] = []
    for _ in range(min(count, costs.num_sizes)):
        best, following = _one_more_size(costs, rounds[-1])
        rounds.append(best)
        nexts.append(following)
    used = next(k for k, best in enumerate(rounds) if best[0] == rounds[-1][0])
    chosen: list[int] = []
    position = 0
    while used and rounds[used][position] < costs.without_sizes[position]:
        position = int(nexts[used - 1][position])
        chosen.append(int(costs.sizes[position - 1]))
        used -= 1
    return tuple(chosen)


class _Costs:
    """Padded tokens of intervals of the distinct ``sizes`` of all demands, from running sums of how often each came."""

    def __init__(self, demands: Sequence[Demand], maximum: int | None) -> None:
        parts = [demand.histogram[0] for demand in demands]
        sizes = np.unique(np.concatenate([np.zeros(0, np.int64), *parts]))
        self.sizes: IntArray = sizes if maximum is None else sizes[sizes <= maximum]
        self.num_sizes = len(self.sizes)
        self._sums: list[IntArray] = []
        self._padded: list[IntArray] = []
        # [num_sizes + 1]: for all sizes from one on, without a further size of the list.
        self.without_sizes = np.zeros(self.num_sizes + 1, np.int64)
        for demand in demands:
            self._add(demand)

    def _add(self, demand: Demand) -> None:
        values, counts = demand.histogram
        own = np.zeros(self.num_sizes, np.int64)
        fits = values <= self.sizes[-1] if self.num_sizes else np.zeros(len(values), bool)
        own[np.searchsorted(self.sizes, values[fits])] = counts[fits]
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(own)])
        self._sums.append(sums)
        self._padded.append(self.sizes if demand.always is None else np.minimum(self.sizes, demand.always))
        left = sums[-1] - sums
        if demand.always is None:
            self.without_sizes[left > 0] = _IMPOSSIBLE
        else:
            self.without_sizes = np.minimum(self.without_sizes + left * demand.always, _IMPOSSIBLE)

    def of(self, begin: int, ends: slice) -> IntArray:
        """Of the sizes ``begin .. end - 1``, all padded to the last of them, for every ``end`` of ``ends``."""
        shifted = slice(ends.start - 1, ends.stop - 1)
        total = np.zeros(ends.stop - ends.start, np.int64)
        for sums, padded in zip(self._sums, self._padded, strict=True):
            total += padded[shifted] * (sums[ends] - sums[begin])
        return total


def _one_more_size(costs: _Costs, rest: IntArray) -> tuple[IntArray, IntArray]:
    """``rest``, int64 [num_sizes + 1], with one more size, and where the interval of that size ends, the first such."""
    best = costs.without_sizes.copy()
    following = np.zeros(costs.num_sizes + 1, np.int64)
    # Intervals that begin at low .. high - 1 and end at first .. last.
    pending = [(0, costs.num_sizes, 1, costs.num_sizes)]
    while pending:
        low, high, first, last = pending.pop()
        if low >= high:
            continue
        middle = (low + high) // 2
        ends = slice(max(first, middle + 1), last + 1)
        totals = costs.of(middle, ends) + rest[ends]
        end = ends.start + int(np.argmin(totals))
        best[middle] = min(best[middle], totals[end - ends.start])
        following[middle] = end
        pending += [(low, middle, first, end), (middle + 1, high, end, last)]
    return best, following
