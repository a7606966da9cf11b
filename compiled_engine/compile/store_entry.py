"""One stored plan on disk: where it lies, reading it with every byte checked, and setting it aside when damaged."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError

from compiled_engine.compile import store_files
from compiled_engine.compile.key import StoreKey
from compiled_engine.compile.plan import GraphPlan
from compiled_engine.compile.store_files import Damage
from compiled_engine.compile.store_manifest import (
    CONSTANTS_FILE,
    MANIFEST_FILE,
    PLAN_FILE,
    MalformedManifest,
    Manifest,
    parse_package_name,
)
from compiled_engine.errors import PlanError, StoreError

logger = logging.getLogger(__name__)

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, eq=False)
class StoredModel:
    """All that a model needs to run besides its weights.

    ``packages``: by piece key, a file each, for every piece of the plan. ``constants``: tensors that the definition
    computed and no checkpoint holds. ``weight_names``: the definition's names of weights to the checkpoint's.
    ``max_position``: as in ``ModelDefinition``. ``class_name``: of the definition, for people.
    """

    plan: GraphPlan
    packages: Mapping[str, Path]
    constants: Mapping[str, torch.Tensor]
    weight_names: Mapping[str, str]
    max_position: int | None
    class_name: str


@dataclass(frozen=True)
class StoreLayout:
    """The folders of a store: plans, one folder each; packages; what was damaged; what is being written."""

    root: Path

    @property
    def plans(self) -> Path:
        return self.root / "plans"

    @property
    def pieces(self) -> Path:
        return self.root / "pieces"

    @property
    def quarantine(self) -> Path:
        return self.root / "quarantine"

    @property
    def scratch(self) -> Path:
        return self.root / "scratch"

    def check(self) -> bool:
        """Whether there is a store. Raises ``StoreError`` when it is not this user's alone."""
        try:
            found = [store_files.is_folder(path) for path in (self.root, self.plans, self.pieces)]
        except Damage as damage:
            raise self._no_folder(damage) from None
        return found[1]

    def make(self) -> None:
        """Make the folders that are missing."""
        store_files.make_parents(self.root)
        for path in (self.root, self.plans, self.pieces, self.quarantine, self.scratch):
            try:
                store_files.make_folder(path)
            except Damage as damage:
                raise self._no_folder(damage) from None

    def digests(self) -> list[str]:
        """Of all plans that are there."""
        return [name for name in store_files.names_in(self.plans) if _DIGEST.fullmatch(name)]

    def _no_folder(self, damage: Damage) -> StoreError:
        return StoreError(f"the graph store needs a folder at {damage.path}, where something else is: move it away")


def read_manifest(layout: StoreLayout, digest: str) -> Manifest:
    """The manifest of the plan ``digest``. Raises ``Damage``."""
    folder = layout.plans / digest
    if not store_files.is_folder(folder):
        raise Damage(folder, "is missing")
    path = folder / MANIFEST_FILE
    try:
        manifest = Manifest.from_bytes(b"".join(store_files.read_chunks(path)))
    except MalformedManifest as error:
        raise Damage(path, str(error)) from None
    if StoreKey(manifest.components).digest != digest:
        raise Damage(path, "belongs to another key")
    return manifest


def read_entry(layout: StoreLayout, digest: str) -> StoredModel:
    """The plan ``digest``, every byte checked, those of its packages too. Raises ``Damage``."""
    manifest = read_manifest(layout, digest)
    plan_file, constants_file = (layout.plans / digest / name for name in (PLAN_FILE, CONSTANTS_FILE))
    plan_text = store_files.read_verified(plan_file, manifest.plan_sha256)
    constants = store_files.read_verified(constants_file, manifest.constants_sha256)
    for name in manifest.pieces.values():
        verify_package(layout.pieces / name)
    try:
        plan = GraphPlan.from_json(plan_text.decode())
    except (PlanError, UnicodeDecodeError) as error:
        raise Damage(plan_file, f"is no plan: {error}") from None
    if {piece.key for piece in plan.pieces} != set(manifest.pieces):
        raise Damage(plan_file, "has other pieces than its manifest")
    try:
        tensors = safetensors.torch.load(constants)
    except SafetensorError as error:
        raise Damage(constants_file, f"is no safetensors file: {error}") from None
    return StoredModel(
        plan=plan,
        packages={piece: layout.pieces / name for piece, name in manifest.pieces.items()},
        constants=tensors,
        weight_names=manifest.weight_names,
        max_position=manifest.max_position,
        class_name=manifest.class_name,
    )


def verify_package(path: Path) -> None:
    """Raise ``Damage`` unless the package ``path`` has the content that its name tells."""
    parsed = parse_package_name(path.name)
    if parsed is None:
        raise Damage(path, "is no package")
    store_files.verify_file(path, parsed[2])


def set_aside(layout: StoreLayout, digest: str, damage: Damage) -> None:
    """Move the damaged plan ``digest``, and all damaged packages, to quarantine. Needs the store's lock."""
    store_files.make_folder(layout.quarantine)
    paths = [layout.plans / digest] if store_files.exists(layout.plans / digest) else []
    for name in store_files.names_in(layout.pieces):
        try:
            verify_package(layout.pieces / name)
        except Damage:
            paths.append(layout.pieces / name)
    for path in paths:
        store_files.move(path, layout.quarantine / store_files.new_name(path.name[:64]))
    logger.warning("the graph store was damaged (%s): moved plan %s to %s", damage, digest[:16], layout.quarantine)
