"""Piece compilers: the same pieces, the same results, for every number of tokens; errors that show the piece."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import ModuleWeights, Running, Small, compiled, quiet
from torch.fx import Graph, GraphModule

from compiled_engine.compile.counters import CompileCounters
from compiled_engine.compile.pieces import AotiPieces, InductorPieces, create_piece_compiler
from compiled_engine.compile.pipeline import compile_pieces
from compiled_engine.compile.split import Piece
from compiled_engine.errors import CaptureError, ConfigError


def test_an_unknown_compiler_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="'fast'.*aoti, inductor, eager"):
        create_piece_compiler("fast")


@pytest.mark.parametrize("compiler", ["eager", "inductor", pytest.param("aoti", marks=pytest.mark.slow)])
def test_one_compilation_serves_every_number_of_tokens_and_rows(small: Small, compiler: str) -> None:
    counters = CompileCounters()
    with counters.expect(pieces_compiled=3, heads_compiled=1, pieces=0, captures=0):
        pieces = compile_pieces(small.planned, create_piece_compiler(compiler), counters, quiet)
    running = Running(small.planned, pieces, ModuleWeights(small.module))
    running.model.verify(True)
    with counters.expect(pieces_compiled=0, heads_compiled=0):
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


@pytest.mark.parametrize("compiler", [InductorPieces, AotiPieces])
def test_a_piece_that_does_not_compile_is_shown(small: Small, compiler: Any, capfd: pytest.CaptureFixture[str]) -> None:
    piece = broken_piece(small)
    with pytest.raises(CaptureError) as caught:
        compiler().compile(piece)
    assert "no_such_method" in str(caught.value)
    assert piece.spec.code in str(caught.value)


@pytest.mark.slow
def test_packages_live_in_a_folder_that_goes_with_the_compiler(small: Small, capfd: pytest.CaptureFixture[str]) -> None:
    compiler = AotiPieces()
    folder = Path(compiler._folder.name)
    piece = small.planned.pieces[small.planned.plan.head.piece]
    run = compiler.compile(piece)
    assert [path.name for path in folder.iterdir()] == [f"{piece.spec.key}.pt2"]
    del compiler
    assert not folder.exists()
    eager = compiled(small.planned)[piece.spec.key]
    weights = [torch.randn(size) for size in [(1, 5, 16)]]
    arguments = [*weights, torch.tensor([4, 0]), ModuleWeights(small.module).tensors["head.weight"]]
    torch.testing.assert_close(run(arguments)[0], eager(arguments)[0], rtol=1e-5, atol=1e-5)
    assert capfd.readouterr().out == ""
