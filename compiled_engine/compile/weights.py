"""Weight recipes: how each weight of a plan is made from the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from compiled_engine.errors import PlanError
from compiled_engine.ops.linear import pack_weight


@dataclass(frozen=True)
class WeightRecipe:
    """One weight of a plan: the checkpoint tensors ``sources``, concatenated along their first dimension.

    ``packed``: in the layout of the backend's matrix product instead of rows. ``shape`` is that of the result.
    """

    sources: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    packed: bool = False

    @property
    def key(self) -> str:
        """Name of this weight in a plan."""
        text = self.sources[0] if len(self.sources) == 1 else f"cat({', '.join(self.sources)})"
        return f"packed({text})" if self.packed else text


class WeightSource(Protocol):
    """Where weights come from: a checkpoint, or tensors at hand."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor ``name``; ``KeyError`` if there is none."""
        ...

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Copy the tensor ``name`` into ``out``, converting to its dtype."""
        ...


def materialize(recipes: Iterable[WeightRecipe], source: WeightSource) -> dict[str, torch.Tensor]:
    """Make every weight, by key. At most one tensor beyond the results is alive at a time."""
    return {recipe.key: _make(recipe, source) for recipe in recipes}


def _make(recipe: WeightRecipe, source: WeightSource) -> torch.Tensor:
    weight = torch.empty(recipe.shape, dtype=recipe.dtype)
    if len(recipe.sources) == 1:
        source.read_into(recipe.sources[0], weight)
    else:
        start = 0
        for name in recipe.sources:
            rows = source.shape(name)[0]
            source.read_into(name, weight[start : start + rows])
            start += rows
        if start != recipe.shape[0]:
            raise PlanError(f"weight {recipe.key!r} has {recipe.shape[0]} rows, its sources have {start}")
    return pack_weight(weight) if recipe.packed else weight
