"""Reading a bundle, which may come from anywhere."""

from __future__ import annotations

import json
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compiled_engine.models.safetensors_file import read_header
from compiled_engine_debug.bundle.archive import (
    FINDINGS,
    MODEL,
    PROMPTS,
    RECORDING,
    REGIONS,
    ArchiveReader,
    BundleError,
    damage_named,
    weights_part,
)
from compiled_engine_debug.bundle.lines import with_addresses
from compiled_engine_debug.bundle.regions import Region, RegionMap
from compiled_engine_debug.findings import Finding, findings_from_json
from compiled_engine_debug.recording import Recording, RecordingError, read_recording

_ZIP_START = b"PK"


@dataclass(frozen=True)
class Bundle:
    """What a bundle holds. None: it was made without.

    ``recording``: as ``read_recording`` gives it; its addresses are made up, and equal, or in one region, where the
    recorded ones were. ``model_config``: the model's config.json. ``findings``: of an audit. ``num_weight_files``: see
    ``extract_weights``.
    """

    path: Path
    recording: Recording
    model_config: Mapping[str, Any] | None
    findings: tuple[Finding, ...] | None
    prompts: str | None
    num_weight_files: int


def is_bundle(path: str | Path) -> bool:
    """Whether ``path`` is a zip file by its first bytes, and so no recording. False where it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            return file.read(len(_ZIP_START)) == _ZIP_START
    except OSError:
        return False


def read_bundle(path: str | Path) -> Bundle:
    """Read the bundle ``path``. Weights are left where they are. Raises ``BundleError`` for any other file."""
    with _opened(Path(path)) as reader:
        return Bundle(
            path=reader.path,
            recording=_recording(reader),
            model_config=_model_config(reader),
            findings=_findings(reader),
            prompts=_prompts(reader),
            num_weight_files=sum(part.startswith("weights/") for part in reader.parts),
        )


def extract_weights(bundle: Bundle, folder: Path) -> None:
    """Write the weights of ``bundle`` into ``folder`` as a model's checkpoint.

    Raises ``BundleError`` where it has none or they are damaged.
    """
    count = bundle.num_weight_files
    if count == 0:
        raise BundleError(bundle.path, None, "it has no weights: make it with --with-weights")
    names = [f"model-{index + 1:05d}-of-{count:05d}.safetensors" for index in range(count)]
    if count == 1:
        names = ["model.safetensors"]
    with _opened(bundle.path) as reader:
        for index, name in enumerate(names):
            part = weights_part(index)
            if part not in reader.parts:
                raise BundleError(bundle.path, part, "it is missing: make the bundle again")
            with (folder / name).open("wb") as file:
                file.writelines(reader.chunks(part))
    if count > 1:
        weight_map = {weight: name for name in names for weight in read_header(folder / name)}
        index_file = folder / "model.safetensors.index.json"
        index_file.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


@contextmanager
def _opened(path: Path) -> Iterator[ArchiveReader]:
    try:
        file = path.open("rb")
    except OSError as error:
        problem = f"{error.strerror or error}: give a file that `bundle` wrote"
        raise BundleError(path, None, problem) from error
    with file:
        with damage_named(path, None):
            try:
                archive = zipfile.ZipFile(file)
            except zipfile.BadZipFile as error:
                problem = f"this is no zip file, or it was cut off ({error}): give a file that `bundle` wrote"
                raise BundleError(path, None, problem) from error
        with archive:
            yield ArchiveReader(path, archive)


def _recording(reader: ArchiveReader) -> Recording:
    with damage_named(reader.path, REGIONS):
        regions = RegionMap.laid_out([Region(**item) for item in json.loads(reader.read(REGIONS))])
    reader.verify(RECORDING)
    with tempfile.TemporaryDirectory(prefix="compiled-engine-bundle-") as folder:
        file = Path(folder) / RECORDING
        with damage_named(reader.path, RECORDING), reader.open(RECORDING) as lines, file.open("wb") as out:
            out.writelines(with_addresses(lines, regions))
        try:
            return replace(read_recording(file), path=reader.path)
        except RecordingError as error:
            problem = str(error).removeprefix(str(file)).lstrip(",: ")
            raise BundleError(reader.path, RECORDING, problem) from error


def _model_config(reader: ArchiveReader) -> Mapping[str, Any] | None:
    if MODEL not in reader.parts:
        return None
    with damage_named(reader.path, MODEL):
        data = json.loads(reader.read(MODEL))
        if not isinstance(data, dict):
            raise TypeError("this is no JSON object")
        return data


def _findings(reader: ArchiveReader) -> tuple[Finding, ...] | None:
    if FINDINGS not in reader.parts:
        return None
    with damage_named(reader.path, FINDINGS):
        return findings_from_json(json.loads(reader.read(FINDINGS)))


def _prompts(reader: ArchiveReader) -> str | None:
    if PROMPTS not in reader.parts:
        return None
    with damage_named(reader.path, PROMPTS):
        return reader.read(PROMPTS).decode()
