"""Weights for a plan out of a checkpoint and the buffers that a model definition computed itself."""

from __future__ import annotations

import torch

from compiled_engine.models import Checkpoint, ModelDefinition


class DefinitionWeights:
    """A ``WeightSource``: a definition's weights by the names its module gives them."""

    def __init__(self, definition: ModelDefinition, checkpoint: Checkpoint) -> None:
        self._names = dict(definition.weight_names)
        self._buffers = dict(definition.expected.buffers)
        self._checkpoint = checkpoint

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the weight or buffer ``name``; ``KeyError`` if there is none."""
        if name in self._buffers:
            return tuple(self._buffers[name].shape)
        return self._checkpoint[self._names[name]].shape

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Copy the weight or buffer ``name`` into ``out``, converting to its dtype."""
        if name in self._buffers:
            out.copy_(self._buffers[name])
        else:
            self._checkpoint.read(self._names[name], out=out)
