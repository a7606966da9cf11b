"""Weight recipes: how each weight of a plan is made from the tensors of a checkpoint."""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from compiled_engine.errors import PlanError
from compiled_engine.ops.cpu.packing import ALIGNMENT, WeightPart, packed_bytes, packed_num_bytes
from compiled_engine.ops.linear import pack_weight
from compiled_engine.ops.quantize import quantize_rows
from compiled_engine.ops.quantized_rows import QuantizedRows

Quantization = Literal["int8", "int4"]
_BITS: dict[Quantization, Literal[8, 4]] = {"int8": 8, "int4": 4}

_SLAB_BYTES = 32 << 20


@dataclass(frozen=True)
class WeightRecipe:
    """One weight of a plan: the checkpoint tensors ``sources``, concatenated along their first dimension.

    ``packed``: in the layout of the backend's matrix product instead of rows; ``halves``: packed as two parts of
    equally many rows, for a product whose halves are multiplied. ``shape`` is that of the result as rows.
    """

    sources: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    packed: bool = False
    halves: bool = False

    @property
    def key(self) -> str:
        """Name of this weight in a plan."""
        text = self.sources[0] if len(self.sources) == 1 else f"cat({', '.join(self.sources)})"
        if not self.packed:
            return text
        return f"packed_halves({text})" if self.halves else f"packed({text})"


class WeightSource(Protocol):
    """Where weights come from: a checkpoint, or tensors at hand."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor ``name``; ``KeyError`` if there is none."""
        ...

    def stored_dtype(self, name: str) -> torch.dtype:
        """The dtype that holds every number of the tensor ``name`` exactly."""
        ...

    def quantized(self, name: str) -> QuantizedRows | None:
        """The tensor ``name`` as it is stored, where it is stored quantised."""
        ...

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Copy the tensor ``name`` into ``out``, converting to its dtype."""
        ...


def materialize(
    recipes: Iterable[WeightRecipe],
    source: WeightSource,
    quantization: Quantization | None = None,
    head_weights: Collection[str] = (),
    device: torch.device | None = None,
) -> dict[str, torch.Tensor]:
    """Make every weight, by key, on ``device`` (None: the CPU). At most one tensor beyond the results is alive at a
    time.

    A packed weight is given as its head (see ``pack_weight``). It is stored as narrow as its numbers allow: 16-bit
    numbers stay 16-bit whatever the arithmetic, quantised ones stay quantised. ``quantization`` makes all packed
    weights int8 or int4 instead, but for ``head_weights`` (keys): they decide between tokens and become int8 for both.
    """
    slabs = _Slabs()
    made: dict[str, torch.Tensor] = {}
    for recipe in recipes:
        if recipe.packed:
            its = "int8" if quantization is not None and recipe.key in head_weights else quantization
            made[recipe.key] = _pack(recipe, source, its, slabs)
        else:
            made[recipe.key] = _rows(recipe, source).to(device or "cpu")
    return made


def num_weight_bytes(recipes: Iterable[WeightRecipe], weights: Mapping[str, torch.Tensor]) -> int:
    """Bytes of memory that ``weights``, made by ``recipes``, take."""
    return sum(packed_bytes(weights[recipe.key]) if recipe.packed else weights[recipe.key].nbytes for recipe in recipes)


def _rows(recipe: WeightRecipe, source: WeightSource) -> torch.Tensor:
    weight = torch.empty(recipe.shape, dtype=recipe.dtype)
    if len(recipe.sources) == 1:
        source.read_into(recipe.sources[0], weight)
        return weight
    _check_rows(recipe, source)
    start = 0
    for name in recipe.sources:
        rows = source.shape(name)[0]
        source.read_into(name, weight[start : start + rows])
        start += rows
    return weight


def _pack(recipe: WeightRecipe, source: WeightSource, quantization: Quantization | None, slabs: _Slabs) -> torch.Tensor:
    _check_rows(recipe, source)
    parts = [_part(name, recipe.dtype, source, quantization) for name in recipe.sources]
    if recipe.halves and len(parts) == 1:
        middle = recipe.shape[0] // 2
        parts = [_some_rows(parts[0], slice(None, middle)), _some_rows(parts[0], slice(middle, None))]
    return pack_weight(parts, slabs.allocate(packed_num_bytes(parts)))


def _check_rows(recipe: WeightRecipe, source: WeightSource) -> None:
    rows = sum(source.shape(name)[0] for name in recipe.sources)
    if rows != recipe.shape[0]:
        raise PlanError(f"weight {recipe.key!r} has {recipe.shape[0]} rows, its sources have {rows}")


def _part(name: str, dtype: torch.dtype, source: WeightSource, quantization: Quantization | None) -> WeightPart:
    if quantization is None and (quantized := source.quantized(name)) is not None:
        return quantized
    stored = source.stored_dtype(name)
    # bfloat16 and float16 numbers are float32 numbers too: nothing is lost by keeping them narrow.
    narrow = stored if dtype is torch.float32 and stored in (torch.bfloat16, torch.float16) else dtype
    rows = torch.empty(source.shape(name), dtype=narrow if quantization is None else torch.float32)
    source.read_into(name, rows)
    return rows if quantization is None else quantize_rows(rows, _BITS[quantization])


def _some_rows(part: WeightPart, which: slice) -> WeightPart:
    if isinstance(part, torch.Tensor):
        return part[which]
    offsets = None if part.offsets is None else part.offsets[which]
    return QuantizedRows(part.bits, part.codes[which], part.scales[which], offsets)


class _Slabs:
    """Memory for packed weights in the order of their use, in few large pieces that the kernel can back with huge
    pages: a step reads all of it once, and its page walks cost."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Uninitialised uint8 [num_bytes], aligned to a cache line; it lives as long as some tensor needs it."""
        rounded = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if rounded > len(self._free):
            self._free = _huge_pages(max(rounded, _SLAB_BYTES))
        taken, self._free = self._free[:num_bytes], self._free[rounded:]
        return taken


def _huge_pages(num_bytes: int) -> torch.Tensor:
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
