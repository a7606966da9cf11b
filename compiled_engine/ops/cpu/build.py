"""Building the C++ kernels: once per machine, source and compiler, into a folder that only this user can write."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from compiled_engine.config import default_cache_root
from compiled_engine.errors import KernelBuildError

SOURCE = Path(__file__).with_name("kernels.cpp")
# No -ffast-math: a library linked with it changes how the whole process treats small numbers.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC")


def load_kernels(folder: Path | None = None) -> ctypes.CDLL:
    """The kernels' shared library, built if it is not in ``folder`` (default: in the user's cache).

    It uses the OpenMP runtime that torch has loaded, so import torch first. Raises ``KernelBuildError`` without
    a working C++ compiler, and for a library or folder that others could have written: it is code.
    """
    folder = folder if folder is not None else default_cache_root() / "kernels"
    library = folder / f"{_key()}.so"
    if not library.exists():
        _build(library)
    for path in (folder, library):
        check_only_ours(path)
    return ctypes.CDLL(str(library))


def check_only_ours(path: Path) -> None:
    """Raise ``KernelBuildError`` if somebody else owns ``path`` or could write it."""
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise KernelBuildError(f"{path} belongs to another user and holds code that would run: remove it")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise KernelBuildError(f"others can write {path}, which holds code that would run: chmod go-w '{path}'")


def _compiler() -> str:
    compiler = os.environ.get("CXX") or "g++"
    found = shutil.which(compiler)
    if found is None:
        raise KernelBuildError(f"the C++ compiler {compiler!r} is not installed: install g++, or name one in $CXX")
    return found


def _key() -> str:
    """What the library depends on: source, flags, compiler and processor."""
    compiler = Path(_compiler()).resolve()
    status = compiler.stat()
    parts = (SOURCE.read_bytes(), " ".join(FLAGS), str(compiler), status.st_size, status.st_mtime_ns, _processor())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _processor() -> str:
    """Architecture and instruction sets: -march=native means something else on another processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []  # not Linux: the architecture has to do
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {' '.join(sorted(flags.split()))}"


def _build(library: Path) -> None:
    library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Built under a name of its own and moved: processes may race, and none sees half a library.
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as folder:
        unfinished = Path(folder) / library.name
        command = [_compiler(), *FLAGS, str(SOURCE), "-o", str(unfinished)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise KernelBuildError(f"the CPU kernels cannot be built: {' '.join(command)}\n{result.stderr.strip()}")
        unfinished.chmod(0o700)
        unfinished.replace(library)
