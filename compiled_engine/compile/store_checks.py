"""Whether a part of the store is this user's alone: what lies in it is code."""

from __future__ import annotations

import os
import pwd
import shlex
import stat
from pathlib import Path

from compiled_engine.errors import StoreAccessError

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check_access(path: Path, status: os.stat_result) -> None:
    """Raise ``StoreAccessError`` unless only this user, or root, can have written ``path``. It tells how to mend it.

    ``status``: of ``path`` itself, not of what a link points to. Symbolic links are refused: wherever they lead, the
    checks of this store do not reach there.
    """
    quoted = shlex.quote(str(path))
    if stat.S_ISLNK(status.st_mode):
        raise StoreAccessError(path, f"is a symbolic link to {os.readlink(path)}", f"rm -- {quoted}")
    user, recursive = os.geteuid(), "-R " if stat.S_ISDIR(status.st_mode) else ""
    faults, commands = [], []
    # Root can change every file anyway, and may have put a bundle there for all.
    if status.st_uid not in (user, 0):
        faults.append(f"belongs to {_user_name(status.st_uid)}")
        commands.append(f"{'' if user == 0 else 'sudo '}chown {recursive}{_user_name(user)} -- {quoted}")
    if status.st_mode & _OTHERS_MAY_WRITE:
        faults.append(f"can be written by others (mode {stat.S_IMODE(status.st_mode):04o})")
        commands.append(f"chmod {recursive}go-w -- {quoted}")
    if faults:
        raise StoreAccessError(path, " and ".join(faults), " && ".join(commands))


def _user_name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
