"""A compiled model whose steps are captured as graphs, whole or between attentions, and replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from compiled_engine.compile.graphs.backend import GraphBackend, GraphPart, GraphRecord
from compiled_engine.compile.graphs.bindings import Role, Tensors
from compiled_engine.compile.graphs.boundary import BoundaryBuffers, cut_at_attention, last_readers
from compiled_engine.compile.graphs.keys import GraphKey, GraphKind
from compiled_engine.compile.launch import Launch, copying, launch_now
from compiled_engine.compile.model import CompiledModel, Instruction, Values
from compiled_engine.context import ForwardContext, StepKind, set_forward_context
from compiled_engine.errors import CaptureError

GraphTail = Callable[[torch.Tensor, Launch], Sequence[torch.Tensor]]
"""Turns logits [num_rows, vocab_size] into a full graph's outputs, in tensors that stay where they are."""


@dataclass(frozen=True)
class StepTensors:
    """One step's tensors, cut to the sizes of its graph from buffers that stay where they are.

    input_ids, positions: int64 [num_padded_tokens].   logits_indices: int64 [num_rows], the token rows that get logits.
    ``metadata``: what ``ForwardContext`` holds, by name.   ``workspaces``, ``outputs``: what else full graphs use.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    logits_indices: torch.Tensor
    metadata: Mapping[str, torch.Tensor] = field(default_factory=dict)
    workspaces: Mapping[str, torch.Tensor] = field(default_factory=dict)
    outputs: Mapping[str, torch.Tensor] = field(default_factory=dict)


class GraphedModel:
    """Captures and replays the steps of ``model`` on ``backend``, by ``GraphKey``. Largest keys are captured first."""

    def __init__(self, model: CompiledModel, backend: GraphBackend) -> None:
        self.model = model
        self.backend = backend
        self._parts = cut_at_attention(model.instructions)
        self._boundary = BoundaryBuffers(last_readers(self._parts, (model.hidden_place,)))
        # Of piecewise keys: the tensors that stay from part to part and from replay to replay.
        self._values: dict[GraphKey, Values] = {}

    def capture(self, key: GraphKey, step: StepTensors, context: ForwardContext, tail: GraphTail) -> list[GraphRecord]:
        """Capture the graph or graphs of ``key``, after one run that is thrown away.

        ``step`` and ``context`` describe a step of padding. ``tail`` ends a full graph. Raises ``CaptureError``.
        """
        if key.kind is GraphKind.FULL:
            with set_forward_context(replace(context, step_kind=StepKind.WARMUP)):
                self._whole(step, tail, launch_now)
            with set_forward_context(replace(context, step_kind=StepKind.CAPTURE, graph_key=key)):
                tensors = self._tensors(key, step)
                return [self.backend.capture_one(GraphPart(key), partial(self._whole, step, tail), tensors)]
        if key in self._values:
            raise CaptureError(f"graph {key} is captured already")
        with set_forward_context(replace(context, step_kind=StepKind.WARMUP)):
            self.model.hidden_states(step.input_ids, step.positions)
        try:
            return self._capture_parts(key, step, context)
        except BaseException:
            self.backend.forget(key)
            raise

    def replay_full(self, key: GraphKey, step: Callable[[], StepTensors]) -> tuple[torch.Tensor, ...]:
        """Replay a full graph: the outputs that its tail left, to be dropped before the next replay.

        ``step`` gives the step's tensors; it is asked for when they are to be checked.
        """
        self.backend.replay(GraphPart(key), lambda: self._tensors(key, step()))
        return self.backend.outputs(GraphPart(key))

    def replay_pieces(self, key: GraphKey, step: Callable[[], StepTensors]) -> torch.Tensor:
        """Replay the pieces of a piecewise key, with attention between them: last hidden states [1, num_padded_tokens,
        hidden_size], which the next replay overwrites. ``step``: see ``replay_full``. Must run inside
        ``set_forward_context``."""
        if key not in self._values:
            raise CaptureError(f"graph {key} was never captured")
        values = self._values[key]
        for index, instructions in enumerate(self._parts):
            if instructions[0].layer is None:
                self.backend.replay(GraphPart(key, index), lambda: self._tensors(key, step()))
            else:
                instructions[0].run(values, launch_now)
        last = GraphPart(key, len(self._parts) - 1)
        return self.backend.hand_out(last, (self.model.hidden_of(values),))[0]

    def cleanup(self) -> None:
        """Forget every graph and free its memory."""
        # First what is kept of the graphs' own memory, which the backend then gives back.
        self._values.clear()
        self._boundary = BoundaryBuffers(last_readers(self._parts, (self.model.hidden_place,)))
        self.backend.cleanup()

    def _whole(self, step: StepTensors, tail: GraphTail, launch: Launch) -> Sequence[torch.Tensor]:
        hidden_states = self.model.hidden_states(step.input_ids, step.positions, launch)
        return tail(self.model.logits(hidden_states, step.logits_indices, launch), launch)

    def _capture_parts(self, key: GraphKey, step: StepTensors, context: ForwardContext) -> list[GraphRecord]:
        records: list[GraphRecord] = []
        values = self.model.initial_values(step.input_ids, step.positions)
        pieces = replace(context, step_kind=StepKind.CAPTURE, graph_key=key, captures_attention=False)
        between = replace(context, step_kind=StepKind.WARMUP)
        # The parts of a key are replayed one after another: what the first has verified holds for all.
        tensors: Tensors = self._tensors(key, step)
        for index, instructions in enumerate(self._parts):
            if instructions[0].layer is None:
                with set_forward_context(pieces):
                    work = partial(self._stretch, instructions, values)
                    records.append(self.backend.capture_one(GraphPart(key, index), work, tensors))
                tensors = {}
            else:
                self._place_output(instructions[0], values)
                with set_forward_context(between):
                    instructions[0].run(values, launch_now)
            self._boundary.end_part(index)
        self._values[key] = values
        return records

    def _stretch(self, instructions: Sequence[Instruction], values: Values, launch: Launch) -> tuple[torch.Tensor, ...]:
        """Run pieces and put what outlives them into its buffers; ``values`` hold these afterwards, and nothing else
        that the pieces made."""
        for instruction in instructions:
            instruction.run(values, launch)
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for place in (place for instruction in instructions for place in instruction.makes):
            value = values[place]
            values[place] = None
            if value is not None and self._boundary.needs(place):
                values[place] = buffer = self._boundary.buffer_for(place, value)
                copies.append((buffer, value))
        launch("copy to the next part", copying(copies))
        return ()

    def _place_output(self, attention: Instruction, values: Values) -> None:
        query = values[attention.reads[0]]
        if query is not None:
            like = torch.empty(query.shape, dtype=query.dtype, device=query.device)
            values[attention.makes[0]] = self._boundary.buffer_for(attention.makes[0], like)

    def _tensors(self, key: GraphKey, step: StepTensors) -> Tensors:
        """What the graphs of ``key`` use now, by role and name."""
        found = {(Role.WEIGHT, name): tensor for name, tensor in self.model.weights.items()}
        found |= {(Role.INPUT, "input_ids"): step.input_ids, (Role.INPUT, "positions"): step.positions}
        if key.kind is GraphKind.PIECEWISE:
            return found
        found |= {(Role.INPUT, "logits_indices"): step.logits_indices}
        for role, tensors in (
            (Role.METADATA, step.metadata),
            (Role.WORKSPACE, step.workspaces),
            (Role.OUTPUT, step.outputs),
        ):
            found |= {(role, name): tensor for name, tensor in tensors.items()}
        layers = self.model.static_context.items()
        return found | {(Role.CACHE, name): layer.kv_cache for name, layer in layers if layer.is_bound}
