"""The zip file of a bundle: its parts, their limits, and the manifest that names and hashes them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from compiled_engine.errors import ConfigError

FORMAT = "compiled-engine bundle"
VERSION = 1

MANIFEST, RECORDING, REGIONS = "manifest.json", "recording.jsonl", "regions.json"
MODEL, FINDINGS, PROMPTS = "model.json", "findings.json", "prompts.txt"

LIMITS = {
    MANIFEST: 1 << 20,
    RECORDING: 1 << 30,
    REGIONS: 64 << 20,
    MODEL: 1 << 20,
    FINDINGS: 64 << 20,
    PROMPTS: 64 << 20,
}
"""Most bytes of each part, unpacked. Weights have no limit; they are not packed, so none can unpack to more."""

_WEIGHTS = re.compile(r"weights/\d{1,5}\.safetensors")
_CHUNK = 1 << 20
# The same parts give the same file.
_DATE = (1980, 1, 1, 0, 0, 0)


class BundleError(ConfigError):
    """A file cannot be read as a bundle, or not be written; the message names the file, the part and the way out."""

    def __init__(self, path: Path, part: str | None, problem: str) -> None:
        self.path, self.part = path, part
        super().__init__(f"{path}{'' if part is None else f', part {part}'}: {problem}")


def weights_part(index: int) -> str:
    """The name of the part for the ``index``-th file of weights."""
    return f"weights/{index}.safetensors"


@dataclass(frozen=True)
class PartEntry:
    """What the manifest says of a part. ``sha256`` in hexadecimal digits."""

    sha256: str
    num_bytes: int


class ArchiveWriter:
    """Writes parts, and the manifest of them at the end."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._entries: dict[str, PartEntry] = {}

    def add(self, part: str, chunks: Iterable[bytes]) -> None:
        """Write ``part``. Raises ``ValueError`` for one that is larger than a reader allows."""
        digest, size = hashlib.sha256(), 0
        limit = LIMITS.get(part)
        with self._archive.open(self._info(part), "w", force_zip64=limit is None) as stream:
            for chunk in chunks:
                digest.update(chunk)
                size += len(chunk)
                if limit is not None and size > limit:
                    raise ValueError(f"{part} has more than {limit} bytes")
                stream.write(chunk)
        self._entries[part] = PartEntry(digest.hexdigest(), size)

    def finish(self, engine: str) -> None:
        """Write the manifest. ``engine``: version of the engine that was recorded."""
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "engine": engine,
            "parts": {name: vars(entry) for name, entry in self._entries.items()},
        }
        self._archive.writestr(self._info(MANIFEST), json.dumps(manifest, indent=1) + "\n")

    @staticmethod
    def _info(part: str) -> zipfile.ZipInfo:
        info = zipfile.ZipInfo(part, _DATE)
        info.compress_type = zipfile.ZIP_DEFLATED if part in LIMITS else zipfile.ZIP_STORED
        return info


class ArchiveReader:
    """The parts of a zip file that is a bundle by its directory and its manifest; each part is checked when it is read.

    Nothing is unpacked by a name from the file. Raises ``BundleError``.
    """

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self.path = path
        self._archive = archive
        with damage_named(path, MANIFEST):
            self._check_directory()
            self._entries = _entries_of(path, self._read_bytes(MANIFEST))
        missing = {RECORDING, REGIONS} - set(self._entries)
        unlike = set(self._entries) ^ (set(archive.namelist()) - {MANIFEST})
        for part in sorted(missing | unlike):
            there = "is not named in the manifest" if part in archive.namelist() else "is missing"
            raise BundleError(path, part, f"it {there}: make the bundle again")

    @property
    def parts(self) -> tuple[str, ...]:
        """Their names, without the manifest."""
        return tuple(self._entries)

    def read(self, part: str) -> bytes:
        """All of ``part``."""
        self.verify(part)
        with damage_named(self.path, part):
            return self._read_bytes(part)

    def verify(self, part: str) -> None:
        """Raise ``BundleError`` unless ``part`` is what the manifest says."""
        for _ in self.chunks(part):
            pass

    def chunks(self, part: str) -> Iterator[bytes]:
        """``part`` piece by piece; raises at its end if it is not what the manifest says."""
        entry, digest, size = self._entries[part], hashlib.sha256(), 0
        with damage_named(self.path, part):
            with self._archive.open(part) as stream:
                while chunk := stream.read(_CHUNK):
                    digest.update(chunk)
                    size += len(chunk)
                    yield chunk
            if (digest.hexdigest(), size) != (entry.sha256, entry.num_bytes):
                raise ValueError("it is not what the manifest says, by its hash")

    def open(self, part: str) -> IO[bytes]:
        """``part`` as a file, to be verified before."""
        return self._archive.open(part)

    def _read_bytes(self, part: str) -> bytes:
        with self._archive.open(part) as stream:
            return stream.read()

    def _check_directory(self) -> None:
        names = [info.filename for info in self._archive.infolist()]
        if MANIFEST not in names:
            raise BundleError(self.path, MANIFEST, "it is missing: this is some other zip file, give one of `bundle`")
        for info in self._archive.infolist():
            problem = _problem_of(info)
            if names.count(info.filename) > 1:
                problem = "it is there twice"
            if problem is not None:
                raise BundleError(self.path, info.filename, f"{problem}; refused")


def _problem_of(info: zipfile.ZipInfo) -> str | None:
    """What keeps a zip file's entry from being a part."""
    limit = LIMITS.get(info.filename)
    if limit is None and not _WEIGHTS.fullmatch(info.filename):
        return "no part of a bundle has this name"
    if info.flag_bits & 1:
        return "it is encrypted"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return f"it is compressed by method {info.compress_type}, and only 0 and 8 are used"
    if limit is None and (info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size):
        return "weights must not be compressed"
    if limit is not None and info.file_size > limit:
        return f"it unpacks to {info.file_size} bytes, and at most {limit} are allowed"
    return None


def _entries_of(path: Path, text: bytes) -> dict[str, PartEntry]:
    data: Any = json.loads(text)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise BundleError(path, MANIFEST, "this is no manifest of a bundle: give a file that `bundle` wrote")
    if data.get("version") != VERSION:
        problem = f"it has version {data.get('version')!r}, this tool reads {VERSION}: use the version that wrote it"
        raise BundleError(path, MANIFEST, problem)
    return {str(name): PartEntry(**entry) for name, entry in data["parts"].items()}


@contextlib.contextmanager
def damage_named(path: Path, part: str | None) -> Iterator[None]:
    """Turn what damaged zip files and damaged JSON raise into ``BundleError``."""
    try:
        yield
    except BundleError:
        raise
    # zipfile raises what it meets: of its own, of zlib, of struct's and of codecs' kinds.
    except (
        zipfile.BadZipFile,
        zlib.error,
        OSError,
        EOFError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
        NotImplementedError,
        RuntimeError,
        OverflowError,
        MemoryError,
    ) as error:
        says = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise BundleError(path, part, f"damaged or cut off ({type(error).__name__}: {says}): copy it again") from error
