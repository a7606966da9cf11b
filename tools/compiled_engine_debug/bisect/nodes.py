"""Finding the first node of a piece's graph that a compiler gets wrong."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from compiled_engine.compile.pieces import PieceCompiler
from compiled_engine.compile.split import Piece
from compiled_engine_debug.bisect.compare import Difference, difference

Arguments = Callable[[], list[torch.Tensor]]
"""Gives the arguments of a piece anew at every call: a piece may write into them."""


@dataclass(frozen=True)
class WrongNode:
    """``name`` of a node in the piece, the ``operation`` that it calls with its arguments, and the ``source`` line
    that it comes from ("" where the graph keeps none: a pass made the node)."""

    name: str
    operation: str
    source: str


def first_wrong_node(piece: Piece, compiler: PieceCompiler, arguments: Arguments, tolerance: float) -> WrongNode:
    """The first node of ``piece`` that ``compiler`` gets wrong: up to the one before, everything it computes is right.

    Binary search over the nodes in order. Each time the graph is cut after a node, and all that is alive there is
    computed by the compiled cut and by the cut itself. The whole piece must be wrong; what is wrong at a cut is alive
    at the next one, or something computed from it is.
    """
    nodes = computed_nodes(piece)
    right, wrong = 0, len(nodes)
    while wrong - right > 1:
        middle = (right + wrong) // 2
        if _is_right(cut_after(piece, middle), compiler, arguments, tolerance):
            right = middle
        else:
            wrong = middle
    return describe(nodes[wrong - 1], piece.inputs)


def computed_nodes(piece: Piece) -> list[Node]:
    """The nodes of a piece that compute something, in order."""
    return [node for node in piece.graph_module.graph.nodes if node.op not in ("placeholder", "output")]


def cut_after(piece: Piece, count: int) -> Piece | None:
    """The first ``count`` nodes of ``piece`` as a piece that gives back every tensor that the rest reads; None where
    the rest reads no tensor of theirs."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    kept = set(computed_nodes(piece)[:count])
    for node in piece.graph_module.graph.nodes:
        if node.op == "placeholder" or node in kept:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    alive = [node for node in kept if any(user not in kept for user in node.users)]
    outputs = [part for node in copies if node in alive for part in _tensors(graph, copies[node])]
    if not outputs:
        return None
    graph.output(tuple(outputs))
    module = GraphModule(torch.nn.Module(), graph, class_name="Cut")
    spec = replace(piece.spec, outputs=(), code=module.code.strip())
    return Piece(module, spec, piece.inputs, tuple(node.name for node in outputs))


def worst(values: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> Difference:
    """The largest of the differences between tensors, pair by pair."""
    pairs = zip(values, expected, strict=True)
    found = [difference(value, reference) for value, reference in pairs if value.numel()]
    return max(found, key=lambda item: item.relative, default=Difference(0.0, 0.0))


def describe(node: Node, inputs: Sequence[str]) -> WrongNode:
    """A node's name, operation and source line. ``inputs``: what the piece that has it is given."""
    return WrongNode(node.name, _operation(node, inputs), source_line(node))


def source_line(node: Node) -> str:
    """The innermost source line that a node comes from, as ``package/file:line: text``; "" if the graph keeps none."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    frames = [index for index, line in enumerate(lines) if line.startswith('File "')]
    if not frames:
        return ""
    where, text = lines[frames[-1]], lines[frames[-1] + 1 : frames[-1] + 2]
    _, path, rest = where.split('"', 2)
    number = rest.split("line ", 1)[1].split(",", 1)[0]
    return f"{_path_in_package(Path(path))}:{number}" + (f": {text[0]}" if text else "")


def _path_in_package(path: Path) -> str:
    """``path`` from the folder that its outermost package is in: it says where the code is, and not on which machine.

    Of a file that is in no package, the name.
    """
    if "site-packages" in path.parts:
        place = len(path.parts) - 1 - path.parts[::-1].index("site-packages")
        return Path(*path.parts[place + 1 :]).as_posix()
    root = path.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    return path.relative_to(root).as_posix()


def _is_right(cut: Piece | None, compiler: PieceCompiler, arguments: Arguments, tolerance: float) -> bool:
    if cut is None:
        return True
    with torch.inference_mode():
        expected = cut.graph_module(*arguments())
    compiled = compiler.compile(cut)
    with torch.inference_mode():
        return worst(compiled(arguments()), expected).relative <= tolerance


def _tensors(graph: Graph, node: Node) -> list[Node]:
    """The tensors that a node of ``graph`` stands for: itself, or the elements of a tuple; none of a size."""
    value: Any = node.meta.get("example_value")
    if isinstance(value, torch.Tensor):
        return [node]
    if not isinstance(value, (tuple, list)):
        return []
    parts = []
    for index, element in enumerate(value):
        if isinstance(element, torch.Tensor):
            part = graph.call_function(operator.getitem, (node, index))
            part.meta["example_value"] = element
            parts.append(part)
    return parts


def _operation(node: Node, inputs: Sequence[str]) -> str:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    given = dict(zip(node.graph.find_nodes(op="placeholder"), inputs, strict=True))
    shown = [str(given.get(argument, argument) if isinstance(argument, Node) else argument) for argument in node.args]
    shown += [f"{key}={value}" for key, value in node.kwargs.items()]
    return f"{name}({', '.join(text.removeprefix('value:') for text in shown)})"
