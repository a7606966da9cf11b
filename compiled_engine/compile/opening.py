"""What runs a compiled piece, and opening packages without importing any compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

CompiledPiece = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""Takes a piece's inputs in order, gives its outputs in order."""


def open_packages(packages: Mapping[str, Path], device: torch.device | None = None) -> dict[str, CompiledPiece]:
    """What runs each package on ``device`` (None: the CPU), by piece key. Imports no compiler."""
    on_gpu = device is not None and device.type == "cuda"
    index = device.index if device is not None and device.index is not None else -1
    # On a GPU without the loader's own synchronisation between threads, which no CUDA graph can hold.
    return {
        key: torch._C._aoti.AOTIModelPackageLoader(str(path), "model", on_gpu, 1, index).run
        for key, path in packages.items()
    }
