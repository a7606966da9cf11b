"""The engines that can be measured side by side, and the environments they live in.

To measure another engine, or this one with other settings, add an entry here; for a new engine, also a file in
``engines/``. Workers see that folder and no other of this project: engines look for optional packages, such as
``kernels``, and must not find a benchmark of the same name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OURS = "compiled_engine"
REFERENCE = "transformers"
THREAD_VARIABLES = ("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_")


def openmp_threads(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads)}


def vllm_variables(threads: int) -> dict[str, str]:
    """vLLM binds its worker's threads to cores itself, and asks for Intel's OpenMP, which its package brings along."""
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads])),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    openmp = ROOT / ".venv-vllm" / "lib" / "libiomp5.so"
    return variables | ({"LD_PRELOAD": str(openmp)} if openmp.exists() else {})


@dataclass(frozen=True)
class EngineEntry:
    """One engine with one set of options.

    name: what the tables call it, and what ``--engines`` takes.
    module: what opens it; ``options`` mean what that module says.
    python: the Python of its environment.
    variables: environment variables for a number of threads. Whatever else the caller's environment says about
        threads is taken out, so that every engine runs with the settings that it makes itself.
    needs_gguf: it reads GGUF files only.
    """

    name: str
    module: str
    python: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    variables: Callable[[int], dict[str, str]] = openmp_threads
    needs_gguf: bool = False

    def environment(self, threads: int) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(THREAD_VARIABLES)}
        return kept | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | self.variables(threads)


MAIN = Path(sys.executable)
VLLM = ROOT / ".venv-vllm" / "bin" / "python"
LLAMA_CPP = ROOT / ".venv-llamacpp" / "bin" / "python"

ENGINES = {
    entry.name: entry
    for entry in (
        EngineEntry(OURS, "compiled_engine_steps", MAIN),
        EngineEntry(f"{OURS}-bfloat16", "compiled_engine_steps", MAIN, {"dtype": "bfloat16"}),
        EngineEntry(REFERENCE, "transformers_generate", MAIN),
        EngineEntry("transformers-cb", "transformers_batching", MAIN),
        EngineEntry("vllm-float32", "vllm_steps", VLLM, {"dtype": "float32"}, vllm_variables),
        EngineEntry("vllm-bfloat16", "vllm_steps", VLLM, {"dtype": "bfloat16"}, vllm_variables),
        EngineEntry("llama.cpp", "llama_cpp_batches", LLAMA_CPP, needs_gguf=True),
    )
}
