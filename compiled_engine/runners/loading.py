"""Weights for a plan out of a checkpoint, and what a model definition computed itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from compiled_engine.models import Checkpoint
from compiled_engine.ops.quantized_rows import QuantizedRows


class CheckpointWeights:
    """A ``WeightSource``: tensors by the names of the model definition.

    ``names`` maps them to the checkpoint's; ``constants`` are tensors that are in no checkpoint.
    """

    def __init__(self, names: Mapping[str, str], constants: Mapping[str, torch.Tensor], checkpoint: Checkpoint) -> None:
        self._names = names
        self._constants = constants
        self._checkpoint = checkpoint

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor ``name``; ``KeyError`` if there is none."""
        if name in self._constants:
            return tuple(self._constants[name].shape)
        return self._checkpoint[self._names[name]].shape

    def stored_dtype(self, name: str) -> torch.dtype:
        """The dtype that holds every number of the tensor ``name`` exactly: float32 for GGUF blocks."""
        if name in self._constants:
            return self._constants[name].dtype
        return self._checkpoint.dtype_of(self._names[name])

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Copy the tensor ``name`` into ``out``, converting to its dtype."""
        if name in self._constants:
            out.copy_(self._constants[name])
        else:
            self._checkpoint.read(self._names[name], out=out)

    def quantized(self, name: str) -> QuantizedRows | None:
        """Codes and scales of the tensor ``name``; None where it is stored as plain numbers."""
        return None if name in self._constants else self._checkpoint.quantized(self._names[name])
