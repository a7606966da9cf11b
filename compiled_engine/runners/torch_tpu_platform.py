"""The device through torch_tpu 0.2, the successor of torch_xla. This module has not run on hardware.

Written from the released wheel. Its public interface is ``torch.tpu`` (declared in its ``public_api.py``), the backend
"tpu" of ``torch.compile``, and ``torch.accelerator`` for what ``torch.tpu`` reserves to torch itself; there is no
emulation on the CPU. What that interface does not offer, and what stands here instead:

* Donation of a compiled function's inputs: none, only single operations made by ``torch.tpu.pallas.jax_op`` can donate.
  A cache is still updated in place, as torch.compile promises: the compiled graph returns the new contents, and they
  are written back after it. So memory is needed for the caches once more, and time for the copies.
* Executions of operations outside of compiled functions: not counted, ``stray`` is always 0.
* Compiled graphs: not counted either, so those that Dynamo hands to the backend are counted here.
* A paged attention kernel: none, so the gather form is used. (``torch.tpu.pallas.jax_op`` could wrap one of JAX.)
* A transfer of several tensors at once: none, they are moved one by one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch._dynamo import lookup_backend

from compiled_engine.errors import ConfigError
from compiled_engine.runners.platforms import ExecutionCounts, Function


class TorchTpuPlatform:
    """An ``XlaPlatform`` by torch_tpu 0.2 for the TPU of this process.

    Raises ``ConfigError`` without torch_tpu or without a TPU.
    """

    name = "torch_tpu"
    updates_in_place = False
    emulated = False
    warm_start = "torch_tpu 0.2 says it keeps compiled graphs in torch's AOTAutograd cache; this has not been seen"
    ragged_paged_attention: Callable[..., torch.Tensor] | None = None

    def __init__(self) -> None:
        self.device = _tpu_device()
        tpu = importlib.import_module("torch.tpu")
        self.description: str = tpu.get_device_name()
        self._graphs = 0
        # One object for all functions: Dynamo takes another object for another backend.
        self._backend = self._compile_and_count

    def compile(self, function: Function) -> Function:
        """See ``XlaPlatform``."""
        # Tables that transformers keeps grow with every model of the process, which changes no graph.
        options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_guard_on_globals_unsafe}
        compiled = torch.compile(function, backend=self._backend, fullgraph=True, dynamic=False, options=options)
        return cast(Function, compiled)

    def to_device(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See ``XlaPlatform``; as many transfers as tensors."""
        return [tensor.to(self.device) for tensor in tensors]

    def donate(self, tensor: torch.Tensor) -> None:
        """See ``XlaPlatform``. Does nothing: there is no call for it, see above for what follows."""

    def wait(self) -> None:
        """See ``XlaPlatform``."""
        torch.accelerator.synchronize(self.device)

    def counts(self) -> ExecutionCounts:
        """See ``XlaPlatform``: the graphs that functions of this platform were compiled to; ``stray`` is always 0."""
        return ExecutionCounts(self._graphs, 0)

    def free_memory(self, fraction: float) -> int:
        """See ``XlaPlatform``; by what is used now, since the most that was used is not told."""
        free, total = torch.accelerator.get_memory_info(self.device)
        return int(total * fraction) - (int(total) - int(free))

    def buffer_address(self, tensor: torch.Tensor) -> int:
        """See ``XlaPlatform``: the address that torch knows, which stays when contents are written back."""
        return tensor.data_ptr()

    def _compile_and_count(self, graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], **options: Any) -> Any:
        compiled = lookup_backend("tpu")(graph, inputs, **options)
        self._graphs += 1
        return compiled


def _tpu_device() -> torch.device:
    """The TPU that torch uses once torch_tpu has registered itself."""
    try:
        importlib.import_module("torch_tpu")
    except ImportError as error:
        raise ConfigError(
            f"device is 'tpu', and torch_tpu cannot be imported ({error}). Install it on a machine with a TPU with "
            "pip install torch_tpu (Python 3.12 or newer, torch 2.11 to 2.15), or set device='cpu'"
        ) from error
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type != "tpu":
        raise ConfigError(
            f"device is 'tpu', and torch's accelerator is {device}: torch_tpu found no TPU, or does not register "
            "itself because TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set. Unset that, use a machine with a TPU, or set "
            "device='cpu'"
        )
    return device
