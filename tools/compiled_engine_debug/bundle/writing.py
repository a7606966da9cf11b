"""Writing a bundle."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compiled_engine_debug.bundle.archive import (
    FINDINGS,
    MODEL,
    PROMPTS,
    RECORDING,
    REGIONS,
    ArchiveWriter,
    BundleError,
    weights_part,
)
from compiled_engine_debug.bundle.lines import lines_of
from compiled_engine_debug.bundle.regions import regions_of
from compiled_engine_debug.bundle.scrub import scrub_findings, scrub_model_config
from compiled_engine_debug.findings import Finding
from compiled_engine_debug.recording import Recording

_CHUNK = 1 << 20


def write_bundle(
    path: str | Path,
    recording: Recording,
    *,
    model_config: Mapping[str, Any] | None = None,
    findings: Sequence[Finding] | None = None,
    prompts: str | None = None,
    weight_files: Sequence[Path] = (),
) -> None:
    """Write the bundle ``path``, which appears only when it is whole. The same arguments give the same bytes.

    ``model_config``: the model's config.json, which ``replay`` needs. ``findings``: of an audit. Paths and addresses
    are taken out of all of these. ``prompts`` and ``weight_files`` (safetensors) go in as they are. Raises
    ``BundleError`` where the file cannot be written, or a part is too large.
    """
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with zipfile.ZipFile(unfinished, "w") as archive:
            writer = ArchiveWriter(archive)
            _add_recording(writer, recording)
            if model_config is not None:
                writer.add(MODEL, [_json(scrub_model_config(model_config))])
            if findings is not None:
                writer.add(FINDINGS, [_json([finding.to_json() for finding in scrub_findings(findings)])])
            if prompts is not None:
                writer.add(PROMPTS, [prompts.encode()])
            for index, file in enumerate(weight_files):
                writer.add(weights_part(index), _chunks(file))
            writer.finish(recording.header.engine)
        unfinished.replace(path)
    except OSError as error:
        problem = f"it cannot be written ({error.strerror or error}): choose another file"
        raise BundleError(path, None, problem) from error
    except ValueError as error:
        raise BundleError(path, None, f"it cannot be written: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _add_recording(writer: ArchiveWriter, recording: Recording) -> None:
    regions = regions_of(recording)
    writer.add(REGIONS, [_json([asdict(region) for region in regions.regions])])
    writer.add(RECORDING, lines_of(recording, regions))


def _json(data: Any) -> bytes:
    return (json.dumps(data, indent=1) + "\n").encode()


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            yield chunk
