"""Headers of safetensors files: what a file holds, read without touching a tensor.

The format is 8 bytes (little-endian length of the header), a JSON header that gives dtype, shape and byte range of
every tensor, then the bytes. Reading the header ourselves lets us check a file against its size before anything is
allocated, and lets the weights reader know where each tensor lies.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from compiled_engine.errors import WeightsError

DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of one element for every dtype name that we accept in a header."""

_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: ``start`` and ``end`` are byte offsets from the beginning of ``file``."""

    name: str
    dtype_name: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int


def read_header(file: Path) -> dict[str, TensorInfo]:
    """All tensors of ``file`` by name, in file order.

    Raises ``WeightsError`` that names the file when it is unreadable, truncated or not a safetensors file.
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
    header.pop("__metadata__", None)
    infos = {name: _tensor_info(file, name, entry, 8 + length, size) for name, entry in header.items()}
    end = max((info.end for info in infos.values()), default=8 + length)
    if end != size:
        raise WeightsError(_damaged(file, f"its tensors end at byte {end}, the file has {size}"))
    return infos


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
