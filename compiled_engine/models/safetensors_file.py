"""Headers of safetensors files: what a file holds, read without touching a tensor; and files written tensor by tensor.

The format is 8 bytes (little-endian length of the header), a JSON header that gives dtype, shape and byte range of
every tensor, then the bytes. Reading the header ourselves lets us check a file against its size before anything is
allocated, and lets the weights reader know where each tensor lies.

Weights that stay in GGUF blocks are an addition of this engine: uint8 tensors [rows, bytes_per_row], whose ggml types
stand in the header's metadata under ``gguf_blocks``, as a JSON object from name to type.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compiled_engine.errors import WeightsError
from compiled_engine.models.gguf_blocks import in_features

DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of one element for every dtype name that we accept in a header."""

_MAX_HEADER_BYTES = 100_000_000
_BLOCKS_KEY = "gguf_blocks"


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: ``start`` and ``end`` are byte offsets from the beginning of ``file``.

    For GGUF blocks ``dtype_name`` is the ggml type, such as ``"Q4_1"``, and ``shape`` is [rows, in_features].
    """

    name: str
    dtype_name: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int


def read_header(file: Path) -> dict[str, TensorInfo]:
    """All tensors of ``file`` by name, in file order.

    Raises ``WeightsError`` that names the file when it is unreadable, truncated or not a safetensors file, or when its
    GGUF blocks are not what its metadata says.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise WeightsError(_damaged(file, f"its header wants {length} bytes, the file has {size}"))
            header = json.loads(stream.read(length))
    except OSError as error:
        raise WeightsError(f"cannot read weights file {file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(_damaged(file, f"its header is not JSON ({error})")) from error
    if not isinstance(header, dict):
        raise WeightsError(_damaged(file, "its header is not a JSON object"))
    block_types = _block_types(file, header.pop("__metadata__", None))
    infos = {name: _tensor_info(file, name, entry, 8 + length, size) for name, entry in header.items()}
    end = max((info.end for info in infos.values()), default=8 + length)
    if end != size:
        raise WeightsError(_damaged(file, f"its tensors end at byte {end}, the file has {size}"))
    return infos | {name: _block_info(file, name, kind, infos.get(name)) for name, kind in block_types.items()}


@dataclass(frozen=True)
class NewTensor:
    """A tensor to write: ``dtype_name`` as in ``DTYPE_BYTES``; ``chunks()`` yields its bytes when its turn comes."""

    name: str
    dtype_name: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[Any]]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype_name]


def write_safetensors(file: Path, tensors: Iterable[NewTensor], block_types: Mapping[str, str]) -> None:
    """Write ``tensors`` to ``file``; ``block_types`` gives the ggml type of those that are GGUF blocks.

    Only one chunk is in memory at a time. Raises ``ValueError`` when the chunks of a tensor do not have its size,
    ``OSError`` when the file cannot be written.
    """
    # Wide types first: then every tensor starts at a multiple of its item size.
    ordered = sorted(tensors, key=lambda tensor: -DTYPE_BYTES[tensor.dtype_name])
    header: dict[str, object] = {"__metadata__": {"format": "pt", _BLOCKS_KEY: json.dumps(dict(block_types))}}
    start = 0
    for tensor in ordered:
        end = start + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype_name, "shape": tensor.shape, "data_offsets": (start, end)}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered:
            written = sum(stream.write(chunk) for chunk in tensor.chunks())
            if written != tensor.num_bytes:
                raise ValueError(f"tensor {tensor.name!r} has {tensor.num_bytes} bytes, {written} were given")


def _block_types(file: Path, metadata: object) -> dict[str, str]:
    text = metadata.get(_BLOCKS_KEY) if isinstance(metadata, dict) else None
    if text is None:
        return {}
    try:
        types = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise WeightsError(_damaged(file, f"its metadata {_BLOCKS_KEY!r} is not JSON")) from error
    if not isinstance(types, dict) or not all(isinstance(kind, str) for kind in types.values()):
        raise WeightsError(_damaged(file, f"its metadata {_BLOCKS_KEY!r} does not map names to types"))
    return types


def _block_info(file: Path, name: str, type_name: str, stored: TensorInfo | None) -> TensorInfo:
    if stored is None or stored.dtype_name != "U8" or len(stored.shape) != 2 or 0 in stored.shape:
        raise WeightsError(_damaged(file, f"{name!r} is not a uint8 matrix of {type_name} blocks"))
    try:
        columns = in_features(type_name, stored.shape[1])
    except WeightsError as error:
        raise WeightsError(f"tensor {name!r} in {file}: {error}") from error
    return replace(stored, dtype_name=type_name, shape=(stored.shape[0], columns))


def _tensor_info(file: Path, name: str, entry: object, base: int, size: int) -> TensorInfo:
    try:
        dtype_name, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]  # type: ignore[index]
        well_formed = all(type(n) is int and n >= 0 for n in (*shape, start, end))
    except (TypeError, KeyError, ValueError) as error:
        raise WeightsError(_damaged(file, f"the header entry of {name!r} is malformed")) from error
    if not well_formed:
        raise WeightsError(_damaged(file, f"the header entry of {name!r} is malformed"))
    if not isinstance(dtype_name, str) or dtype_name not in DTYPE_BYTES:
        raise WeightsError(f"tensor {name!r} in {file} has dtype {dtype_name!r}, which this engine does not read")
    if end - start != math.prod(shape) * DTYPE_BYTES[dtype_name]:
        raise WeightsError(_damaged(file, f"byte range and shape of {name!r} disagree"))
    if base + end > size:
        raise WeightsError(_damaged(file, f"tensor {name!r} ends at byte {base + end}, the file has {size}"))
    return TensorInfo(name, dtype_name, shape, file, base + start, base + end)


def _damaged(file: Path, detail: str) -> str:
    return f"weights file {file} is truncated or not a safetensors file: {detail}. Download or copy it again"
