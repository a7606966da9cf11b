"""What runs a compiled piece, and opening packages without importing any compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

CompiledPiece = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""Takes a piece's inputs in order, gives its outputs in order."""


def open_packages(packages: Mapping[str, Path]) -> dict[str, CompiledPiece]:
    """What runs each package, by piece key. Imports no compiler."""
    return {
        key: torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1).run
        for key, path in packages.items()
    }
