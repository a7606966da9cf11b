"""Looking over a whole store: what is in it, what is damaged, what may go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from compiled_engine.compile import store_files
from compiled_engine.compile.key import Difference
from compiled_engine.compile.store_entry import StoreLayout, read_entry, read_manifest, verify_package
from compiled_engine.compile.store_files import Damage
from compiled_engine.compile.store_manifest import Manifest
from compiled_engine.errors import StoreError


@dataclass(frozen=True)
class StoreEntry:
    """One stored plan. ``num_bytes`` counts its packages too, which other plans may share. ``created``: seconds since
    1970. ``packages``: file names in ``pieces``."""

    digest: str
    path: Path
    class_name: str
    created: int
    num_bytes: int
    packages: tuple[str, ...]
    components: Mapping[str, str]


@dataclass(frozen=True)
class Nearest:
    """The stored plan that is most like a key, and the components in which they differ."""

    entry: StoreEntry
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class VerifyReport:
    """``faults``: one sentence for each file that is not what was written. ``unused``: packages that no plan names."""

    num_entries: int
    num_packages: int
    faults: tuple[str, ...]
    unused: tuple[str, ...]


@dataclass(frozen=True)
class ClearReport:
    """What was removed."""

    num_entries: int
    num_packages: int
    num_bytes: int


def survey(layout: StoreLayout) -> tuple[StoreEntry, ...]:
    """All plans whose manifests can be read, newest first."""
    entries = []
    for digest, manifest in _manifests(layout).items():
        path, packages = layout.plans / digest, tuple(sorted(set(manifest.pieces.values())))
        num_bytes = store_files.num_bytes(path) + sum(store_files.num_bytes(layout.pieces / name) for name in packages)
        entries.append(
            StoreEntry(
                digest, path, manifest.class_name, manifest.created, num_bytes, packages, dict(manifest.components)
            )
        )
    return tuple(sorted(entries, key=lambda entry: (-entry.created, entry.digest)))


def verify(layout: StoreLayout) -> VerifyReport:
    """Read everything, change nothing."""
    faults, digests, packages = [], layout.digests(), store_files.names_in(layout.pieces)
    for name in packages:
        try:
            verify_package(layout.pieces / name)
        except Damage as damage:
            faults.append(f"pieces: {damage}")
    for digest in digests:
        try:
            read_entry(layout, digest)
        except Damage as damage:
            faults.append(f"plan {digest}: {damage}")
    faults += [
        f"plans: {name} has no place there" for name in store_files.names_in(layout.plans) if name not in digests
    ]
    return VerifyReport(len(digests), len(packages), tuple(faults), _unused(layout))


def clear(layout: StoreLayout, digest: str | None) -> ClearReport:
    """Remove the plan ``digest`` and what no other needs; None: everything. Needs the store's lock."""
    store_files.sweep(layout.scratch)
    if digest is not None and digest not in layout.digests():
        raise StoreError(f"the graph store {layout.root} has no plan {digest!r}: see what it has with `graphs list`")
    entries = [layout.plans / name for name in layout.digests() if digest in (None, name)]
    num_bytes = _discard(layout, entries)
    packages = [layout.pieces / name for name in _unused(layout)]
    num_bytes += _discard(layout, packages)
    if digest is None:
        num_bytes += _discard(
            layout,
            [
                folder / name
                for folder in (layout.plans, layout.pieces, layout.quarantine)
                for name in store_files.names_in(folder)
            ],
        )
    return ClearReport(len(entries), len(packages), num_bytes)


def _discard(layout: StoreLayout, paths: list[Path]) -> int:
    """Remove ``paths``, each at once for those who look; gives the bytes that they held."""
    num_bytes = 0
    for path in paths:
        num_bytes += store_files.num_bytes(path)
        gone = layout.scratch / store_files.new_name("cleared")
        store_files.move(path, gone)
        store_files.remove(gone)
    return num_bytes


def _unused(layout: StoreLayout) -> tuple[str, ...]:
    used = {name for manifest in _manifests(layout).values() for name in manifest.pieces.values()}
    return tuple(name for name in store_files.names_in(layout.pieces) if name not in used)


def _manifests(layout: StoreLayout) -> dict[str, Manifest]:
    manifests = {}
    for digest in layout.digests():
        try:
            manifests[digest] = read_manifest(layout, digest)
        except Damage:
            continue
    return manifests
