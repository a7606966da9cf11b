"""Launches the engine's Triton kernels for a target, with everything as on a GPU but the GPU.

``python launch_without_device.py TARGET FOLDER BLOCK_SIZE``: with compiled kernels from FOLDER, sampling, a prefill and
a decode of the SmolLM2 shape. Prints as JSON ``{kernel: was it found compiled}`` of all kernels that were launched.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget

from compiled_engine.ops.triton.aot import parse_target
from compiled_engine.ops.triton.attention import TritonAttention
from compiled_engine.ops.triton.kernel_cache import use_kernel_cache
from compiled_engine.ops.triton.model_variants import SMOLLM2
from compiled_engine.ops.triton.sampling import SamplingBuffers, TritonSampler

CPU = torch.device("cpu")


class IdleDriver:
    """A Triton driver that loads and launches nothing."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target
        self.launched: list[str] = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 1 << 20},
            load_binary=lambda name, binary, shared, device: (None, None, 0, 0, 1024),
        )

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *arguments: self.launched.append(metadata.name)


def sample() -> None:
    sampler = TritonSampler(SMOLLM2.vocab_size, 3, CPU)
    ints, floats = torch.zeros(3, dtype=torch.int64), torch.zeros(3)
    # What a part of a larger buffer is: not aligned.
    buffers = SamplingBuffers(floats[1:], ints[1:], floats[1:], floats, ints, ints)
    for dtype in (torch.bfloat16, torch.float32):
        for num_rows in (1, 2):
            sampler.launch(torch.zeros(num_rows, SMOLLM2.vocab_size, dtype=dtype), buffers, ints, floats[1:])


def attend(block_size: int) -> None:
    spec, dtype = SMOLLM2.layers[0], torch.bfloat16
    attention = TritonAttention([spec], dtype, CPU)
    layer = attention.for_layer(spec)
    cache_spec = spec.cache_spec(block_size, dtype)
    cache = torch.zeros(cache_spec.shape(2), dtype=dtype)
    for lengths, seq_lens in (([5, 1], [5, 8000]), ([1], [8000])):
        starts = np.cumsum([0, *lengths], dtype=np.int32)
        table = np.zeros((len(lengths), 8000 // block_size), np.int32)
        metadata = attention.build_metadata(starts, np.array(seq_lens, np.int32), table)
        query = torch.zeros(sum(lengths), spec.num_heads, spec.head_dim, dtype=dtype)
        key = torch.zeros(sum(lengths), spec.num_kv_heads, spec.head_dim, dtype=dtype)
        slots = torch.zeros(sum(lengths), dtype=torch.int64)
        layer.write_and_attend(query, key, key, torch.empty_like(query), cache, slots, metadata)


def main(target: str, folder: str, block_size: str) -> None:
    was_found: dict[str, bool] = {}

    def listen(src: Any, cache_hit: bool, **_: object) -> None:
        was_found[src.name] = cache_hit and was_found.get(src.name, True)

    use_kernel_cache(Path(folder))
    triton.knobs.compilation.listener = listen
    driver = IdleDriver(parse_target(target))
    triton.runtime.driver.set_active(driver)
    attend(int(block_size))
    sample()
    if set(driver.launched) != set(was_found):
        raise RuntimeError(f"launched {driver.launched}, but heard of {was_found}")
    print(json.dumps(was_found))


if __name__ == "__main__":
    main(*sys.argv[1:])
