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
from safetensors.torch import load_file, save_file

from compiled_engine.errors import WeightsError
from compiled_engine.models.safetensors_file import DTYPE_BYTES, NewTensor, read_header, write_safetensors


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


def write_blocks(file: Path, shape: tuple[int, ...], block_types: object, dtype: torch.dtype = torch.uint8) -> Path:
    tensors = {"norm": torch.ones(3), "w": torch.zeros(shape, dtype=dtype)}
    text = block_types if isinstance(block_types, str) else json.dumps(block_types)
    save_file(tensors, file, metadata={"format": "pt", "gguf_blocks": text})
    return file


@pytest.mark.parametrize(("type_name", "shape", "columns"), [("Q4_1", (5, 60), 96), ("Q6_K", (2, 210), 256)])
def test_blocks_have_their_type_and_logical_shape(
    tmp_path: Path, type_name: str, shape: tuple[int, int], columns: int
) -> None:
    infos = read_header(write_blocks(tmp_path / "model.safetensors", shape, {"w": type_name}))
    assert (infos["w"].dtype_name, infos["w"].shape) == (type_name, (shape[0], columns))
    assert infos["w"].end - infos["w"].start == math.prod(shape)
    assert (infos["norm"].dtype_name, infos["norm"].shape) == ("F32", (3,))


@pytest.mark.parametrize(
    ("shape", "block_types", "message"),
    [
        ((5, 60), {"w": "Q3_K"}, r"tensor 'w' in .*model\.safetensors: GGUF blocks of type 'Q3_K' are not read"),
        ((5, 61), {"w": "Q4_1"}, r"tensor 'w' in .*: a row of 61 bytes is no whole number of Q4_1 blocks \(20\)"),
        ((5, 0), {"w": "Q4_1"}, "'w' is not a uint8 matrix of Q4_1 blocks"),
        ((0, 60), {"w": "Q4_1"}, "'w' is not a uint8 matrix"),
        ((60,), {"w": "Q4_1"}, "'w' is not a uint8 matrix"),
        ((2, 5, 60), {"w": "Q4_1"}, "'w' is not a uint8 matrix"),
        ((5, 60), {"norm": "Q4_1"}, "'norm' is not a uint8 matrix"),
        ((5, 60), {"gone": "Q4_1"}, "'gone' is not a uint8 matrix"),
        ((5, 60), {"w": 3}, "does not map names to types"),
        ((5, 60), ["w"], "does not map names to types"),
        ((5, 60), "{", "is not JSON"),
        ((5, 60), "[" * 100_000, "is not JSON"),
    ],
)
def test_blocks_that_are_not_what_the_metadata_says_are_refused(
    tmp_path: Path, shape: tuple[int, ...], block_types: object, message: str
) -> None:
    file = write_blocks(tmp_path / "model.safetensors", shape, block_types)
    with pytest.raises(WeightsError, match=message):
        read_header(file)


def test_blocks_of_signed_bytes_are_refused(tmp_path: Path) -> None:
    file = write_blocks(tmp_path / "model.safetensors", (5, 60), {"w": "Q4_1"}, dtype=torch.int8)
    with pytest.raises(WeightsError, match="'w' is not a uint8 matrix"):
        read_header(file)


@pytest.mark.parametrize("metadata", [None, "text", {"gguf_blocks": 3}, {"gguf_blocks": ["w"]}])
def test_any_metadata_is_read_or_refused(tmp_path: Path, metadata: object) -> None:
    text = json.dumps({"__metadata__": metadata, "w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    file = tmp_path / "odd.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"\0")
    if isinstance(metadata, dict):
        with pytest.raises(WeightsError, match=r"odd\.safetensors"):
            read_header(file)
    else:
        assert read_header(file)["w"].dtype_name == "U8"


@given(
    shapes=st.lists(st.tuples(st.lists(st.integers(0, 4), max_size=3), st.booleans()), max_size=5),
    rows_per_chunk=st.integers(1, 3),
)
def test_written_files_are_read_by_safetensors(shapes: list[tuple[list[int], bool]], rows_per_chunk: int) -> None:
    """Whatever their order, and in however many chunks they come."""
    wanted = {
        f"w{i}ü": torch.randn(shape) if floating else torch.randint(0, 256, shape, dtype=torch.uint8)
        for i, (shape, floating) in enumerate(shapes)
    }

    def new_tensor(name: str, tensor: torch.Tensor) -> NewTensor:
        chunks = tensor.split(rows_per_chunk) if tensor.ndim else [tensor]
        dtype_name = "F32" if tensor.is_floating_point() else "U8"
        return NewTensor(name, dtype_name, tuple(tensor.shape), lambda: [chunk.numpy() for chunk in chunks])

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        write_safetensors(file, [new_tensor(*item) for item in wanted.items()], {})
        read = load_file(file)
        infos = read_header(file)
    assert read.keys() == wanted.keys() == infos.keys()
    for name, tensor in wanted.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
        assert infos[name].start % tensor.itemsize == 0


def test_a_tensor_of_another_size_than_announced_is_not_written(tmp_path: Path) -> None:
    tensor = NewTensor("w", "F32", (2, 2), lambda: [b"12345678"])
    with pytest.raises(ValueError, match="'w' has 16 bytes, 8 were given"):
        write_safetensors(tmp_path / "model.safetensors", [tensor], {})
