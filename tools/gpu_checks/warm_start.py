"""A second start must find everything that the first one compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_checks.lab import Lab
from gpu_checks.report import Outcome, passed_if

_TOOLS = Path(__file__).parents[1]


@dataclass(frozen=True)
class _Start:
    """``seconds``: of the whole process. ``said``: see ``first_token``. ``new_files``: what it left in the store."""

    seconds: float
    said: Mapping[str, Any]
    new_files: tuple[str, ...]


def check(lab: Lab) -> Outcome:
    """Start the same script twice with one store of its own, and look at what the second one compiles."""
    folder = lab.random_llama(min(lab.sizes.layers, 2), torch.float32)
    store = lab.scratch / "warm_start"
    settings: dict[str, Any] = {
        "model": str(folder),
        "device": str(lab.device),
        "graph_mode": "full_and_piecewise",
        "piece_compiler": lab.piece_compiler,
        "dtype": "float32",
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
    }
    first = _start(store, settings)
    # Only packages are stored: the other compilers work in memory, at every start.
    second = _start(store, {**settings, "require_precompiled": lab.piece_compiler == "aoti"})
    rows = [
        {
            "start": name,
            "seconds": start.seconds,
            "first_token_after_s": start.said["seconds"],
            "triton_kernels_compiled": start.said["triton_compiled"],
            "triton_kernels_found": start.said["triton_found"],
            "new_files": len(start.new_files),
        }
        for name, start in (("first", first), ("second", second))
    ]
    faults = _faults(first, second)
    compiled = second.said["triton_compiled"]
    seen = "no file was added" if compiled is None else f"{compiled} Triton kernels were compiled, no file was added"
    summary = f"first start {first.seconds:.1f} s, second {second.seconds:.1f} s; in the second {seen}"
    figures = {"phases": {"first": first.said["phases"], "second": second.said["phases"]}}
    return passed_if(faults, summary, figures=figures, rows=rows)


def _faults(first: _Start, second: _Start) -> list[str]:
    faults = []
    if second.said["triton_compiled"]:
        faults.append(f"the second start compiled {second.said['triton_compiled']} Triton kernels")
    if second.new_files:
        faults.append(f"the second start added {len(second.new_files)} files, such as {second.new_files[0]}")
    if second.said["token_ids"] != first.said["token_ids"]:
        faults.append(f"the starts write {first.said['token_ids']} and {second.said['token_ids']}")
    return faults


def _start(store: Path, settings: Mapping[str, Any]) -> _Start:
    """Run ``first_token`` in a process whose caches are all in ``store``. Raises ``RuntimeError`` where it fails."""
    caches = {"COMPILED_ENGINE_CACHE": "engine", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    environment = {**os.environ, **{name: str(store / folder) for name, folder in caches.items()}}
    paths = [str(_TOOLS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    before = _files(store)
    begin = time.perf_counter()
    process = subprocess.run(
        [sys.executable, "-m", "gpu_checks.first_token", json.dumps(settings)],
        cwd=_TOOLS,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - begin
    if process.returncode != 0:
        raise RuntimeError(f"a start ended with {process.returncode}: {process.stderr.strip()[-1500:]}")
    return _Start(seconds, json.loads(process.stdout.splitlines()[-1]), tuple(sorted(_files(store) - before)))


def _files(folder: Path) -> set[str]:
    """What compiling leaves: files that record use are none of it."""
    kinds = (".cubin", ".hsaco", ".so", ".pt2", ".cpp", ".ptx")
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in kinds}
