"""What compiling one Triton kernel ahead of time needs to know: the types, constants and settings of one launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KernelVariant:
    """One machine code that a step can launch, described without a tensor and without a device.

    ``name``: unique among the variants of one model, fit for a file name. ``kernel``: the ``triton.jit`` function.
    ``arguments``: its run-time arguments by name, in the order of its signature: a ``torch.dtype`` for a pointer to
    16-byte aligned elements of that type, a sample number for a scalar, None for a pointer that is not given.
    ``constants``: the values of its ``tl.constexpr`` parameters by name. ``num_warps``, ``num_stages``: the compiler's
    settings, the same in every launch of this variant.
    """

    name: str
    kernel: Any
    arguments: Mapping[str, object]
    constants: Mapping[str, object]
    num_warps: int
    num_stages: int

    def compile(self) -> Any:
        """Compile it for the GPU of Triton's active driver, or find it compiled: what Triton makes of it."""
        settings = {"num_warps": self.num_warps, "num_stages": self.num_stages, "grid": (1,)}
        return self.kernel.warmup(*self.arguments.values(), **self.constants, **settings)
