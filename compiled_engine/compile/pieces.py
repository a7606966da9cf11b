"""Piece compilers: what turns a piece's graph into something that runs."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch

from compiled_engine.compile.key import ops_tag
from compiled_engine.compile.opening import CompiledPiece
from compiled_engine.compile.split import Piece
from compiled_engine.errors import CaptureError, ConfigError
from compiled_engine.ops.linear import C_SHIM


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
        from torch._inductor import standalone_compile

        examples = _example_values(piece)
        with _compile_errors(piece), _ops_in_cache_key(), torch.no_grad():
            artifact = standalone_compile(piece.graph_module, examples, dynamic_shapes="from_graph")
        return lambda arguments: artifact(*arguments)


def package_piece(piece: Piece, path: Path) -> None:
    """Compile ``piece`` with AOTInductor into the package ``path``. Raises ``CaptureError``."""
    settings = {
        "aot_inductor.custom_ops_to_c_shims": {torch.ops.compiled_engine.packed_linear.default: [C_SHIM]},
        # How many threads a loop gets is decided when it runs.
        "cpp.dynamic_threads": True,
    }
    with (
        _compile_errors(piece),
        _quiet(),
        _ops_in_cache_key(),
        torch._inductor.config.patch(settings),
    ):
        torch._inductor.aoti_compile_and_package(_export(piece), package_path=str(path))


def create_piece_compiler(name: str) -> PieceCompiler:
    """The compiler called ``name`` of pieces that stay in memory: inductor or eager.

    Pieces for ``aoti`` are packages on disk: see ``packages.py``.
    """
    compilers: dict[str, Callable[[], PieceCompiler]] = {
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
        strides = [_hint(size) for size in value.stride()]
        examples.append(torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device).zero_())
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


def _ops_in_cache_key() -> AbstractContextManager[None]:
    """Inductor's own cache does not see what our ops are (pytorch#187319): their hash has to be part of its key."""
    return torch.compiler.config.patch(cache_key_tag=ops_tag())  # type: ignore[attr-defined]
