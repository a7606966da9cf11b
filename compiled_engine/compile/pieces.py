"""Piece compilers: what turns a piece's graph into something that runs."""

from __future__ import annotations

import contextlib
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from compiled_engine.compile.split import Piece
from compiled_engine.errors import CaptureError, ConfigError

CompiledPiece = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""Takes a piece's inputs in order, gives its outputs in order."""


class PieceCompiler(Protocol):
    """Compiles one piece, for every number of tokens from two up."""

    def compile(self, piece: Piece) -> CompiledPiece:
        """Raises ``CaptureError`` with the compiler's own message when the piece cannot be compiled."""
        ...


class EagerPieces:
    """Runs the graph operation by operation: no compilation, for debugging."""

    def compile(self, piece: Piece) -> CompiledPiece:
        module = piece.graph_module
        return lambda arguments: module(*arguments)


class InductorPieces:
    """``torch._inductor.standalone_compile``: compiles in seconds."""

    def compile(self, piece: Piece) -> CompiledPiece:
        from torch._inductor import config, standalone_compile

        examples = _example_values(piece)
        # Packed weights have no strides, which the generated size checks would ask for.
        with _compile_errors(piece), config.patch(size_asserts=False), torch.no_grad():
            artifact = standalone_compile(piece.graph_module, examples, dynamic_shapes="from_graph")
        return lambda arguments: artifact(*arguments)


class AotiPieces:
    """AOTInductor packages through the raw loader: slower to compile, fastest to call, no compiler needed to run."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="compiled_engine_pieces_")

    def compile(self, piece: Piece) -> CompiledPiece:
        path = Path(self._folder.name) / f"{piece.spec.key}.pt2"
        with _compile_errors(piece), _quiet():
            exported = _export(piece)
            torch._inductor.aoti_compile_and_package(exported, package_path=str(path))
        loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
        return loader.run


def create_piece_compiler(name: str) -> PieceCompiler:
    """The piece compiler called ``name``: aoti, inductor or eager."""
    compilers: dict[str, Callable[[], PieceCompiler]] = {
        "aoti": AotiPieces,
        "inductor": InductorPieces,
        "eager": EagerPieces,
    }
    if name not in compilers:
        raise ConfigError(f"piece_compiler is {name!r}: choose one of {', '.join(compilers)}")
    return compilers[name]()


def _placeholders(piece: Piece) -> list[torch.fx.Node]:
    return piece.graph_module.graph.find_nodes(op="placeholder")


def _example_values(piece: Piece) -> list[torch.Tensor]:
    return [node.meta["example_value"] for node in _placeholders(piece)]


def _export(piece: Piece) -> torch.export.ExportedProgram:
    examples, dims = [], []
    for value in _example_values(piece):
        shape = [_hint(size) for size in value.shape]
        examples.append(torch.empty_strided(shape, [_hint(size) for size in value.stride()], dtype=value.dtype).zero_())
        dynamic = {
            dim: torch.export.Dim.DYNAMIC for dim, size in enumerate(value.shape) if isinstance(size, torch.SymInt)
        }
        dims.append(dynamic or None)
    with torch.no_grad():
        return torch.export.export(
            _Wrapped(piece.graph_module), tuple(examples), dynamic_shapes=(tuple(dims),), strict=False
        )


class _Wrapped(torch.nn.Module):
    """Gives export a forward with any number of arguments."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.module(*arguments)


def _hint(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


@contextlib.contextmanager
def _compile_errors(piece: Piece) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CaptureError(
            f"a piece could not be compiled: {type(error).__name__}: {error}\nThe piece:\n{piece.spec.code}"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's chatter off the user's terminal; errors come as exceptions."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore", FutureWarning)
        yield
