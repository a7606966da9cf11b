"""Every call of torch_xla in this engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from compiled_engine.errors import ConfigError
from compiled_engine.runners.memory import available_memory
from compiled_engine.runners.platforms import ExecutionCounts, Function

# Lazily collected operations that were executed or compiled, by whether their graph was there already. Functions that
# Dynamo compiles are executed on another way, but are collected once to be compiled, which counts in all three.
_LAZY_COUNTERS = ("UncachedCompile", "CachedCompile")
_COMPILED_FUNCTIONS_COUNTER = "DynamoExtractCompiledGraph"


class TorchXlaPlatform:
    """An ``XlaPlatform`` by torch_xla 2.9: a TPU, or with ``PJRT_DEVICE=CPU`` XLA's compiler for the CPU.

    torch_xla keeps the tensors that a function was compiled with alive, caches included, until Dynamo forgets the
    function: see ``forget_compiled``. Raises ``ConfigError`` without a TPU unless ``PJRT_DEVICE`` says so: nobody gets
    the slow one by mistake.
    """

    name = "torch_xla"
    updates_in_place = True
    warm_start = "torch_xla 2.9 cannot reload compiled graphs (pytorch/xla#9094): every start compiles"

    def __init__(self) -> None:
        wanted = os.environ.get("PJRT_DEVICE", "")
        if wanted not in ("TPU", "CPU") and not _has_tpu():
            # Importing torch_xla sets the variable, and the next attempt must not find it.
            os.environ.pop("PJRT_DEVICE", None)
            if wanted:
                os.environ["PJRT_DEVICE"] = wanted
            raise ConfigError(
                f"device is 'tpu', and this machine has none (PJRT_DEVICE is {wanted!r}). To run XLA on the CPU, for "
                "tests and debugging, set the environment variable PJRT_DEVICE=CPU; for speed on a CPU use device='cpu'"
            )
        try:
            import torch_xla
            import torch_xla.core.xla_model
            import torch_xla.debug.metrics
            import torch_xla.runtime
        except ImportError as error:
            raise ConfigError(
                f"torch_xla does not load beside torch {torch.__version__}, and fits one torch only: see "
                f"constraints/xla.txt ({error})"
            ) from error

        self._xla = torch_xla
        try:
            self.device: torch.device = torch_xla.device()
        except RuntimeError as error:
            raise ConfigError(f"torch_xla finds no device (PJRT_DEVICE is {wanted!r}): {error}") from error
        self.emulated = torch_xla.runtime.device_type() == "CPU"
        self.description = "XLA on the CPU (PJRT_DEVICE=CPU)" if self.emulated else "TPU"
        self.ragged_paged_attention = None if self.emulated else _ragged_paged_attention()

    def compile(self, function: Function) -> Function:
        """See ``XlaPlatform``."""
        # Tables that transformers keeps grow with every model of the process, which changes no graph.
        options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_guard_on_globals_unsafe}
        compiled = torch.compile(function, backend="openxla", fullgraph=True, dynamic=False, options=options)
        return cast(Function, compiled)

    def to_device(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See ``XlaPlatform``."""
        moved: list[torch.Tensor] = self._xla.core.xla_model.send_cpu_data_to_device(list(tensors), self.device)
        return moved

    def donate(self, tensor: torch.Tensor) -> None:
        """See ``XlaPlatform``."""
        torch.ops.xla.dynamo_set_buffer_donor_(tensor, True)

    def wait(self) -> None:
        """See ``XlaPlatform``."""
        self._xla.core.xla_model.wait_device_ops()

    def counts(self) -> ExecutionCounts:
        """See ``XlaPlatform``. ``stray`` may fall when a function is compiled: torch_xla then clears CachedCompile."""
        value = self._xla.debug.metrics.counter_value
        lazy = sum(value(name) or 0 for name in _LAZY_COUNTERS)
        stray = lazy - (value(_COMPILED_FUNCTIONS_COUNTER) or 0)
        return ExecutionCounts(self._xla.runtime.get_num_cached_compilation_graph(), stray)

    def free_memory(self, fraction: float) -> int:
        """See ``XlaPlatform``. XLA on the CPU keeps no account: it is what the machine has free."""
        if self.emulated:
            return available_memory()
        usage = self._xla.core.xla_model.get_memory_info(self.device)
        most_used = int(usage.get("peak_bytes_used", usage["bytes_used"]))
        return int(int(usage["bytes_limit"]) * fraction) - most_used

    def buffer_address(self, tensor: torch.Tensor) -> int:
        """See ``XlaPlatform``."""
        return int(self._xla._XLAC._unsafe_buffer_pointer(tensor))


def _has_tpu() -> bool:
    from torch_xla._internal import tpu

    return bool(tpu.num_available_chips())


def _ragged_paged_attention() -> Callable[..., torch.Tensor]:
    import torch_xla.experimental.custom_kernel  # noqa: F401  registers the op

    kernel: Callable[..., torch.Tensor] = torch.ops.xla.ragged_paged_attention
    return kernel
