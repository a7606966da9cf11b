"""Ladders over tiny models for tests of ``compiled-engine-debug bisect``, and faults to put into their rungs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Node

from compiled_engine.compile import pipeline
from compiled_engine.compile.capture import CapturedGraph
from compiled_engine.compile.opening import CompiledPiece
from compiled_engine.compile.passes import Pass, passes_for
from compiled_engine.compile.pieces import EagerPieces, PieceCompiler
from compiled_engine.compile.split import Piece
from compiled_engine.config import EngineConfig
from compiled_engine.models import find_model
from compiled_engine.ops.attention import PagedAttention
from compiled_engine_debug.bisect import passes
from compiled_engine_debug.bisect.ladder import Ladder
from compiled_engine_debug.bisect.outcome import RungOutcome
from compiled_engine_debug.bisect.rungs import Rung
from compiled_engine_debug.bisect.runners import PlanRunner
from tiny_models import write_tiny_model

PROMPTS = [[17, 90, 33, 5, 61], [44], [101, 7, 7, 58, 20, 99, 12, 80, 31]]
MAX_TOKENS = 3
TOKENS_PER_STEP = 8


def quiet(what: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


def new_ladder(folder: Path, **settings: Any) -> Ladder:
    """A ladder for the model in ``folder``; 15 prompt tokens, so that the longest prompt comes in two chunks."""
    config = EngineConfig(
        **{
            "model": str(folder),
            "dtype": "float32",
            "block_size": 4,
            "max_num_seqs": len(PROMPTS),
            "max_num_batched_tokens": TOKENS_PER_STEP,
            "max_model_len": 16,
            "num_threads": 1,
            **settings,
        }
    )
    return Ladder(config, find_model(str(folder)), quiet, prompts=PROMPTS, max_tokens=MAX_TOKENS)


class Ladders:
    """Ladders by number of layers, each made once: capturing is most of an example's time."""

    def __init__(self, folder: Path, architecture: str = "llama") -> None:
        self._folder = folder
        self._architecture = architecture
        self._made: dict[int, Ladder] = {}

    def of(self, num_layers: int) -> Ladder:
        """The ladder of the tiny model with so many layers."""
        if num_layers not in self._made:
            folder = self._folder / f"{self._architecture}_{num_layers}"
            write_tiny_model(folder, self._architecture, num_hidden_layers=num_layers, seed=num_layers)
            self._made[num_layers] = new_ladder(folder)
        return self._made[num_layers]


def eager_rung(name: str = "eager", **options: Any) -> Rung:
    """A rung of eager pieces."""
    return Rung(name, "", lambda folder, device: EagerPieces(), **options)


def compiled_rung(compiler: PieceCompiler, name: str = "compiled", **options: Any) -> Rung:
    """A rung whose pieces ``compiler`` compiles."""
    return Rung(name, "", lambda folder, device: compiler, **options)


def climb(ladder: Ladder, *rungs: Rung) -> dict[str, RungOutcome]:
    """The outcomes by rung."""
    return {outcome.rung: outcome for outcome in ladder.climb(rungs)}


class WrongPieces:
    """Runs pieces eagerly, but one of them after ``spoil`` has changed the node called ``node`` of its graph.

    Works on any part of that piece which has the node.
    """

    def __init__(self, key: str, node: str, spoil: Callable[[Node], None]) -> None:
        self.key, self.node, self.spoil = key, node, spoil
        self.num_compiled = 0

    def compile(self, piece: Piece) -> CompiledPiece:
        self.num_compiled += 1
        if piece.spec.key != self.key:
            return EagerPieces().compile(piece)
        graph = torch.fx.Graph()
        copies: dict[Node, Node] = {}
        graph.output(graph.graph_copy(piece.graph_module.graph, copies))
        for node in graph.nodes:
            if node.name == self.node:
                self.spoil(node)
        module = torch.fx.GraphModule(torch.nn.Module(), graph)
        return lambda arguments: module(*arguments)


OTHERS: Mapping[Any, Any] = {operator.add: operator.sub, operator.mul: operator.add, operator.neg: operator.pos}


def other_operation(node: Node) -> None:
    """Let ``node`` compute something else from the same arguments."""
    node.target = OTHERS[node.target]


def drop(node: Node) -> None:
    """Let those who read ``node`` read its first argument of the same shape."""
    node.replace_all_uses_with(_of_same_shape(node)[0])


def ways_to_spoil(node: Node) -> list[Callable[[Node], None]]:
    """What can be done to ``node`` without changing a shape."""
    return [other_operation, drop] if _of_same_shape(node) else [other_operation]


def _of_same_shape(node: Node) -> list[Node]:
    shape = str(node.meta["example_value"].shape)
    return [item for item in node.all_input_nodes if str(item.meta["example_value"].shape) == shape]


def spoilable(piece: Piece | CapturedGraph) -> list[Node]:
    """Nodes of a graph that can be spoilt so that it shows: two tensors are added or multiplied, or one negated."""
    return [
        node
        for node in piece.graph_module.graph.nodes
        if node.target in OTHERS and all(isinstance(argument, Node) for argument in node.args)
    ]


class SpoilingPass:
    """A pass that spoils one node: the one at ``share`` (0 to 1) of those that can be spoilt when it runs.

    ``replaces``: new nodes take the place of the spoilt one, and of the right one that it reads first, as passes do
    that fuse. ``node``: what is wrong then.
    """

    __name__ = "spoil_one"

    def __init__(self, share: float, *, replaces: bool) -> None:
        self.share = share
        self.replaces = replaces
        self.node: Node | None = None

    def __call__(self, captured: CapturedGraph) -> int:
        nodes = [node for node in spoilable(captured) if isinstance(node.meta.get("example_value"), torch.Tensor)]
        self.node = node = nodes[min(int(self.share * len(nodes)), len(nodes) - 1)]
        if not self.replaces:
            other_operation(node)
            return 1
        with node.graph.inserting_before(node):
            self.node = node.graph.call_function(OTHERS[node.target], node.args)
        self.node.meta = dict(node.meta)
        _take_place(self.node, node)
        source = self.node.all_input_nodes[0]
        if source.op != "placeholder":
            with source.graph.inserting_after(source):
                _take_place(source.graph.node_copy(source), source)
        return 1


def _take_place(new: Node, old: Node) -> None:
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


@contextmanager
def with_pass(added: Pass, place: int) -> Iterator[None]:
    """Inside, plans are made with ``added`` among the passes of the CPU, with ``place`` of them before it."""
    own = passes_for(torch.device("cpu"))
    changed = (*own[:place], added, *own[place:])
    with pytest.MonkeyPatch.context() as patched:
        for module in (pipeline, passes):
            patched.setattr(module, "passes_for", lambda device: changed)
        yield


def wrap_attention(
    wrapper: Callable[[Any], Any], only: Callable[[str], bool] = lambda name: True
) -> Callable[[PlanRunner], None]:
    """An adjustment: the computation of the layers whose names ``only`` picks becomes ``wrapper(computation)``."""

    def adjust(runner: PlanRunner) -> None:
        for name, layer in runner.static_context.items():
            if isinstance(layer, PagedAttention) and only(name):
                layer.computation = wrapper(layer.computation)

    return adjust


class NoWrite:
    """Attention that leaves the cache as it is."""

    def __init__(self, computation: Any) -> None:
        self.computation = computation

    def write_and_attend(self, query, key, value, out, kv_cache, slots, metadata, sinks=None):  # type: ignore[no-untyped-def]
        self.computation.write_and_attend(query, None, None, out, kv_cache, slots, metadata, sinks)


class ShiftedSlots(NoWrite):
    """Attention that writes every token into the slot after its own."""

    def write_and_attend(self, query, key, value, out, kv_cache, slots, metadata, sinks=None):  # type: ignore[no-untyped-def]
        self.computation.write_and_attend(query, key, value, out, kv_cache, slots + 1, metadata, sinks)


class ChangedOut(NoWrite):
    """Attention whose result is changed by ``change``, which gets it."""

    def __init__(self, computation: Any, change: Callable[[torch.Tensor], None]) -> None:
        super().__init__(computation)
        self.change = change

    def write_and_attend(self, query, key, value, out, kv_cache, slots, metadata, sinks=None):  # type: ignore[no-untyped-def]
        self.computation.write_and_attend(query, key, value, out, kv_cache, slots, metadata, sinks)
        self.change(out)
