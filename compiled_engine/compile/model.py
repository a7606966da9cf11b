"""Running a plan: straight-line steps over values, weights and the caches that layers own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from compiled_engine.compile.launch import Launch, launch_now
from compiled_engine.compile.opening import CompiledPiece
from compiled_engine.compile.plan import (
    INPUT_IDS,
    LOGITS_INDICES,
    POSITIONS,
    AttentionStep,
    GraphPlan,
    PieceStep,
    TensorSpec,
    check_plan,
)
from compiled_engine.context import StaticForwardContext, get_forward_context
from compiled_engine.errors import PlanError
from compiled_engine.ops.attention import PagedAttention, attention_launch
from compiled_engine.ops.cpu.packing import PACKED_HEAD_BYTES

Values = list[torch.Tensor | None]


@dataclass(frozen=True)
class Instruction:
    """One step with its values resolved to places in the list of values.

    ``name``: for messages. ``reads``, ``makes``: places. ``release``: places that nothing reads afterwards. ``layer``:
    the layer that attends; None: a piece runs.
    """

    name: str
    run: Callable[[Values, Launch], None]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    release: tuple[int, ...]
    layer: PagedAttention | None = None


class CompiledModel:
    """A plan with its pieces, weights and layers.

    Needs neither the model definition nor a compiler. Pieces get values and weights; caches are read by the attention
    layers of ``static_context`` and are nobody's argument, so binding other caches needs no new graph.
    Raises ``PlanError`` when pieces, weights or layers are not those that the plan asks for.
    """

    def __init__(
        self,
        plan: GraphPlan,
        pieces: Mapping[str, CompiledPiece],
        weights: Mapping[str, torch.Tensor],
        static_context: StaticForwardContext,
    ) -> None:
        self.plan = plan
        self.static_context = static_context
        check_plan(plan)
        _check_parts(plan, pieces, weights, static_context)
        self._pieces = dict(pieces)
        self._specs = {piece.key: piece for piece in plan.pieces}
        self._places: dict[str, int] = {}
        self._initial: Values = []
        for key, weight in weights.items():
            self._place(f"weight:{key}")
            self._initial[-1] = weight
        inputs = [self._place(f"value:{name}") for name in (INPUT_IDS, POSITIONS, LOGITS_INDICES)]
        self._input_ids, self._positions, self._logits_indices = inputs
        self._verify = False
        self.instructions = tuple(self._instruction(step) for step in plan.steps)
        self._head = self._instruction(plan.head)
        self.hidden_place = self._place(f"value:{plan.hidden}")
        self._logits = self._place(f"value:{plan.head.outputs[0]}")

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The weights that pieces are given, by key. The dictionary is a copy."""
        names = {place: name for name, place in self._places.items() if name.startswith("weight:")}
        return {
            names[place].removeprefix("weight:"): tensor
            for place, tensor in enumerate(self._initial)
            if place in names and tensor is not None
        }

    def hidden_states(
        self, input_ids: torch.Tensor, positions: torch.Tensor, launch: Launch = launch_now
    ) -> torch.Tensor:
        """Last hidden states of this step's tokens, [1, num_tokens, hidden_size].

        input_ids, positions: int64 [num_tokens]. ``launch`` runs every piece and every attention. Must run inside
        ``set_forward_context``: that is where attention finds slots and block tables.
        """
        values = self.initial_values(input_ids, positions)
        for instruction in self.instructions:
            instruction.run(values, launch)
            for place in instruction.release:
                values[place] = None
        return self.hidden_of(values)

    def initial_values(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Values:
        """The values of a step in which no instruction has run yet."""
        values = self._initial.copy()
        values[self._input_ids], values[self._positions] = input_ids, positions
        return values

    def hidden_of(self, values: Values) -> torch.Tensor:
        """The last hidden states among the values of a step whose instructions have run."""
        hidden = values[self.hidden_place]
        if hidden is None:
            raise PlanError(f"the plan never made its hidden states {self.plan.hidden!r}")
        return hidden

    def logits(
        self, hidden_states: torch.Tensor, logits_indices: torch.Tensor, launch: Launch = launch_now
    ) -> torch.Tensor:
        """Logits [num_rows, vocab_size] of the rows ``logits_indices`` (int64 [num_rows])."""
        values = self._initial.copy()
        values[self.hidden_place], values[self._logits_indices] = hidden_states, logits_indices
        self._head.run(values, launch)
        logits = values[self._logits]
        if logits is None:
            raise PlanError("the plan's head made no logits")
        return logits

    @contextmanager
    def verified(self) -> Iterator[None]:
        """Inside, shapes, strides and dtypes of everything that pieces give and take are checked (for warm-up).

        A compiled piece trusts its inputs: a stride that differs from the plan's would be read as garbage.
        """
        self._verify = True
        try:
            yield
        finally:
            self._verify = False

    def _place(self, name: str) -> int:
        if name not in self._places:
            self._places[name] = len(self._initial)
            self._initial.append(None)
        return self._places[name]

    def _instruction(self, step: PieceStep | AttentionStep) -> Instruction:
        return self._attention(step) if isinstance(step, AttentionStep) else self._piece(step)

    def _released(self, step: PieceStep | AttentionStep) -> tuple[int, ...]:
        return tuple(self._place(f"value:{name}") for name in step.release)

    def _piece(self, step: PieceStep) -> Instruction:
        piece = self._pieces[step.piece]
        inputs = tuple(self._place(name) for name in step.inputs)
        outputs = tuple(self._place(f"value:{name}") for name in step.outputs)
        spec = self._specs[step.piece]
        name = step.launch_name

        def run(values: Values, launch: Launch) -> None:
            arguments = [values[place] for place in inputs]
            symbols: dict[str, int] = {}
            if self._verify:
                _check_tensors("input", arguments, spec.inputs, step, symbols)
            results = launch(name, partial(piece, arguments))  # type: ignore[arg-type]
            if self._verify:
                _check_tensors("output", results, spec.outputs, step, symbols)
            for place, result in zip(outputs, results, strict=True):
                values[place] = result

        return Instruction(name, run, inputs, outputs, self._released(step))

    def _attention(self, step: AttentionStep) -> Instruction:
        layer = self.static_context[step.layer_name]
        if not isinstance(layer, PagedAttention):
            raise PlanError(f"layer {step.layer_name!r} is a {type(layer).__name__}, the plan needs a PagedAttention")
        if layer.writes_cache and (step.key is None or step.value is None):
            raise PlanError(f"the plan gives layer {step.layer_name!r} no keys and values, and it shares no other's")
        query, out = self._place(f"value:{step.query}"), self._place(f"value:{step.out}")
        key, value = (None if name is None else self._place(f"value:{name}") for name in (step.key, step.value))

        name = step.launch_name

        def run(values: Values, launch: Launch) -> None:
            q = values[query]
            k, v = None if key is None else values[key], None if value is None else values[value]
            if q is None:
                raise PlanError(f"attention of {step.layer_name!r} runs before its query is made")
            # A place that holds a tensor before its value is made wants the value in that tensor.
            result = values[out]
            if result is None:
                result = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            work = attention_launch(layer, q, k, v, result, get_forward_context())
            launch(name, work)
            values[out] = result

        reads = tuple(place for place in (query, key, value) if place is not None)
        return Instruction(name, run, reads, (out,), self._released(step), layer)


def _check_parts(
    plan: GraphPlan,
    pieces: Mapping[str, CompiledPiece],
    weights: Mapping[str, torch.Tensor],
    static_context: StaticForwardContext,
) -> None:
    wanted = {
        "pieces": ({piece.key for piece in plan.pieces}, set(pieces)),
        "weights": ({recipe.key for recipe in plan.weights}, set(weights)),
        "layers": ({layer.layer_name for layer in plan.layers}, set(static_context)),
    }
    for what, (asked, given) in wanted.items():
        if missing := sorted(asked - given):
            raise PlanError(f"the plan asks for {what} that are not there: {', '.join(missing[:8])}")
    for spec in plan.layers:
        layer = static_context[spec.layer_name]
        if isinstance(layer, PagedAttention) and layer.attention_spec != spec:
            raise PlanError(f"layer {spec.layer_name!r} is {layer.attention_spec}, the plan asks for {spec}")
    for recipe in plan.weights:
        weight, shape = weights[recipe.key], (PACKED_HEAD_BYTES,) if recipe.packed else recipe.shape
        dtype = torch.uint8 if recipe.packed else recipe.dtype
        if tuple(weight.shape) != shape:
            raise PlanError(f"weight {recipe.key!r} has shape {tuple(weight.shape)}, the plan asks for {shape}")
        if weight.dtype != dtype:
            raise PlanError(f"weight {recipe.key!r} is {weight.dtype}, the plan asks for {dtype}")


def _check_tensors(
    side: str,
    tensors: Sequence[torch.Tensor | None],
    specs: Sequence[TensorSpec],
    step: PieceStep,
    symbols: dict[str, int],
) -> None:
    """Compare with the plan; ``symbols`` collects what each symbol of the piece stands for in this step."""
    if len(tensors) != len(specs):
        raise PlanError(f"piece {step.piece[:12]} has {len(tensors)} {side}s, the plan says {len(specs)}")
    for index, (tensor, spec) in enumerate(zip(tensors, specs, strict=True)):
        where = f"{side} {index} of {step.launch_name}"
        if tensor is None:
            raise PlanError(f"{where} was never made")
        if tensor.dtype != spec.dtype:
            raise PlanError(f"{where} has dtype {tensor.dtype}, the plan says {spec.dtype}")
        if tensor.dim() != len(spec.shape):
            raise PlanError(f"{where} has shape {tuple(tensor.shape)}, the plan says {spec.shape}")
        sizes = list(zip(tensor.shape, spec.shape, strict=True))
        # The stride of a dimension of size one is never used.
        sizes += [
            (stride, expected)
            for stride, expected, size in zip(tensor.stride(), spec.stride, tensor.shape, strict=True)
            if size != 1
        ]
        for actual, expected in sizes:
            if isinstance(expected, str):
                if not expected.isidentifier():
                    continue
                expected = symbols.setdefault(expected, actual)
            if actual != expected:
                raise PlanError(
                    f"{where} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, the plan says "
                    f"{spec.shape} and {spec.stride}"
                )
