"""Building the C++ kernels: once per source and instruction path, into a folder that only this user can write."""

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
from collections.abc import Sequence
from pathlib import Path

from compiled_engine.errors import ConfigError, KernelBuildError
from compiled_engine.ops.cpu.instructions import InstructionPath, runnable_paths
from compiled_engine.ops.cpu.shims import connect_torch

logger = logging.getLogger(__name__)

SOURCE_FOLDER = Path(__file__).parent
# No -ffast-math: a library linked with it changes how the whole process treats small numbers.
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fopenmp", "-fPIC")


def load_kernels(folder: Path | None, path_name: str | None = None) -> ctypes.CDLL:
    """The kernels' shared library out of ``folder``, built there first if it is missing or damaged. None: built in a
    temporary folder, which leaves nothing behind.

    ``path_name``: the instruction path (see ``INSTRUCTION_PATHS``); None: the best that this CPU runs.
    Its names are global only for None, which is what compiled pieces call. It uses the OpenMP runtime that torch has
    loaded, so import torch first. Raises ``ConfigError`` for a path that this CPU does not run, ``KernelBuildError``
    when the library must be built and there is no working C++ compiler, and for a folder or library that others could
    have written: it is code.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="compiled_engine_kernels_") as temporary:
            return load_kernels(Path(temporary), path_name)
    path = _choose(path_name)
    library = _find(folder, path)
    if library is None:
        try:
            library = _build(folder, path)
        except OSError as error:
            logger.warning(
                "the CPU kernels cannot be kept in %s (%s): they are built for this run alone", folder, error
            )
            return load_kernels(None, path_name)
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL if path_name is None else ctypes.RTLD_LOCAL)
    connect_torch(loaded)
    return loaded


def _choose(path_name: str | None) -> InstructionPath:
    paths = {path.name: path for path in runnable_paths()}
    if path_name is None:
        return next(iter(paths.values()))
    if path_name not in paths:
        raise ConfigError(f"this CPU does not run the kernels' path {path_name!r}: choose one of {', '.join(paths)}")
    return paths[path_name]


def _find(folder: Path, path: InstructionPath) -> Path | None:
    """The library for these sources and this path whose content has the hash that its name says."""
    if not folder.is_dir():
        return None
    _check_only_ours(folder)
    for library in sorted(folder.glob(f"{_key(path)}-*.so")):
        _check_only_ours(library)
        if library.stem.rpartition("-")[2] == _content_hash(library):
            return library
    return None


def _check_only_ours(path: Path) -> None:
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise KernelBuildError(f"{path} belongs to another user and holds code that would run: remove it")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise KernelBuildError(f"others can write {path}, which holds code that would run: chmod go-w '{path}'")


def _sources(suffix: str) -> list[Path]:
    return sorted(SOURCE_FOLDER.glob(f"*{suffix}"))


def _key(path: InstructionPath) -> str:
    """What the library depends on."""
    sources = [(source.name, source.read_bytes()) for source in (*_sources(".h"), *_sources(".cpp"))]
    parts = (sources, FLAGS, path.flags, platform.machine())
    return f"{path.name}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}"


def _content_hash(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()[:32]


def _build(folder: Path, path: InstructionPath) -> Path:
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise KernelBuildError(f"the C++ compiler {compiler!r} is not installed: install g++, or name one in $CXX")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_only_ours(folder)
    # Of the sources as they are now: an edit while the compiler runs must not go under the name of what it read.
    key = _key(path)
    # Built under a name of its own and moved: processes may race, and none sees half a library.
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
        objects = {source: Path(scratch) / f"{source.stem}.o" for source in _sources(".cpp")}
        _run_all(
            [
                [compiler, *FLAGS, *path.flags, "-c", str(source), "-o", str(target)]
                for source, target in objects.items()
            ]
        )
        unfinished = Path(scratch) / "kernels.so"
        _run_all([[compiler, *FLAGS, "-shared", *map(str, objects.values()), "-o", str(unfinished)]])
        unfinished.chmod(0o700)
        if _key(path) != key:
            raise KernelBuildError("the kernels' sources have changed while they were compiled: start again")
        library = folder / f"{key}-{_content_hash(unfinished)}.so"
        unfinished.replace(library)
    return library


def _run_all(commands: Sequence[Sequence[str]]) -> None:
    """Run the commands side by side. Raises ``KernelBuildError`` with the compiler's words for the first that fails."""
    running = [
        (command, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        for command in commands
    ]
    outputs = [(command, process.communicate()[0], process.returncode) for command, process in running]
    for command, output, code in outputs:
        if code:
            raise KernelBuildError(f"the CPU kernels cannot be built: {' '.join(command)}\n{output.strip()}")
