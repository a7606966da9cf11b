"""Splitting a captured graph at attention into pieces that repeat from layer to layer.

Sizes are no values between pieces: a piece that needs the number of tokens reads it off one of its tensor inputs, so
equal layers give equal pieces and a compiled piece takes tensors alone.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from compiled_engine.compile.canonical import describe_tensors, piece_key
from compiled_engine.compile.capture import CapturedGraph
from compiled_engine.compile.plan import LOGITS_INDICES, AttentionStep, PieceSpec
from compiled_engine.errors import CaptureError

_CREATORS = ("new_empty", "empty_like", "empty")
_IN_PLACE_OPERATORS = (
    *(operator.setitem, operator.delitem, operator.iadd, operator.isub, operator.imul, operator.itruediv),
    *(operator.ifloordiv, operator.imod, operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor),
    *(operator.ilshift, operator.irshift),
)


@dataclass(frozen=True)
class Piece:
    """One stretch of graph: what to compile, where its inputs come from (``"value:NAME"``, ``"weight:KEY"``) and which
    values it makes."""

    graph_module: GraphModule
    spec: PieceSpec
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class SplitGraph:
    """A model as alternating pieces and attention steps, then the head, which alone reads ``logits_indices``."""

    steps: tuple[Piece | AttentionStep, ...]
    head: Piece
    hidden: str


def split_at_attention(captured: CapturedGraph, sharers: Collection[str] = ()) -> SplitGraph:
    """Cut the graph before and after every attention and where rows are selected for the head.

    ``sharers`` are layers that read another layer's cache: no keys and values are passed to them.
    Raises ``CaptureError`` for a graph without attention, or one whose head is not at its end.
    """
    return _Splitter(captured, sharers).split()


def is_attention(node: Node) -> bool:
    """Whether ``node`` calls our attention op."""
    op = torch.ops.compiled_engine.attention
    return node.op == "call_function" and node.target in (op, op.default)


def changes_in_place(node: Node) -> bool:
    """Whether ``node`` changes a tensor that was there before (or has another effect), so that order matters."""
    if node.kwargs.get("inplace") is True or node.kwargs.get("out") is not None or node.target in _IN_PLACE_OPERATORS:
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.op in ("call_method", "call_function") and name.endswith("_") and not name.endswith("__"):
        return True
    return node.op == "call_function" and node.is_impure()


class _Splitter:
    """Assigns every node to a stage (0, 1, ... between attentions; the head last) and cuts one piece per stage."""

    def __init__(self, captured: CapturedGraph, sharers: Collection[str]) -> None:
        self.captured = captured
        self.sharers = sharers
        self.graph = captured.graph_module.graph
        self.attentions = [node for node in self.graph.nodes if is_attention(node)]
        if not self.attentions:
            raise CaptureError("the captured graph calls no attention op of ours: its attention was not replaced")
        self.head_stage = len(self.attentions) + 1
        self.outs = {_attention_arguments(node)[3]: node for node in self.attentions}
        self.stage = self._assign_stages()

    def split(self) -> SplitGraph:
        steps: list[Piece | AttentionStep] = []
        for index, attention in enumerate(self.attentions):
            steps.append(self._cut(index))
            steps.append(self._attention_step(attention))
        steps.append(self._cut(len(self.attentions)))
        head = self._cut(self.head_stage)
        hidden = [name.removeprefix("value:") for name in head.inputs if name.startswith("value:")]
        hidden.remove(LOGITS_INDICES)
        if len(hidden) != 1:
            raise CaptureError(f"the head must read one value of the backbone, it reads {hidden}")
        return SplitGraph(tuple(steps), head, hidden[0])

    def _attention_step(self, attention: Node) -> AttentionStep:
        query, key, value, out, name = _attention_arguments(attention)
        if name in self.sharers:
            return AttentionStep(name, query.name, None, None, out.name)
        return AttentionStep(name, query.name, key.name, value.name, out.name)

    def _assign_stages(self) -> dict[Node, int]:
        indices = self.captured.placeholder(LOGITS_INDICES)
        if indices is None:
            raise CaptureError("the model ignores logits_to_keep: its head cannot run on the sampled rows alone")
        stage: dict[Node, int] = {}
        in_head = {indices}
        current = 0
        for node in self.graph.nodes:
            if node.op in ("placeholder", "output") or node in self.outs:
                continue
            if is_attention(node):
                current += 1
            if any(source in in_head for source in node.all_input_nodes):
                if current < len(self.attentions) or is_attention(node):
                    raise CaptureError(f"{node.name} selects rows before the last attention")
                in_head.add(node)
                stage[node] = self.head_stage
            elif isinstance(source := node.args[0] if node.args else None, Node) and isinstance(
                source.meta.get("example_value"), (tuple, list)
            ):
                # One element of a tuple belongs to the piece that makes the tuple: only tensors pass between pieces.
                stage[node] = stage[source]
            else:
                stage[node] = current
        return stage

    def _cut(self, stage: int) -> Piece:
        nodes = [node for node, its in self.stage.items() if its == stage and not is_attention(node)]
        outputs = [node for node in nodes if _is_tensor(node) and self._leaves(node, stage)]
        return _PieceBuilder(_needed(nodes, outputs), outputs).build(self.captured)

    def _leaves(self, node: Node, stage: int) -> bool:
        """Whether another stage, an attention or the caller reads ``node``."""
        for user in node.users:
            if is_attention(user):
                step = self._attention_step(user)
                if node.name in (step.query, step.key, step.value):
                    return True
            elif user.op == "output" or self.stage.get(user) not in (stage, None):
                return True
        return False


class _PieceBuilder:
    """Copies the nodes of one stage into a graph of their own whose placeholders are tensors only."""

    def __init__(self, nodes: list[Node], outputs: list[Node]) -> None:
        self.nodes, self.outputs = nodes, outputs
        inside = set(nodes)
        self.external = list(
            dict.fromkeys(
                source
                for node in nodes
                for source in node.all_input_nodes
                if source not in inside and _is_tensor(source)
            )
        )
        self.graph = Graph()
        self.copies: dict[Node, Node] = {}

    def build(self, captured: CapturedGraph) -> Piece:
        for source in self.external:
            self.copies[source] = self.graph.placeholder(f"arg{len(self.copies)}")
            self.copies[source].meta = {"example_value": source.meta["example_value"]}
        for node in self.nodes:
            self.copies[node] = self.graph.node_copy(node, self._copy_of)
        self.graph.output(tuple(self.copies[node] for node in self.outputs))
        module = GraphModule(torch.nn.Module(), self.graph, class_name="Piece")
        inputs, outputs = describe_tensors(
            [node.meta["example_value"] for node in self.external],
            [node.meta["example_value"] for node in self.outputs],
        )
        spec = PieceSpec(piece_key(module, inputs), inputs, outputs, module.code.strip())
        names = tuple(_reference(source, captured) for source in self.external)
        return Piece(module, spec, names, tuple(node.name for node in self.outputs))

    def _copy_of(self, node: Node) -> Node:
        if node not in self.copies:
            value = node.meta.get("example_value")
            if not isinstance(value, torch.SymInt):
                raise CaptureError(f"{node.name} ({type(value).__name__}) would have to pass between pieces")
            found = self._size_of_input(value)
            self.copies[node] = found if found is not None else self.graph.node_copy(node, self._copy_of)
        return self.copies[node]

    def _size_of_input(self, size: torch.SymInt) -> Node | None:
        for source in self.external:
            for dim, extent in enumerate(source.meta["example_value"].shape):
                if isinstance(extent, torch.SymInt) and extent.node.expr == size.node.expr:
                    copy = self.graph.call_method("size", (self.copies[source], dim))
                    copy.meta = {"example_value": size}
                    return copy
        if not size.node.expr.is_symbol:
            return None
        raise CaptureError(f"the size {size} occurs in a piece none of whose tensor inputs has it")


def _attention_arguments(node: Node) -> tuple[Node, Node, Node, Node, str]:
    names = ("query", "key", "value", "out", "layer_name")
    arguments: dict[str, Any] = dict(zip(names, node.args, strict=False)) | node.kwargs
    query, key, value, out, layer_name = (arguments[name] for name in names)
    if not any(out.target is getattr(torch, name, None) or out.target == name for name in _CREATORS):
        raise CaptureError(f"the result of attention {layer_name!r} must be a new tensor, it is {out.format_node()}")
    return query, key, value, out, layer_name


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def _needed(nodes: Iterable[Node], outputs: Iterable[Node]) -> list[Node]:
    """Those of ``nodes`` that the outputs depend on, and those that change a tensor in place."""
    nodes = list(nodes)
    wanted = set(outputs) | {node for node in nodes if changes_in_place(node)}
    for node in reversed(nodes):
        if node in wanted:
            wanted.update(node.all_input_nodes)
    return [node for node in nodes if node in wanted]


def _reference(node: Node, captured: CapturedGraph) -> str:
    if node.name in captured.weights:
        return f"weight:{captured.weights[node.name].key}"
    return f"value:{captured.inputs.get(node.name, node.name)}"
