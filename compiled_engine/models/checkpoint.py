"""Weights on disk: names, shapes and dtypes from the headers; tensors straight into their destination.

No second copy of the model ever stays resident: a tensor is copied (and converted) from the mapped file into the
caller's memory a few megabytes at a time, and the mapped pages are given back at once. Weights in GGUF blocks are
widened on that way, or handed out as they are.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType

import torch

from compiled_engine.errors import WeightsError
from compiled_engine.models.gguf_blocks import BLOCK_FORMATS, decode_blocks
from compiled_engine.models.locate import ModelFiles
from compiled_engine.models.safetensors_file import TensorInfo, read_header
from compiled_engine.ops.quantized_rows import QuantizedRows

_CHUNK_BYTES = 8 << 20
_WIDENING_BYTES = 32
"""Memory for one number while blocks are widened: a code, and some doubles."""

_TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class Checkpoint(Mapping[str, TensorInfo]):
    """The tensors of a model's safetensors files, by name. Closing it (or leaving ``with``) unmaps the files.

    Raises ``WeightsError`` when a file is damaged or two files hold one name.
    """

    def __init__(self, files: ModelFiles | Sequence[Path]) -> None:
        paths = files.weight_files if isinstance(files, ModelFiles) else tuple(files)
        tensors: dict[str, TensorInfo] = {}
        for path in paths:
            for name, info in read_header(path).items():
                if name in tensors:
                    raise WeightsError(f"weight {name!r} is both in {tensors[name].file} and in {path}")
                tensors[name] = info
        self.files = paths
        self._tensors = MappingProxyType(tensors)
        self._maps: dict[Path, mmap.mmap] = {}

    def __getitem__(self, name: str) -> TensorInfo:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmap all files; a later ``read`` maps them again."""
        while self._maps:
            self._maps.popitem()[1].close()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(info.end - info.start for info in self.values())

    @property
    def dtype(self) -> torch.dtype | None:
        """The floating dtype that most of the stored bytes have; None when there is none."""
        sizes: dict[torch.dtype, int] = {}
        for name, info in self.items():
            dtype = self.dtype_of(name)
            if dtype.is_floating_point:
                sizes[dtype] = sizes.get(dtype, 0) + info.end - info.start
        return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else None

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype that tensor ``name`` is stored in; float32 for GGUF blocks."""
        return _stored_dtype(self[name])

    def read(self, name: str, dtype: torch.dtype | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read tensor ``name``, converted to ``dtype`` (None: as stored), or into ``out`` and its dtype.

        ``out`` may be a view (rows of a merged weight) and must have the stored shape; with ``out``, ``dtype`` is
        ignored. Only floating tensors change dtype. Raises ``WeightsError`` on an unknown name, another shape, or such
        a conversion.
        """
        info = self._info(name)
        stored = _stored_dtype(info)
        if out is None:
            out = torch.empty(info.shape, dtype=dtype or stored)
        if tuple(out.shape) != info.shape:
            raise WeightsError(f"weight {name!r} has shape {info.shape}, its destination has {tuple(out.shape)}")
        if out.dtype != stored and not (out.dtype.is_floating_point and stored.is_floating_point):
            raise WeightsError(f"weight {name!r} is stored as {stored} and cannot become {out.dtype}")
        if info.end > info.start:
            self._copy(info, out)
        return out

    def quantized(self, name: str) -> QuantizedRows | None:
        """Codes and scales of weight ``name`` where it is stored in GGUF blocks; None where it is stored as numbers.

        They are a copy, one byte per number. Raises ``WeightsError`` on an unknown name.
        """
        info = self._info(name)
        if info.dtype_name not in BLOCK_FORMATS:
            return None
        mapped = self._map(info.file)
        blocks = torch.frombuffer(mapped, dtype=torch.uint8, count=info.end - info.start, offset=info.start)
        rows = decode_blocks(info.dtype_name, _aligned(blocks, 2).view(info.shape[0], -1))
        self._give_back(mapped, info.start, info.end)
        return rows

    def _info(self, name: str) -> TensorInfo:
        if name not in self:
            raise WeightsError(f"the checkpoint has no weight {name!r} (it has {len(self)} weights)")
        return self[name]

    @torch.no_grad()
    def _copy(self, info: TensorInfo, out: torch.Tensor) -> None:
        if not info.shape:
            out = out.view(1)
        rows = out.shape[0]
        row_bytes = (info.end - info.start) // rows
        working_bytes = info.shape[1] * _WIDENING_BYTES if info.dtype_name in BLOCK_FORMATS else row_bytes
        rows_per_chunk = max(1, _CHUNK_BYTES // working_bytes)
        mapped = self._map(info.file)
        for first in range(0, rows, rows_per_chunk):
            last = min(first + rows_per_chunk, rows)
            begin, end = info.start + first * row_bytes, info.start + last * row_bytes
            view = torch.frombuffer(mapped, dtype=torch.uint8, count=end - begin, offset=begin)
            out[first:last].copy_(_numbers(info, view).view(last - first, *out.shape[1:]))
            del view
            self._give_back(mapped, begin, end)

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            try:
                with path.open("rb") as stream:
                    # A private writable mapping, because torch warns about read-only memory; nothing is ever written.
                    self._maps[path] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            except OSError as error:
                raise WeightsError(f"cannot read weights file {path}: {error.strerror or error}") from error
        return self._maps[path]

    @staticmethod
    def _give_back(mapped: mmap.mmap, begin: int, end: int) -> None:
        if hasattr(mapped, "madvise") and hasattr(mmap, "MADV_DONTNEED"):
            begin -= begin % mmap.PAGESIZE
            mapped.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _stored_dtype(info: TensorInfo) -> torch.dtype:
    return torch.float32 if info.dtype_name in BLOCK_FORMATS else _TORCH_DTYPES[info.dtype_name]


def _numbers(info: TensorInfo, raw: torch.Tensor) -> torch.Tensor:
    """The numbers of some rows of a tensor, of which ``raw`` are the bytes."""
    if info.dtype_name in BLOCK_FORMATS:
        row_bytes = (info.end - info.start) // info.shape[0]
        return decode_blocks(info.dtype_name, _aligned(raw, 2).view(-1, row_bytes)).dequantize()
    stored = _stored_dtype(info)
    return _aligned(raw, stored.itemsize).view(stored)


def _aligned(raw: torch.Tensor, itemsize: int) -> torch.Tensor:
    # A header of odd length puts tensors at odd addresses, of which there is no typed view.
    return raw.clone() if raw.data_ptr() % itemsize else raw
