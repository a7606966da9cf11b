"""Piece compilers of the ladder: the engine's, and ``aot_eager``, which lies between two of them."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from compiled_engine.compile.opening import CompiledPiece, open_packages
from compiled_engine.compile.pieces import EagerPieces, InductorPieces, PieceCompiler, package_piece
from compiled_engine.compile.split import Piece
from compiled_engine.errors import CaptureError, CompiledEngineError, ConfigError
from compiled_engine.runners.gpus import check_toolkit


class ToolMissing(CompiledEngineError):
    """A rung cannot be tried here: what it needs is not installed."""


class AotEagerPieces:
    """AOTAutograd without a code generator: the piece, made functional and traced down to ATen operations, is run
    operation by operation. What diverges here and not in ``eager`` comes of tracing, not of generated code."""

    def compile(self, piece: Piece) -> CompiledPiece:
        """See ``PieceCompiler``."""
        from torch._dynamo import lookup_backend
        from torch._guards import TracingContext, detect_fake_mode, tracing

        examples = [node.meta["example_value"] for node in piece.graph_module.graph.find_nodes(op="placeholder")]
        context = TracingContext(detect_fake_mode(examples))
        try:
            with tracing(context), torch.no_grad():
                compiled = lookup_backend("aot_eager")(copy.deepcopy(piece.graph_module), examples)
        except Exception as error:  # whatever tracing an operation raises
            raise CaptureError(
                f"aot_eager cannot trace a piece: {type(error).__name__}: {error}\nThe piece:\n{piece.spec.code}"
            ) from error
        return lambda arguments: compiled(*arguments)


class AotiPieces:
    """AOTInductor packages in ``folder``, one after another in this process.

    What has run parallel loops cannot be forked safely, so the engine's several processes are no choice here.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder = folder
        self._device = device
        self._number = 0

    def compile(self, piece: Piece) -> CompiledPiece:
        """See ``PieceCompiler``."""
        self._number += 1
        path = self._folder / f"{self._number}.pt2"
        package_piece(piece, path)
        return open_packages({"piece": path}, self._device)["piece"]


CompilerFactory = Callable[[Path, torch.device], PieceCompiler]
"""Makes a piece compiler, given a folder of its own and the device."""


def eager(folder: Path, device: torch.device) -> PieceCompiler:
    """The graph's operations one by one."""
    return EagerPieces()


def aot_eager(folder: Path, device: torch.device) -> PieceCompiler:
    """See ``AotEagerPieces``."""
    return AotEagerPieces()


def inductor(folder: Path, device: torch.device) -> PieceCompiler:
    """Inductor, in memory."""
    _need_cxx(device)
    return InductorPieces()


def aoti(folder: Path, device: torch.device) -> PieceCompiler:
    """See ``AotiPieces``."""
    _need_cxx(device)
    if device.type != "cpu":
        try:
            check_toolkit()
        except ConfigError as error:
            raise ToolMissing(str(error)) from error
    return AotiPieces(folder, device)


def _need_cxx(device: torch.device) -> None:
    """Raise ``ToolMissing`` where there is no C++ compiler."""
    name = os.environ.get("CXX") or "g++"
    if device.type == "cpu" and shutil.which(name) is None:
        raise ToolMissing(f"there is no C++ compiler {name!r}")
