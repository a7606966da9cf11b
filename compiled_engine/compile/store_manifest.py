"""The manifest of a stored plan: its key's components, and a hash of every file that belongs to it.

It is read strictly and carries a hash of itself, so a changed byte anywhere is seen.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

STORE_VERSION = 1
PLAN_FILE, CONSTANTS_FILE, MANIFEST_FILE = "plan.json", "constants.safetensors", "manifest.json"

_SHA256 = re.compile(r"[0-9a-f]{64}")
_PACKAGE = re.compile(r"([0-9a-f]{64})-([0-9a-f]{16})-([0-9a-f]{64})\.pt2")


class MalformedManifest(ValueError):
    """The text is no manifest; the message says where."""


def package_name(piece: str, toolchain: str, sha256: str) -> str:
    """File name of a compiled piece: what it computes, what compiled it, and its content.

    With its content in its name, a package never changes and tells by itself whether it is whole. Compiling twice
    gives other bytes, so two processes that compile one piece at once write two files, and neither harms the other.
    """
    return f"{piece}-{toolchain[:16]}-{sha256}.pt2"


def parse_package_name(name: str) -> tuple[str, str, str] | None:
    """Piece key, toolchain and content hash of the package ``name``; None when it is none."""
    match = _PACKAGE.fullmatch(name)
    return (match[1], match[2], match[3]) if match else None


@dataclass(frozen=True)
class Manifest:
    """What ``manifest.json`` says. ``pieces`` maps piece keys to names of packages in the store's ``pieces`` folder.

    ``created``: seconds since 1970. ``plan_sha256`` and ``constants_sha256`` are of the files beside the manifest.
    """

    components: Mapping[str, str]
    class_name: str
    max_position: int | None
    weight_names: Mapping[str, str]
    created: int
    plan_sha256: str
    constants_sha256: str
    pieces: Mapping[str, str]

    def to_bytes(self) -> bytes:
        """The file's content."""
        data = {"version": STORE_VERSION, **asdict(self)}
        return _text({**data, "checksum": hashlib.sha256(_text(data)).hexdigest()})

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """Read what ``to_bytes`` wrote. Raises ``MalformedManifest`` for anything else, be it one byte."""
        try:
            data = json.loads(content.decode("ascii"))
        except (ValueError, RecursionError) as error:
            raise MalformedManifest(f"is not JSON: {error}") from None
        if not isinstance(data, dict):
            raise MalformedManifest("is no JSON object")
        if data.get("version") != STORE_VERSION:
            raise MalformedManifest(f"has version {data.get('version')!r}, this engine reads {STORE_VERSION}")
        fields = {name: _read(name, data.get(name)) for name in _READERS}
        manifest = cls(**fields)
        if manifest.to_bytes() != content:
            raise MalformedManifest("has another content than was written")
        return manifest


def _text(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=1, sort_keys=True) + "\n").encode("ascii")


def _read(name: str, value: object) -> Any:
    if not _READERS[name](value):
        raise MalformedManifest(f"has no valid {name}")
    return value


def _is_text_map(value: object) -> bool:
    return isinstance(value, dict) and all(type(item) is str for item in value.values())


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _is_package_map(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    names = {key: parse_package_name(name) if isinstance(name, str) else None for key, name in value.items()}
    return all(parsed is not None and parsed[0] == key for key, parsed in names.items())


_READERS = {
    "components": _is_text_map,
    "class_name": lambda value: type(value) is str,
    "max_position": lambda value: value is None or (type(value) is int and value > 0),
    "weight_names": _is_text_map,
    "created": lambda value: type(value) is int and value >= 0,
    "plan_sha256": _is_sha256,
    "constants_sha256": _is_sha256,
    "pieces": _is_package_map,
}
