"""From a model definition to a plan and its compiled pieces: capture, passes, split, dedupe, compile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from compiled_engine.compile.capture import CapturedGraph, capture
from compiled_engine.compile.counters import CompileCounters
from compiled_engine.compile.ledger import Ledger
from compiled_engine.compile.opening import CompiledPiece
from compiled_engine.compile.passes import passes_for, run_passes
from compiled_engine.compile.pieces import PieceCompiler
from compiled_engine.compile.plan import INPUT_IDS, LOGITS_INDICES, POSITIONS, AttentionStep, GraphPlan, PieceStep, Step
from compiled_engine.compile.split import Piece, SplitGraph, split_at_attention
from compiled_engine.errors import CaptureError
from compiled_engine.ops.attention import AttentionSpec

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


@dataclass(frozen=True)
class PlannedGraph:
    """A plan and, by key, the pieces that it names, not yet compiled."""

    plan: GraphPlan
    pieces: dict[str, Piece]


def plan_model(
    module: nn.Module,
    layers: Sequence[AttentionSpec],
    device: torch.device,
    counters: CompileCounters,
    ledger: Ledger | None = None,
) -> PlannedGraph:
    """Capture ``module`` and make its plan. ``layers``: its attention layers, as the discovery found them.

    Raises ``CaptureError`` when the model does not fit into one graph.
    """
    ledger = ledger if ledger is not None else Ledger()
    with ledger.phase("capture") as phase:
        captured = capture(module, device)
        counters.captures += 1
        phase.note = f"{len(captured.graph_module.graph.nodes)} operations"
    with ledger.phase("passes and split") as phase:
        planned = _plan(captured, layers, device, counters)
        phase.note = f"{len(planned.plan.pieces)} of {len(planned.plan.layers) + 2} pieces are unlike"
    return planned


def _plan(
    captured: CapturedGraph, layers: Sequence[AttentionSpec], device: torch.device, counters: CompileCounters
) -> PlannedGraph:
    fired = run_passes(captured, passes_for(device))
    for name, count in fired.items():
        counters.passes[name] = counters.passes.get(name, 0) + count
    split = split_at_attention(captured, {layer.layer_name for layer in layers if layer.shares_with is not None})
    unique: dict[str, Piece] = {}
    for piece in [*(step for step in split.steps if isinstance(step, Piece)), split.head]:
        unique.setdefault(piece.spec.key, piece)
    counters.pieces += sum(isinstance(step, Piece) for step in split.steps)
    counters.heads += 1
    steps = _steps(split)
    counters.attention_layers += sum(isinstance(step, AttentionStep) for step in steps)
    plan = GraphPlan(
        layers=_layers_in_order(steps, layers),
        weights=tuple({recipe.key: recipe for recipe in captured.weights.values()}.values()),
        pieces=tuple(piece.spec for piece in unique.values()),
        steps=tuple(steps[:-1]),
        head=steps[-1],  # type: ignore[arg-type]
        hidden=split.hidden,
        vocab_size=int(split.head.spec.outputs[0].shape[-1]),
        passes=fired,
    )
    return PlannedGraph(plan, unique)


def compile_pieces(
    planned: PlannedGraph, compiler: PieceCompiler, counters: CompileCounters, progress: Progress
) -> dict[str, CompiledPiece]:
    """Compile every unique piece of the plan in memory, by key."""
    compiled: dict[str, CompiledPiece] = {}
    for key, piece in planned.pieces.items():
        progress("compiling pieces", len(compiled), len(planned.pieces))
        compiled[key] = compiler.compile(piece)
    count_compiled(compiled, planned, counters)
    progress("compiling pieces", len(compiled), len(planned.pieces))
    return compiled


def count_compiled(keys: Iterable[str], planned: PlannedGraph, counters: CompileCounters) -> None:
    """Note that the pieces ``keys`` of a plan have been compiled."""
    for key in keys:
        if key == planned.plan.head.piece:
            counters.heads_compiled += 1
        else:
            counters.pieces_compiled += 1


def _steps(split: SplitGraph) -> list[Step]:
    """All steps, the head last, each with the values that nothing reads after it."""
    steps: list[Step] = []
    for part in (*split.steps, split.head):
        steps.append(PieceStep(part.spec.key, part.inputs, part.outputs) if isinstance(part, Piece) else part)
    last_reader: dict[str, int] = {}
    for index, step in enumerate(steps):
        last_reader.update(dict.fromkeys(_values(step), index))
    kept = {INPUT_IDS, POSITIONS, LOGITS_INDICES, split.hidden}
    return [replace(step, release=_released(step, index, last_reader, kept)) for index, step in enumerate(steps)]


def _layers_in_order(steps: Sequence[Step], layers: Sequence[AttentionSpec]) -> tuple[AttentionSpec, ...]:
    by_name = {layer.layer_name: layer for layer in layers}
    names = [step.layer_name for step in steps if isinstance(step, AttentionStep)]
    if sorted(names) != sorted(by_name):
        unlike = sorted(set(names) ^ set(by_name))[:8]
        raise CaptureError(f"the captured graph attends in other layers than were found before: {unlike}")
    return tuple(by_name[name] for name in names)


def _released(step: Step, index: int, last_reader: dict[str, int], kept: set[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in _values(step) if last_reader[name] == index and name not in kept))


def _values(step: Step) -> list[str]:
    """Names of the values that a step reads, and of those it makes (they may have no reader at all)."""
    if isinstance(step, AttentionStep):
        return [name for name in (step.query, step.key, step.value, step.out) if name is not None]
    return [name.removeprefix("value:") for name in step.inputs if name.startswith("value:")] + list(step.outputs)
