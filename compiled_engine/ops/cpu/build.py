"""Building the C++ kernels: once per source and processor, into a folder that only this user can write."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from compiled_engine.errors import KernelBuildError
from compiled_engine.ops.cpu.instructions import cpu_flags

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
# No -ffast-math: a library linked with it changes how the whole process treats small numbers.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC")


def load_kernels(folder: Path | None) -> ctypes.CDLL:
    """The kernels' shared library out of ``folder``, built there first if it is missing or damaged. None: built in a
    temporary folder, which leaves nothing behind.

    It uses the OpenMP runtime that torch has loaded, so import torch first. Raises ``KernelBuildError`` when it must be
    built and there is no working C++ compiler, and for a folder or library that others could have written: it is code.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="compiled_engine_kernels_") as temporary:
            return load_kernels(Path(temporary))
    library = _find(folder)
    if library is None:
        try:
            library = _build(folder)
        except OSError as error:
            logger.warning(
                "the CPU kernels cannot be kept in %s (%s): they are built for this run alone", folder, error
            )
            return load_kernels(None)
    return ctypes.CDLL(str(library))


def _find(folder: Path) -> Path | None:
    """The library for this source and processor whose content has the hash that its name says."""
    if not folder.is_dir():
        return None
    _check_only_ours(folder)
    for library in sorted(folder.glob(f"{_key()}-*.so")):
        _check_only_ours(library)
        if library.stem.partition("-")[2] == _content_hash(library):
            return library
    return None


def _check_only_ours(path: Path) -> None:
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise KernelBuildError(f"{path} belongs to another user and holds code that would run: remove it")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise KernelBuildError(f"others can write {path}, which holds code that would run: chmod go-w '{path}'")


def _key() -> str:
    """What the library depends on: -march=native means something else on another processor."""
    parts = (SOURCE.read_bytes(), FLAGS, platform.machine(), sorted(cpu_flags()))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _content_hash(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()[:32]


def _build(folder: Path) -> Path:
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise KernelBuildError(f"the C++ compiler {compiler!r} is not installed: install g++, or name one in $CXX")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_only_ours(folder)
    # Built under a name of its own and moved: processes may race, and none sees half a library.
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
        unfinished = Path(scratch) / "kernels.so"
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(unfinished)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise KernelBuildError(f"the CPU kernels cannot be built: {' '.join(command)}\n{result.stderr.strip()}")
        unfinished.chmod(0o700)
        library = folder / f"{_key()}-{_content_hash(unfinished)}.so"
        unfinished.replace(library)
    return library
