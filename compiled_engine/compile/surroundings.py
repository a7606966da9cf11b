"""What graphs depend on besides model and settings: our sources and ops, torch, the CPU, the environment.

Each function gives named components of the store's key, as text.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import torch.utils._config_module

from compiled_engine.errors import StoreError
from compiled_engine.ops.cpu.instructions import cpu_flags
from compiled_engine.ops.library import LIBRARY

_OPS = f"{LIBRARY.ns}::"

SOURCE_ROOMS = ("compile", "context", "models", "ops")
"""Folders whose files can change a graph or what a compiled piece calls."""

ENVIRONMENT_PREFIXES = (
    "AOTINDUCTOR_",
    "AOT_INDUCTOR_",
    "DNNL_",
    "ONEDNN_",
    "TORCHDYNAMO_",
    "TORCHINDUCTOR_",
    "TORCH_COMPILE_",
    "TORCH_DYNAMO_",
)
ENVIRONMENT_NAMES = ("ATEN_CPU_CAPABILITY", "CXX", "OMP_PREFIX")

ENVIRONMENT_OPT_OUT: Mapping[str, str] = {
    "TORCHINDUCTOR_CACHE_DIR": "where torch keeps its own cache",
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "whether torch reads its own cache",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "whether torch reads its own cache",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "whether torch reads its own cache",
    "TORCHINDUCTOR_COMPILE_THREADS": "how many processes compile",
    "TORCHINDUCTOR_WORKER_START": "how processes that compile are started",
    "TORCHINDUCTOR_WORKER_LOGPATH": "where processes that compile write their log",
    "TORCHINDUCTOR_WORKER_SUPPRESS_LOGGING": "what processes that compile write",
    "DNNL_VERBOSE": "what oneDNN prints",
    "ONEDNN_VERBOSE": "what oneDNN prints",
    "TORCHDYNAMO_VERBOSE": "what Dynamo prints",
}
"""Variables with one of the prefixes that cannot change a graph or a compiled piece, each with the reason."""


def source_components(root: Path | None = None) -> dict[str, str]:
    """sha256 of every source file of the rooms that make graphs, by path below ``root``, this package's folder."""
    root = root if root is not None else Path(__file__).parent.parent
    components = {}
    for room in SOURCE_ROOMS:
        for path in sorted((root / room).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h"):
                name = f"source.{path.relative_to(root).as_posix()}"
                components[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    if not components:
        raise StoreError(f"{root} holds no sources, so nothing tells which graphs belong to them: run without a store")
    return components


def schema_components() -> dict[str, str]:
    """The schema of every op of ours, as torch has it registered."""
    ours = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith(_OPS)}
    return {
        f"op.{name}": "; ".join(sorted(map(str, torch._C._jit_get_schemas_for_operator(name)))) for name in sorted(ours)
    }


def torch_components() -> dict[str, str]:
    """Version and build of torch, the version of triton, and the settings of torch that reach into compiled code."""
    return {
        "torch.version": torch.__version__,
        "torch.git": str(torch.version.git_version),
        "torch.cuda": str(torch.version.cuda),
        "torch.hip": str(torch.version.hip),
        "torch.mkldnn": str(torch.backends.mkldnn.is_available()),
        "torch.default_dtype": str(torch.get_default_dtype()),
        "torch.deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "torch.float32_matmul_precision": torch.get_float32_matmul_precision(),
        "triton.version": _triton_version(),
    }


SETTING_OPT_OUT: Mapping[str, str] = {
    "aot_inductor.metadata": "the compiler itself notes there what it has compiled",
}
"""Settings of Dynamo and Inductor that cannot change a graph, each with the reason."""


def compiler_setting_components() -> dict[str, str]:
    """Settings of Dynamo and Inductor that this process has changed; where they are not imported, none can be.

    Those that follow from environment variables enter as such.
    """
    components: dict[str, str] = {}
    for module_name in ("torch._dynamo.config", "torch._inductor.config"):
        module = sys.modules.get(module_name)
        if module is not None:
            components |= {f"{module_name}.{name}": text for name, text in _changed_settings(module)}
    return components


def _changed_settings(module: Any) -> Iterator[tuple[str, str]]:
    """Settings of a torch config module that were set to another value than they had.

    The module's own list, ``codegen_config``, also has those that were patched for a while and have their old value
    again; it serves where a release keeps its settings in another way.
    """
    unset = getattr(torch.utils._config_module, "_UNSET_SENTINEL", None)
    entries = getattr(module, "_config", {})
    if unset is None or not all(hasattr(entry, "user_override") for entry in entries.values()):
        if text := module.codegen_config():
            yield "changed", text
        return
    for name, entry in entries.items():
        value = entry.user_override.get() if isinstance(entry.user_override, ContextVar) else entry.user_override
        unchanged = entry.default if entry.env_value_default is unset else entry.env_value_default
        if value is not unset and value != unchanged and name not in SETTING_OPT_OUT:
            yield name, repr(value)


def cpu_components(cpuinfo: Path | None = None) -> dict[str, str]:
    """Architecture, the vector instructions that torch chose, and all flags: pieces are compiled for this very CPU."""
    return {
        "cpu.machine": f"{platform.system()} {platform.machine()}",
        "cpu.capability": torch.backends.cpu.get_cpu_capability(),
        "cpu.flags": " ".join(sorted(cpu_flags(cpuinfo))),
    }


def gpu_components(device: str) -> dict[str, str]:
    """Name and compute capability of the GPU that ``device`` names; nothing for the CPU, or where there is no GPU."""
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(torch.device(device))
    return {"gpu.name": properties.name, "gpu.capability": f"{properties.major}.{properties.minor}"}


def environment_components(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment variables that torch's compilers and kernels read, where they are set."""
    environment = environment if environment is not None else os.environ
    return {
        f"env.{name}": value
        for name, value in sorted(environment.items())
        if (name.startswith(ENVIRONMENT_PREFIXES) or name in ENVIRONMENT_NAMES) and name not in ENVIRONMENT_OPT_OUT
    }


def _triton_version() -> str:
    if importlib.util.find_spec("triton") is None:
        return "not installed"
    for name in ("triton", "pytorch-triton", "pytorch-triton-rocm"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"
