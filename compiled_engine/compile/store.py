"""The store of compiled graphs: plans and packages on disk, from which an engine starts without compiling anything.

A store is a folder that may be moved and copied; nothing in it names a path outside. Any number of processes may use it
at once. What is read is checked to the byte; what is damaged is set aside, once, and so compiled again, once.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from pathlib import Path

import safetensors.torch

from compiled_engine.compile import store_files
from compiled_engine.compile.key import StoreKey
from compiled_engine.compile.store_entry import StoredModel, StoreLayout, read_entry, set_aside, verify_package
from compiled_engine.compile.store_files import Damage
from compiled_engine.compile.store_manifest import (
    CONSTANTS_FILE,
    MANIFEST_FILE,
    PLAN_FILE,
    MalformedManifest,
    Manifest,
    package_name,
    parse_package_name,
)
from compiled_engine.compile.store_survey import ClearReport, Nearest, StoreEntry, VerifyReport, clear, survey, verify
from compiled_engine.errors import StoreDamagedError, StoreError, StoreWriteError

__all__ = [
    "ClearReport",
    "GraphStore",
    "Nearest",
    "StoreEntry",
    "StoredModel",
    "VerifyReport",
]

# Another process may set an entry aside and save it anew while this one reads it; it does not do so again and again.
_ATTEMPTS = 3


class GraphStore:
    """The store in the folder ``root``, which need not exist. Making one touches nothing.

    ``read_only``: for a bundle made elsewhere; it is never written, so damage in it is an error.
    Every method raises ``StoreAccessError``, with the command that mends it, for a store that is not this user's alone,
    and ``StoreError`` for what else is wrong with the disk.
    """

    def __init__(self, root: Path, read_only: bool = False) -> None:
        self.root = Path(root).expanduser().resolve()
        self.read_only = read_only
        self._layout = StoreLayout(self.root)

    def load(self, key: StoreKey) -> StoredModel | None:
        """What was saved under ``key``, or None. A damaged entry is set aside (a warning says so) and gives None.

        Raises ``StoreDamagedError`` for one that cannot be set aside.
        """
        for _ in range(_ATTEMPTS):
            if not self._layout.check() or not store_files.exists(self._layout.plans / key.digest):
                return None
            try:
                return read_entry(self._layout, key.digest)
            except Damage as damage:
                if self._set_aside(key.digest, damage):
                    return None
        return None

    def find_packages(self, key: StoreKey, pieces: Iterable[str]) -> dict[str, Path]:
        """Packages of any model that can stand for ``pieces`` under this key's toolchain: those need no compiling."""
        wanted, found = set(pieces), {}
        if not self._layout.check():
            return {}
        for name in store_files.names_in(self._layout.pieces):
            parsed = parse_package_name(name)
            if parsed is None or parsed[0] not in wanted or parsed[1] != key.toolchain[:16]:
                continue
            try:
                verify_package(self._layout.pieces / name)
            except Damage:
                # Left to ``load``, which knows which plan it spoils.
                continue
            found[parsed[0]] = self._layout.pieces / name
        return found

    def save(self, key: StoreKey, model: StoredModel) -> None:
        """Keep ``model`` under ``key``: whole, or (when this raises or is killed) not at all.

        Packages are copied. An entry that another process has saved meanwhile stays. Raises ``StoreWriteError`` when
        the disk is full or may not be written, ``StoreError`` for a model that is not complete.
        """
        if self.read_only:
            raise StoreWriteError(f"the graph store {self.root} is only read: save to another folder")
        _check_packages(model)
        plan, constants = model.plan.to_json().encode(), _constants_to_bytes(model)
        with store_files.writing(self.root):
            self._layout.make()
            with store_files.locked(self.root):
                store_files.sweep(self._layout.scratch)
            with store_files.scratch_folder(self._layout.scratch, self.root) as scratch:
                staged = {
                    piece: self._stage(key, piece, source, scratch / f"package-{index}")
                    for index, (piece, source) in enumerate(sorted(model.packages.items()))
                }
                names = {piece: target.name for piece, (_, target) in staged.items()}
                manifest = _manifest(key, model, plan, constants, names)
                entry = scratch / "entry"
                store_files.make_folder(entry)
                for name, content in ((PLAN_FILE, plan), (CONSTANTS_FILE, constants), (MANIFEST_FILE, manifest)):
                    store_files.write_file(entry / name, content)
                store_files.sync_folder(entry)
                with store_files.locked(self.root):
                    self._publish(key.digest, entry, list(staged.values()))

    def entries(self) -> tuple[StoreEntry, ...]:
        """All plans that are there, newest first. Damaged ones are left out: ``verify`` tells of them."""
        return survey(self._layout) if self._layout.check() else ()

    def nearest(self, key: StoreKey) -> Nearest | None:
        """The entry with most components equal to those of ``key``, and the others; None for an empty store."""
        entries = self.entries()
        if not entries:
            return None
        pairs = [(entry, key.differences(entry.components)) for entry in entries]
        entry, differences = min(pairs, key=lambda pair: len(pair[1]))
        return Nearest(entry, differences)

    def verify(self) -> VerifyReport:
        """Check every byte of everything, changing nothing."""
        return verify(self._layout) if self._layout.check() else VerifyReport(0, 0, (), ())

    def clear(self, digest: str | None = None) -> ClearReport:
        """Remove the plan ``digest`` and the packages that no other plan uses; None: all, what was set aside too.

        Only what the store itself has made is removed. Raises ``StoreError`` for an unknown digest.
        """
        if self.read_only:
            raise StoreWriteError(f"the graph store {self.root} is only read: remove the folder itself")
        if not self._layout.check():
            if digest is not None:
                raise StoreError(f"there is no graph store in {self.root}, so no plan {digest}")
            return ClearReport(0, 0, 0)
        with store_files.writing(self.root), store_files.locked(self.root):
            self._layout.make()
            return clear(self._layout, digest)

    def _set_aside(self, digest: str, damage: Damage) -> bool:
        """Whether the entry was damaged, and has been moved by this call: not by another process, nor replaced."""
        hint = f"the graph store {self.root} is damaged: {damage}"
        if self.read_only:
            raise StoreDamagedError(f"{hint}. It is only read: copy it again from where it was made")
        try:
            with store_files.writing(self.root), store_files.locked(self.root):
                if not store_files.exists(self._layout.plans / digest):
                    return False
                try:
                    read_entry(self._layout, digest)
                except Damage as still:
                    set_aside(self._layout, digest, still)
                    return True
                return False
        except StoreWriteError as error:
            raise StoreDamagedError(f"{hint}, and cannot be set aside: {error}") from error

    def _stage(self, key: StoreKey, piece: str, source: Path, copy: Path) -> tuple[Path | None, Path]:
        """Bring a package onto the store's disk; gives the copy (None: it is in the store) and its final path."""
        parsed = parse_package_name(source.name)
        if source.parent == self._layout.pieces and parsed is not None and parsed[:2] == (piece, key.toolchain[:16]):
            return None, source
        sha256 = store_files.copy_file(source, copy)
        return copy, self._layout.pieces / package_name(piece, key.toolchain, sha256)

    def _publish(self, digest: str, entry: Path, packages: Iterable[tuple[Path | None, Path]]) -> None:
        """Move packages, then the entry that names them, to where readers look. Needs the store's lock."""
        for copy, target in packages:
            try:
                verify_package(target)
            except Damage as damage:
                if copy is None:
                    raise StoreError(f"a package that was to be shared is gone: {damage}. Start again") from None
                if store_files.exists(target):
                    store_files.move(target, self._layout.quarantine / store_files.new_name("package"))
                store_files.move(copy, target)
        target = self._layout.plans / digest
        if store_files.exists(target):
            try:
                read_entry(self._layout, digest)
                return
            except Damage as damage:
                set_aside(self._layout, digest, damage)
        store_files.move(entry, target)


def _check_packages(model: StoredModel) -> None:
    wanted, given = {piece.key for piece in model.plan.pieces}, set(model.packages)
    if wanted != given:
        raise StoreError(
            f"the plan has {len(wanted)} pieces, packages were given for {len(given)} "
            f"(missing: {', '.join(sorted(wanted - given)[:4]) or 'none'}): give one for each"
        )
    if absent := [str(path) for path in model.packages.values() if not path.is_file()]:
        raise StoreError(f"these packages are not there any more: {', '.join(absent[:4])}. Compile them again")


def _constants_to_bytes(model: StoredModel) -> bytes:
    # Copies, because safetensors refuses tensors that share memory.
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.constants.items()}
    if "__metadata__" in tensors:
        raise StoreError("a constant is called __metadata__, which a safetensors file cannot hold: rename the buffer")
    return safetensors.torch.save(tensors)


def _manifest(key: StoreKey, model: StoredModel, plan: bytes, constants: bytes, pieces: dict[str, str]) -> bytes:
    manifest = Manifest(
        components=dict(key.components),
        class_name=model.class_name,
        max_position=model.max_position,
        weight_names=dict(model.weight_names),
        created=int(time.time()),
        plan_sha256=hashlib.sha256(plan).hexdigest(),
        constants_sha256=hashlib.sha256(constants).hexdigest(),
        pieces=pieces,
    )
    content = manifest.to_bytes()
    try:
        Manifest.from_bytes(content)
    except MalformedManifest as error:
        raise StoreError(f"this model cannot be stored: its manifest {error}") from None
    return content
