"""What a GPU is asked before anything is loaded, with a stand-in for torch's view of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from compiled_engine.config import EngineConfig
from compiled_engine.errors import ConfigError, StoreAccessError
from compiled_engine.runners.cuda_device import CudaDevice

GIB = 2**30


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Two GPUs, which the test may change: 80 GiB, of which 10 are in use, compute capability 7.5."""
    gpu = SimpleNamespace(name="Some GPU", major=7, minor=5, multi_processor_count=40, free=70 * GIB, total=80 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gpu.free, gpu.total))
    return gpu


def test_the_device_is_the_named_or_the_current_one(two_gpus: SimpleNamespace) -> None:
    assert CudaDevice(EngineConfig(store=False, device="cuda:0"), torch.float16).torch_device == torch.device("cuda:0")
    assert CudaDevice(EngineConfig(store=False, device="cuda"), torch.float16).torch_device == torch.device("cuda:1")
    with pytest.raises(ConfigError, match=r"device is 'cuda:2', and torch sees 2 GPU"):
        CudaDevice(EngineConfig(store=False, device="cuda:2"), torch.float16)


def test_what_it_cannot_do_is_refused_by_name(two_gpus: SimpleNamespace) -> None:
    with pytest.raises(ConfigError, match=r"Some GPU has no bfloat16: use float16 or float32"):
        CudaDevice(EngineConfig(store=False, device="cuda"), torch.bfloat16)
    with pytest.raises(ConfigError, match=r"quantization is 'int8': .* device='cpu' only"):
        CudaDevice(EngineConfig(store=False, device="cuda", quantization="int8"), torch.float16)
    two_gpus.major = 8
    CudaDevice(EngineConfig(store=False, device="cuda"), torch.bfloat16)


def test_caches_get_what_the_fraction_leaves(two_gpus: SimpleNamespace) -> None:
    device = CudaDevice(EngineConfig(store=False, device="cuda", gpu_memory_fraction=0.5), torch.float16)
    assert device.free_memory() == 30 * GIB
    assert device.default_cache_memory(30 * GIB) == 30 * GIB
    two_gpus.free = 20 * GIB
    assert device.free_memory() == 0


def test_only_long_sequences_are_worth_splitting(two_gpus: SimpleNamespace) -> None:
    device = CudaDevice(EngineConfig(store=False, device="cuda"), torch.float16)
    assert device.max_seq_len_buckets(8192) == (1024, 8192)
    assert device.max_seq_len_buckets(1000) == (1000,)


def test_kernels_are_kept_in_the_store_and_only_in_ones_own(
    two_gpus: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs = pytest.importorskip("triton.knobs", reason="Triton is not installed")
    monkeypatch.setenv("COMPILED_ENGINE_CACHE", str(tmp_path))
    with knobs.cache.scope():
        CudaDevice(EngineConfig(device="cuda"), torch.float16)
        assert knobs.cache.dir == str(tmp_path / "graphs" / "kernels" / "triton")
        (tmp_path / "graphs" / "kernels").chmod(0o777)
        with pytest.raises(StoreAccessError, match="can be written by others"):
            CudaDevice(EngineConfig(device="cuda"), torch.float16)
