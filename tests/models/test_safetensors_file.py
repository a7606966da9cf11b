"""Headers are read exactly, and any damage is a WeightsError that names the file."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from compiled_engine.errors import WeightsError
from compiled_engine.models.safetensors_file import DTYPE_BYTES, read_header


def write_small(folder: Path) -> Path:
    file = folder / "model.safetensors"
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.tensor(1)}, file)
    return file


def test_header_says_what_the_file_holds(tmp_path: Path) -> None:
    infos = read_header(write_small(tmp_path))
    assert {name: (info.dtype_name, info.shape, info.end - info.start) for name, info in infos.items()} == {
        "a": ("F32", (2, 3), 24),
        "b": ("BF16", (3,), 6),
        "c": ("I64", (), 8),
    }
    data = infos["a"].file.read_bytes()
    assert data[infos["a"].start : infos["a"].end] == torch.arange(6.0).numpy().tobytes()


def test_every_truncation_is_named(tmp_path: Path) -> None:
    file = write_small(tmp_path)
    data = file.read_bytes()
    for length in range(len(data)):
        file.write_bytes(data[:length])
        with pytest.raises(WeightsError, match=r"model\.safetensors"):
            read_header(file)


def test_trailing_bytes_are_refused(tmp_path: Path) -> None:
    file = write_small(tmp_path)
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(WeightsError, match="truncated or not a safetensors file"):
        read_header(file)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"gone\.safetensors"):
        read_header(tmp_path / "gone.safetensors")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 2**70) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(sorted(DTYPE_BYTES)) | json_values,
        "shape": st.lists(st.integers(0, 3), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(0, 40), min_size=2, max_size=2) | json_values,
    }
)


@given(
    header=st.dictionaries(st.text(max_size=3), entries | json_values, max_size=3) | json_values,
    size=st.integers(0, 48),
)
def test_any_json_header_is_either_read_within_bounds_or_refused(header: object, size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fuzz.safetensors"
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
        try:
            infos = read_header(file)
        except WeightsError:
            return
        for info in infos.values():
            assert 8 + len(text) <= info.start <= info.end <= file.stat().st_size
            assert info.end - info.start == math.prod(info.shape) * DTYPE_BYTES[info.dtype_name]


def test_deeply_nested_header_is_refused(tmp_path: Path) -> None:
    text = b"[" * 100_000
    file = tmp_path / "deep.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(WeightsError, match=r"deep\.safetensors"):
        read_header(file)
