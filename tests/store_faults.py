"""Faults for a graph store: an operating system that fails at a chosen call, and damage to its files."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from compiled_engine.compile import store_files

CALLS = {
    "open",
    "read",
    "write",
    "fsync",
    "rename",
    "mkdir",
    "makedirs",
    "listdir",
    "lstat",
    "fstat",
    "unlink",
    "rmdir",
}


class Killed(BaseException):
    """The process is no more. Not an ``Exception``: nothing may catch it and go on."""


class FaultyOs:
    """``os`` for the store: counts the calls that reach the disk and fails at call number ``fail_at``.

    ``error`` None: the process dies there, half-way through a write, and every later call fails too but ``close``,
    which the kernel does for a dead process. Else that error number is raised, once. ``quota``: bytes that can be
    written before the disk is full.
    """

    def __init__(self, fail_at: int | None = None, error: int | None = None, quota: int | None = None) -> None:
        self.calls = self.written = 0
        self.fail_at, self.error, self.quota = fail_at, error, quota
        self.dead = False

    def __getattr__(self, name: str) -> Any:
        function = getattr(os, name)
        if name not in CALLS:
            return function

        def call(*arguments: Any, **options: Any) -> Any:
            self._count(name, arguments)
            if name == "write":
                self._fill(len(arguments[1]))
            return function(*arguments, **options)

        return call

    def _count(self, name: str, arguments: tuple[Any, ...]) -> None:
        if self.dead:
            raise Killed
        number, self.calls = self.calls, self.calls + 1
        if number != self.fail_at:
            return
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error), str(arguments[0]))
        self.dead = True
        if name == "write":
            os.write(arguments[0], arguments[1][: len(arguments[1]) // 2])
        raise Killed

    def _fill(self, amount: int) -> None:
        if self.quota is not None and self.written + amount > self.quota:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.written += amount


@contextmanager
def faulty(fake: FaultyOs) -> Iterator[FaultyOs]:
    """Let the store meet ``fake`` instead of the operating system."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_files, "os", fake)
        yield fake


def flip(path: Path, place: float, value: int) -> None:
    """Change one byte, at the fraction ``place`` of the file, by ``value`` (1 to 255)."""
    content = bytearray(path.read_bytes())
    if content:
        content[int(place * (len(content) - 1))] ^= value
        path.write_bytes(content)


def truncate(path: Path, place: float, value: int) -> None:
    """Cut the file off, somewhere before its end."""
    content = path.read_bytes()
    path.write_bytes(content[: int(place * max(len(content) - 1, 0))])


def extend(path: Path, place: float, value: int) -> None:
    """Add a byte to the file."""
    path.write_bytes(path.read_bytes() + bytes([value]))


def blank(path: Path, place: float, value: int) -> None:
    """All bytes zero, as after a power cut."""
    path.write_bytes(bytes(path.stat().st_size))


def delete(path: Path, place: float, value: int) -> None:
    """Remove the file."""
    path.unlink()


def delete_folder(path: Path, place: float, value: int) -> None:
    """Remove the folder that the file lies in, ``pieces`` or a plan's."""
    shutil.rmtree(path.parent)


def become_folder(path: Path, place: float, value: int) -> None:
    """A folder in the place of the file."""
    path.unlink()
    path.mkdir()


DAMAGES: tuple[Callable[[Path, float, int], None], ...] = (
    flip, truncate, extend, blank, delete, delete_folder, become_folder
)  # fmt: skip
