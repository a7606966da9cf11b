"""File operations of the graph store: reading with checks, writing that is whole or not there, moving, locking.

Everything that touches the disk goes through this module.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compiled_engine.compile.store_checks import check_access
from compiled_engine.errors import StoreError, StoreWriteError

LOCK_NAME = ".lock"
LOCK_SECONDS = 30.0
"""How long to wait for another process: it holds the lock for renames and checks alone, never while it compiles."""

_CHUNK_BYTES = 1 << 20


class Damage(Exception):
    """A file of the store is missing or not what was written. ``path`` is the file."""

    def __init__(self, path: Path, fault: str) -> None:
        self.path, self.fault = path, fault
        super().__init__(f"{path.name} {fault}")


def read_chunks(path: Path) -> Iterator[bytes]:
    """The bytes of the file ``path``, of this user alone and no symbolic link. Raises ``Damage`` when it is missing."""
    try:
        # Not blocking: a pipe in the place of a file must not stop us for ever.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise Damage(path, "is missing") from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            check_access(path, os.lstat(path))
        raise _cannot("read", path, error) from error
    try:
        status = os.fstat(handle)
        check_access(path, status)
        if not stat.S_ISREG(status.st_mode):
            raise Damage(path, "is no file")
        while chunk := os.read(handle, _CHUNK_BYTES):
            yield chunk
    except OSError as error:
        raise _cannot("read", path, error) from error
    finally:
        os.close(handle)


def read_verified(path: Path, sha256: str) -> bytes:
    """The content of ``path``. Raises ``Damage`` unless it has the hash ``sha256``."""
    content = b"".join(read_chunks(path))
    if hashlib.sha256(content).hexdigest() != sha256:
        raise Damage(path, "has another content than was written")
    return content


def verify_file(path: Path, sha256: str) -> None:
    """Raise ``Damage`` unless the content of ``path`` has the hash ``sha256``."""
    digest = hashlib.sha256()
    for chunk in read_chunks(path):
        digest.update(chunk)
    if digest.hexdigest() != sha256:
        raise Damage(path, "has another content than was written")


def is_folder(path: Path) -> bool:
    """Whether there is a folder ``path``, this user's alone. Raises ``Damage`` for anything else in its place."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        raise Damage(path.parent, "is no folder") from None
    except OSError as error:
        raise _cannot("read", path, error) from error
    check_access(path, status)
    if not stat.S_ISDIR(status.st_mode):
        raise Damage(path, "is no folder")
    return True


def exists(path: Path) -> bool:
    """Whether anything is at ``path``, be it a dangling link."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _cannot("read", path, error) from error
    return True


def names_in(folder: Path) -> list[str]:
    """Names in ``folder``, sorted; none when it is missing."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _cannot("read", folder, error) from error


def num_bytes(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise _cannot("read", path, error) from error
    if stat.S_ISDIR(status.st_mode):
        return sum(num_bytes(path / name) for name in names_in(path))
    return status.st_size


@contextmanager
def writing(root: Path) -> Iterator[None]:
    """Errors of the operating system inside the block become ``StoreWriteError``."""
    try:
        yield
    except OSError as error:
        raise _cannot("write", Path(error.filename) if error.filename else root, error) from error


def make_folder(path: Path) -> None:
    """Make ``path`` unless it is there. Never writable by others, whatever the umask."""
    if not is_folder(path):
        try:
            os.mkdir(path, 0o755)
        except FileExistsError:
            is_folder(path)


def make_parents(path: Path) -> None:
    """Make what ``path`` lies in."""
    os.makedirs(path.parent, exist_ok=True)


def write_file(path: Path, content: bytes) -> None:
    """Write a new file, down to the disk."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        _write_all(handle, content)
        os.fsync(handle)
    finally:
        os.close(handle)


def copy_file(source: Path, target: Path) -> str:
    """Copy ``source``, any file, to the new file ``target``, down to the disk; gives the sha256 of what was copied."""
    digest = hashlib.sha256()
    reader = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        writer = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            while chunk := os.read(reader, _CHUNK_BYTES):
                digest.update(chunk)
                _write_all(writer, chunk)
            os.fsync(writer)
        finally:
            os.close(writer)
    finally:
        os.close(reader)
    return digest.hexdigest()


def move(source: Path, target: Path) -> None:
    """Rename within the store, down to the disk."""
    os.rename(source, target)
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in ``folder`` outlive a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it. What is gone already is fine."""
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            for name in names_in(path):
                remove(path / name)
            os.rmdir(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        return


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the store's lock. The kernel gives it back when a process dies, so no killed process leaves it behind."""
    handle = os.open(root / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while not try_lock(handle):
            if time.monotonic() > deadline:
                raise StoreError(
                    f"another process has held the lock of the graph store {root} for {LOCK_SECONDS:.0f} s: end it, or "
                    "run without a store"
                )
            time.sleep(0.01)
        yield
    finally:
        os.close(handle)


@contextmanager
def scratch_folder(parent: Path, root: Path) -> Iterator[Path]:
    """A new folder in ``parent`` that is removed afterwards; if its owner is killed, ``sweep`` removes it.

    The owner keeps a lock on it, by which others see that it is alive.
    """
    with locked(root):
        folder = parent / new_name("save")
        os.mkdir(folder, 0o755)
        handle = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try_lock(handle)
    try:
        yield folder
    finally:
        try:
            remove(folder)
        finally:
            os.close(handle)


def sweep(parent: Path) -> None:
    """Remove the scratch folders in ``parent`` whose owners are dead. Call it with the store's lock held."""
    for name in names_in(parent):
        try:
            handle = os.open(parent / name / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            remove(parent / name)
            continue
        try:
            if try_lock(handle):
                remove(parent / name)
        finally:
            os.close(handle)


def try_lock(handle: int) -> bool:
    """Take the lock of an open file; False when another process holds it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def new_name(prefix: str) -> str:
    """A name that no other process picks."""
    return f"{prefix}-{secrets.token_hex(8)}"


def _write_all(handle: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(handle, view) :]


def _cannot(what: str, path: Path, error: OSError) -> StoreError:
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        hint = "give this user the right to, or set COMPILED_ENGINE_CACHE to another folder"
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free some space, or set COMPILED_ENGINE_CACHE to a folder on another disk"
    else:
        hint = "set COMPILED_ENGINE_CACHE to another folder, or run without a store"
    kind = StoreWriteError if what == "write" else StoreError
    return kind(f"cannot {what} {path} in the graph store: {error.strerror or error}. Way out: {hint}")
