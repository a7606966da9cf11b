"""The code that Inductor generated for pieces, out of the packages in a store of compiled graphs."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from compiled_engine.compile.plan import GraphPlan
from compiled_engine.compile.store_entry import StoreLayout, read_manifest, verify_package
from compiled_engine.compile.store_files import Damage
from compiled_engine.compile.store_manifest import Manifest
from compiled_engine.errors import ConfigError

_SOURCES = (".cpp", ".cu", ".py")

Sources = tuple[tuple[str, str], ...]


def generated_code(root: Path, plan: GraphPlan) -> dict[str, Sources]:
    """Of each piece of ``plan``, by key, the names and texts of its source files in the store in the folder ``root``.

    A recording does not tell which package it ran; this is the newest model in the store that has all these pieces.
    Raises ``ConfigError`` where there is none or it is damaged, and ``StoreError`` for a store that is not this user's.
    """
    keys = {piece.key for piece in plan.pieces}
    layout = StoreLayout(root.expanduser().resolve())
    found = [manifest for manifest in _manifests(layout) if keys <= set(manifest.pieces)]
    if not found:
        raise ConfigError(f"{root} has no compiled model with the recorded pieces: give the store that the run used")
    newest = max(found, key=lambda manifest: manifest.created)
    return {key: _sources(layout.pieces / newest.pieces[key]) for key in sorted(keys)}


def _manifests(layout: StoreLayout) -> Iterator[Manifest]:
    if not layout.check():
        return
    for digest in layout.digests():
        try:
            yield read_manifest(layout, digest)
        except Damage:
            # Another model's, or what an engine will set aside; it is not for a report to mend.
            continue


def _sources(package: Path) -> Sources:
    try:
        verify_package(package)
        with zipfile.ZipFile(package) as archive:
            names = sorted(name for name in archive.namelist() if name.endswith(_SOURCES))
            return tuple((PurePosixPath(name).name, archive.read(name).decode()) for name in names)
    except (Damage, OSError, zipfile.BadZipFile, ValueError) as error:
        raise ConfigError(f"{package} cannot be read ({error}): leave --graphs out") from error
