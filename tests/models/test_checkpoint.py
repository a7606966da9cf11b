"""Weights arrive unchanged in their destination, and memory holds them once."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
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
    assert int(result.stdout) < 24 << 20 < file_size / 4
