"""A log of the calls of a plan's pieces in one step, with what each was given and what it gave back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from compiled_engine.compile.opening import CompiledPiece
from compiled_engine.compile.plan import LOGITS_INDICES, GraphPlan, PieceStep, TensorSpec


@dataclass(frozen=True)
class PieceCall:
    """``arguments``: copies of values, and the weights themselves. ``results``: copies."""

    step: PieceStep
    arguments: tuple[torch.Tensor, ...]
    results: tuple[torch.Tensor, ...]


class CallLog:
    """Notes the calls of the pieces that ``watched`` has wrapped, while it is on.

    Calls that a CUDA graph replays run no Python and are not noted.
    """

    def __init__(self, plan: GraphPlan) -> None:
        self._steps = [step for step in plan.steps if isinstance(step, PieceStep)] + [plan.head]
        self._on = False
        self.calls: list[PieceCall] = []

    def watched(self, pieces: Mapping[str, CompiledPiece]) -> dict[str, CompiledPiece]:
        """``pieces``, each noting its calls here."""
        return {key: self._watch(piece) for key, piece in pieces.items()}

    def start(self) -> None:
        """Forget what was noted and note the calls from now on."""
        self.calls = []
        self._on = True

    def stop(self) -> None:
        """Note no more."""
        self._on = False

    def _watch(self, piece: CompiledPiece) -> CompiledPiece:
        def run(arguments: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            if not self._on or len(self.calls) == len(self._steps):
                return piece(arguments)
            step = self._steps[len(self.calls)]
            given = tuple(
                copy_of(argument) if name.startswith("value:") else argument
                for name, argument in zip(step.inputs, arguments, strict=True)
            )
            results = piece(arguments)
            self.calls.append(PieceCall(step, given, tuple(map(copy_of, results))))
            return results

        return run


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the very strides, which compiled pieces rely on."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def fresh_arguments(call: PieceCall) -> list[torch.Tensor]:
    """The arguments of ``call`` for one more call, which may write into the values among them."""
    return [
        copy_of(argument) if name.startswith("value:") else argument
        for name, argument in zip(call.step.inputs, call.arguments, strict=True)
    ]


@dataclass(frozen=True)
class RealRows:
    """Rows of a step that are not padding: of tensors with a row for each token, and for each row of logits."""

    tokens: int
    logits: int

    def of(
        self, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec], symbols: Mapping[str, str]
    ) -> list[torch.Tensor]:
        """``tensors`` without padding. ``symbols``: see ``symbols_of``."""
        return [self._cut(tensor, spec, symbols) for tensor, spec in zip(tensors, specs, strict=True)]

    def _cut(self, tensor: torch.Tensor, spec: TensorSpec, symbols: Mapping[str, str]) -> torch.Tensor:
        for dim, extent in enumerate(spec.shape):
            if isinstance(extent, str) and extent in symbols:
                rows = self.logits if symbols[extent] == LOGITS_INDICES else self.tokens
                tensor = tensor.narrow(dim, 0, min(rows, tensor.shape[dim]))
        return tensor


def symbols_of(step: PieceStep, inputs: Sequence[TensorSpec]) -> dict[str, str]:
    """The symbols of a piece, each with the first input whose size it is."""
    found: dict[str, str] = {}
    for name, spec in zip(step.inputs, inputs, strict=True):
        for extent in spec.shape:
            if isinstance(extent, str) and extent.isidentifier():
                found.setdefault(extent, name.removeprefix("value:"))
    return found
