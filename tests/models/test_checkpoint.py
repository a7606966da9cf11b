"""Weights arrive unchanged in their destination, and memory holds them once."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from compiled_engine.errors import WeightsError
from compiled_engine.models import checkpoint as checkpoint_module
from compiled_engine.models.checkpoint import Checkpoint

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
OTHERS = [torch.int64, torch.int8, torch.uint8, torch.bool]
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def make_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 3).to(dtype)


@given(
    specs=st.lists(st.tuples(shapes, st.sampled_from(FLOATS + OTHERS)), min_size=1, max_size=5),
    chunk_bytes=st.sampled_from([1, 7, 64, 1 << 20]),
    target=st.sampled_from([None, *FLOATS]),
)
def test_read_gives_what_was_saved(
    specs: list[tuple[tuple[int, ...], torch.dtype]], chunk_bytes: int, target: torch.dtype | None
) -> None:
    weights = {f"w{i}": make_tensor(shape, dtype, i) for i, (shape, dtype) in enumerate(specs)}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_module, "_CHUNK_BYTES", chunk_bytes)
        file = Path(folder) / "model.safetensors"
        save_file(weights, file)
        with Checkpoint([file]) as checkpoint:
            assert set(checkpoint) == set(weights)
            for name, tensor in weights.items():
                assert checkpoint[name].shape == tuple(tensor.shape)
                dtype = target if tensor.dtype.is_floating_point else None
                assert torch.equal(checkpoint.read(name, dtype), tensor.to(dtype or tensor.dtype))


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_out_may_be_any_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    monkeypatch.setattr(checkpoint_module, "_CHUNK_BYTES", chunk_bytes)
    weight = torch.randn(5, 4)
    save_file({"w": weight}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint([tmp_path / "model.safetensors"])
    merged = torch.full((9, 4), float("nan"), dtype=torch.bfloat16)
    assert checkpoint.read("w", out=merged[2:7]).data_ptr() == merged[2:7].data_ptr()
    assert torch.equal(merged[2:7], weight.bfloat16())
    assert merged[:2].isnan().all()
    assert merged[7:].isnan().all()
    transposed = torch.empty(4, 5)
    checkpoint.read("w", out=transposed.t())
    assert torch.equal(transposed, weight.t())


def test_faulty_reads_are_refused(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2, 3), "ids": torch.arange(3)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint([tmp_path / "model.safetensors"])
    with pytest.raises(WeightsError, match="no weight 'x'"):
        checkpoint.read("x")
    with pytest.raises(WeightsError, match=r"shape \(2, 3\), its destination has \(3, 2\)"):
        checkpoint.read("w", out=torch.empty(3, 2))
    with pytest.raises(WeightsError, match=r"int64 and cannot become torch\.float32"):
        checkpoint.read("ids", torch.float32)
    with pytest.raises(WeightsError, match="cannot become"):
        checkpoint.read("w", out=torch.empty(2, 3, dtype=torch.int64))


def test_two_files_with_one_name_are_refused(tmp_path: Path) -> None:
    files = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    for file in files:
        save_file({"w": torch.ones(2)}, file)
    with pytest.raises(WeightsError, match=r"'w' is both in .*1\.safetensors and in .*2\.safetensors"):
        Checkpoint(files)


def test_dtype_is_that_of_most_bytes(tmp_path: Path) -> None:
    weights = {"norm": torch.ones(64), "w": torch.ones(300, dtype=torch.bfloat16), "ids": torch.arange(1000)}
    save_file(weights, tmp_path / "model.safetensors")
    assert Checkpoint([tmp_path / "model.safetensors"]).dtype == torch.bfloat16
    save_file({"ids": torch.arange(4)}, tmp_path / "ids.safetensors")
    assert Checkpoint([tmp_path / "ids.safetensors"]).dtype is None


def test_closed_checkpoint_reads_again(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint([tmp_path / "model.safetensors"])
    assert torch.equal(checkpoint.read("w"), torch.ones(2))
    checkpoint.close()
    assert torch.equal(checkpoint.read("w"), torch.ones(2))


@pytest.mark.parametrize("chunk_bytes", [1, 7000, 1 << 20])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float64])
def test_blocks_are_widened_into_any_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, dtype: torch.dtype | None
) -> None:
    monkeypatch.setattr(checkpoint_module, "_CHUNK_BYTES", chunk_bytes)
    blocks = quantize(torch.randn(7, 96).numpy(), GGMLQuantizationType.Q5_1)
    write_blocks(tmp_path / "model.safetensors", blocks, "Q5_1")
    expected = torch.from_numpy(dequantize(blocks, GGMLQuantizationType.Q5_1))
    with Checkpoint([tmp_path / "model.safetensors"]) as checkpoint:
        assert checkpoint.dtype_of("w") == checkpoint.read("w").dtype == torch.float32
        assert torch.equal(checkpoint.read("w", dtype), expected.to(dtype or torch.float32))
        merged = torch.full((9, 96), float("nan"), dtype=dtype or torch.float32)
        checkpoint.read("w", out=merged[1:8])
    assert torch.equal(merged[1:8], expected.to(merged.dtype))
    assert merged[[0, 8]].isnan().all()


def test_blocks_are_handed_out_as_codes_and_scales(tmp_path: Path) -> None:
    blocks = quantize(torch.randn(1, 32).numpy(), GGMLQuantizationType.Q8_0)
    write_blocks(tmp_path / "model.safetensors", blocks, "Q8_0")
    with Checkpoint([tmp_path / "model.safetensors"]) as checkpoint:
        rows = checkpoint.quantized("w")
        assert checkpoint.quantized("norm") is None
        with pytest.raises(WeightsError, match="no weight 'x'"):
            checkpoint.quantized("x")
    # After the file was unmapped: nothing of it is left in what was handed out.
    assert rows is not None
    assert np.array_equal(rows.dequantize().numpy(), dequantize(blocks, GGMLQuantizationType.Q8_0))


def test_blocks_at_odd_addresses_are_read(tmp_path: Path) -> None:
    blocks = quantize(torch.randn(3, 64).numpy(), GGMLQuantizationType.Q4_0)
    file = tmp_path / "model.safetensors"
    write_blocks(file, blocks, "Q4_0")
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    file.write_bytes((length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :])
    checkpoint = Checkpoint([file])
    expected = torch.from_numpy(dequantize(blocks, GGMLQuantizationType.Q4_0))
    assert torch.equal(checkpoint.read("w"), expected)
    assert torch.equal(checkpoint.quantized("w").dequantize(), expected)
    assert torch.equal(checkpoint.read("norm"), torch.ones(16))


def test_blocks_are_floats_to_those_who_ask(tmp_path: Path) -> None:
    blocks = quantize(torch.randn(4, 64).numpy(), GGMLQuantizationType.Q4_0)
    write_blocks(tmp_path / "model.safetensors", blocks, "Q4_0")
    checkpoint = Checkpoint([tmp_path / "model.safetensors"])
    assert checkpoint.dtype == torch.float32
    assert checkpoint.num_bytes == blocks.nbytes + 64
    assert checkpoint["w"].shape == (4, 64)
    with pytest.raises(WeightsError, match=r"shape \(4, 64\), its destination has \(4, 36\)"):
        checkpoint.read("w", out=torch.empty(4, 36))
    with pytest.raises(WeightsError, match="cannot become"):
        checkpoint.read("w", out=torch.empty(4, 64, dtype=torch.uint8))


def write_blocks(file: Path, blocks: np.ndarray, type_name: str) -> None:
    tensors = {"norm": torch.ones(16), "w": torch.from_numpy(blocks)}
    save_file(tensors, file, metadata={"gguf_blocks": json.dumps({"w": type_name})})


MEASURE = """
import sys, torch
from pathlib import Path
from compiled_engine.models.checkpoint import Checkpoint

def memory(key):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(key))

checkpoint = Checkpoint([Path(sys.argv[1])])
outs = {name: torch.empty(info.shape, dtype=torch.float32) for name, info in checkpoint.items()}
checkpoint.read("small", out=outs["small"])
before = memory("VmRSS")
for name, out in outs.items():
    checkpoint.read(name, out=out)
print(memory("VmHWM") - before - sum(out.nbytes for out in outs.values()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_reading_keeps_no_second_copy(tmp_path: Path) -> None:
    weights = {f"w{i}": torch.zeros(1024, 1024 * 16, dtype=torch.bfloat16) for i in range(3)}
    save_file({**weights, "small": torch.zeros(8)}, tmp_path / "model.safetensors")
    file_size = (tmp_path / "model.safetensors").stat().st_size
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "model.safetensors")], capture_output=True, text=True, check=True
    )
    assert int(result.stdout) < 30 << 20 < file_size / 3


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_widening_keeps_no_second_copy(tmp_path: Path) -> None:
    blocks = {f"w{i}": torch.zeros(4096, 4096 // 32 * 20, dtype=torch.uint8) for i in range(3)}
    file = tmp_path / "model.safetensors"
    blocks["small"] = torch.zeros(64, 20, dtype=torch.uint8)
    save_file(blocks, file, metadata={"gguf_blocks": json.dumps(dict.fromkeys(blocks, "Q4_1"))})
    result = subprocess.run([sys.executable, "-c", MEASURE, str(file)], capture_output=True, text=True, check=True)
    # Chunks being widened and what allocators keep of them, about 20 MiB; a second copy of one weight is 64.
    assert int(result.stdout) < 44 << 20
