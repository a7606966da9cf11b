"""Piece compilers: the same pieces, the same results, for every number of tokens; errors that show the piece."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_models import ModuleWeights, Running, Small, compiled, quiet
from torch.fx import Graph, GraphModule

from compiled_engine.compile import packages
from compiled_engine.compile.counters import CompileCounters
from compiled_engine.compile.ledger import Ledger
from compiled_engine.compile.opening import open_packages
from compiled_engine.compile.packages import compile_packages
from compiled_engine.compile.pieces import InductorPieces, create_piece_compiler
from compiled_engine.compile.pipeline import compile_pieces
from compiled_engine.compile.split import Piece
from compiled_engine.compile.weights import materialize
from compiled_engine.errors import CaptureError, ConfigError


def test_an_unknown_compiler_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="'fast'.*inductor, eager"):
        create_piece_compiler("fast")


@pytest.mark.parametrize("compiler", ["eager", "inductor", pytest.param("aoti", marks=pytest.mark.slow)])
def test_one_compilation_serves_every_number_of_tokens_and_rows(small: Small, compiler: str) -> None:
    counters = CompileCounters()
    with counters.expect(pieces_compiled=3, heads_compiled=1, pieces=0, captures=0):
        pieces = compiled(small.planned, compiler, counters)
    running = Running(small.planned, pieces, ModuleWeights(small.module))
    with running.model.verified(), counters.expect(pieces_compiled=0, heads_compiled=0):
        for lengths in [(1,), (2,), (1, 1, 1), (9, 2), (3, 1, 20, 7)]:
            sequences = [[(7 * row + i) % 23 for i in range(length)] for row, length in enumerate(lengths)]
            expected = torch.stack([small.module.dense_logits(sequence)[-1] for sequence in sequences])
            torch.testing.assert_close(running.run_whole(sequences), expected, rtol=1e-4, atol=1e-5)


def test_progress_is_told_from_nothing_to_all(small: Small) -> None:
    told: list[tuple[int, int]] = []

    def progress(what: str, done: int, total: int) -> None:
        told.append((done, total))

    compile_pieces(small.planned, create_piece_compiler("eager"), CompileCounters(), progress)
    assert told == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]


def broken_piece(small: Small) -> Piece:
    """A piece whose graph calls what does not exist."""
    piece = next(iter(small.planned.pieces.values()))
    graph = Graph()
    source = graph.placeholder("arg0")
    source.meta = {"example_value": torch.zeros(4, 4)}
    graph.output((graph.call_method("no_such_method", (source,)),))
    return replace(piece, graph_module=GraphModule(torch.nn.Module(), graph))


def test_a_piece_that_inductor_refuses_is_shown(small: Small) -> None:
    piece = broken_piece(small)
    with pytest.raises(CaptureError) as caught:
        InductorPieces().compile(piece)
    assert "no_such_method" in str(caught.value)
    assert piece.spec.code in str(caught.value)


def test_a_piece_that_cannot_be_packaged_is_shown(small: Small, tmp_path: Path) -> None:
    """The compiler runs in a process of its own; its message comes back, and nothing is left running."""
    piece = broken_piece(small)
    with pytest.raises(CaptureError) as caught:
        compile_packages({piece.spec.key: piece}, tmp_path, quiet, Ledger())
    assert "no_such_method" in str(caught.value)
    assert piece.spec.code in str(caught.value)
    assert multiprocessing.active_children() == []


def test_a_compiler_that_dies_is_an_error(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "package_piece", lambda piece, path: os._exit(9))
    with pytest.raises(CaptureError, match="exit code 9"):
        compile_packages(small.planned.pieces, tmp_path, quiet, Ledger())
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_packages_are_compiled_side_by_side_and_told_of(small: Small, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    ledger = Ledger()
    made = compile_packages(small.planned.pieces, tmp_path, lambda _, *step: told.append(step), ledger, workers=2)
    assert told == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{key}.pt2" for key in small.planned.pieces)
    assert [phase.name[:14] for phase in ledger.phases] == ["compile piece "] * 4
    key = small.planned.plan.head.piece
    run, eager = open_packages(made)[key], compiled(small.planned)[key]
    weights = materialize(small.planned.plan.weights, ModuleWeights(small.module))
    arguments = [torch.randn(1, 5, 16), torch.tensor([4, 0]), weights["packed(head.weight)"]]
    torch.testing.assert_close(run(arguments)[0], eager(arguments)[0], rtol=1e-5, atol=1e-5)
