"""How far two rungs are apart, and where they part first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from compiled_engine_debug.bisect.trace import Rows, Site

# Largest difference between two right computations of one piece, relative to the largest number of the tensor: hundreds
# of spacings for float32, where kernels order their sums differently, and a few for the narrow types, which one
# compiler rounds after every operation and another after some.
_TOLERANCES = {torch.float32: 5e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

# Two right computations are as far apart as each is from the exact one; the largest of few numbers varies.
_TIMES_NOISE = 4.0


def default_tolerance(dtype: torch.dtype) -> float:
    """What two runs of one piece may differ by, relative to a tensor's scale, when they compute in ``dtype``."""
    return _TOLERANCES[dtype]


@dataclass(frozen=True)
class Limits:
    """What two rungs may differ by: ``tolerance``, and more where rounding alone makes more of a difference.

    ``noise``: by site, how far transformers in the model's dtype is from transformers in a wider one. Rounding errors
    grow from layer to layer, in some models a hundredfold.
    """

    tolerance: float
    noise: Mapping[Site, float]

    def of(self, site: Site) -> float:
        """The largest difference at ``site``, relative to its tensor's scale."""
        return max(self.tolerance, _TIMES_NOISE * self.noise.get(site, 0.0))


@dataclass(frozen=True)
class Difference:
    """``relative``: the largest difference over ``scale``, the largest finite number of the reference; infinite where
    one of them is NaN or infinite and the other is not. ``not_finite``: "NaN", "inf" or "" for what was found."""

    relative: float
    scale: float
    not_finite: str = ""

    def __str__(self) -> str:
        if self.not_finite:
            return self.not_finite
        return f"{self.relative:.1e} of {self.scale:.3g}" if self.relative else "0"


def difference(values: torch.Tensor, reference: torch.Tensor) -> Difference:
    """Compare two tensors of one shape; NaN equals NaN and an infinity itself."""
    if values.shape != reference.shape:
        raise ValueError(f"shapes {tuple(values.shape)} and {tuple(reference.shape)} cannot be compared")
    values, reference = values.double(), reference.double()
    finite = values.isfinite() & reference.isfinite()
    scale = float(reference[reference.isfinite()].abs().max()) if bool(reference.isfinite().any()) else 0.0
    unlike = ~finite & ~((values == reference) | (values.isnan() & reference.isnan()))
    if bool(unlike.any()):
        strange = torch.where(values.isfinite(), reference, values)[unlike]
        return Difference(math.inf, scale, "NaN" if bool(strange.isnan().any()) else "inf")
    largest = float((values - reference)[finite].abs().max()) if bool(finite.any()) else 0.0
    if largest == 0:
        return Difference(0.0, scale)
    return Difference(largest / scale if scale else math.inf, scale)


@dataclass(frozen=True)
class Place:
    """A tensor of one request in one step."""

    step: int
    request: str
    site: Site

    def __str__(self) -> str:
        return f"step {self.step}, request {self.request}, {self.site}"


@dataclass(frozen=True)
class Measured:
    """A difference, and where it is."""

    place: Place
    difference: Difference


class Watch:
    """Takes the differences between two rungs in the order in which tensors are made.

    ``largest``: the largest of all. ``beyond``: the first above its limit. ``not_finite``: the first NaN or
    infinity that one rung has alone.
    """

    def __init__(self, reference: str, limits: Limits) -> None:
        self.reference = reference
        self._limits = limits
        self.largest: Measured | None = None
        self.beyond: Measured | None = None
        self.not_finite: Measured | None = None

    @property
    def agrees(self) -> bool:
        """Whether nothing was beyond its limit."""
        return self.beyond is None

    @property
    def first_places(self) -> tuple[Measured, ...]:
        """What is to be reported: a NaN or infinity first, and the first finite difference if that came before."""
        found = dict.fromkeys(item for item in (self.not_finite, self.beyond) if item is not None)
        return tuple(found)

    def compare(self, rows: Rows, reference: torch.Tensor) -> None:
        """Take one tensor of one request."""
        found = Measured(Place(rows.step, rows.request, rows.site), difference(rows.values, reference))
        self.take(found)

    def take(self, found: Measured) -> None:
        """Take a difference that was found elsewhere."""
        if self.largest is None or found.difference.relative > self.largest.difference.relative:
            self.largest = found
        if found.difference.relative > self._limits.of(found.place.site):
            self.beyond = self.beyond or found
            if found.difference.not_finite:
                self.not_finite = self.not_finite or found
