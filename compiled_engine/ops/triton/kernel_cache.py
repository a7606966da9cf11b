"""The folder in which Triton keeps compiled kernels: it may have been filled by another machine (see ``aot``)."""

from __future__ import annotations

import json
from pathlib import Path

import triton
from triton.runtime.cache import FileCacheManager


class MovableCache(FileCacheManager):
    """Triton's folder of compiled kernels, but one that may be copied or mounted elsewhere.

    Triton writes absolute paths into its index of an entry's files; here they are looked for next to the index.
    """

    def get_group(self, filename: str) -> dict[str, str] | None:
        index = self.get_file(f"__grp__{filename}")
        if index is None:
            return None
        names = json.loads(Path(index).read_text())["child_paths"]
        paths = {name: self.get_file(name) for name in names}
        # An entry that lost a file is compiled again.
        return None if None in paths.values() else paths


def use_kernel_cache(folder: Path) -> None:
    """Lets Triton take compiled kernels from ``folder`` and keep new ones there, from now on and in this process.

    Call it before the first launch. ``folder`` holds code that will run: it must be as trusted as the program.
    """
    before = triton.knobs.propagate_env
    # Else it would go into the environment, where torch's compiler and its processes would take it up.
    triton.knobs.propagate_env = False
    try:
        triton.knobs.cache.dir = str(folder)
        triton.knobs.cache.manager_class = MovableCache
    finally:
        triton.knobs.propagate_env = before
