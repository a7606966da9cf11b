"""What attention describes to the ahead-of-time compiler is what its steps launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from attention_steps import Request, Step, make_step
from compiled_engine.ops.attention import AttentionSpec
from compiled_engine.ops.triton import cache_write, prefill, split_kv
from compiled_engine.ops.triton.attention import attention_variants
from compiled_engine.ops.triton.variants import KernelVariant
from triton_steps import backend_for, metadata_for, slopes

NOT_SPECIALIZED = {"num_requests", "table_stride", "num_splits"}
KERNELS = [
    (cache_write, "_write_kernel"),
    (prefill, "_prefill_kernel"),
    (split_kv, "_split_kernel"),
    (split_kv, "_reduce_kernel"),
]


@dataclass
class Recorder:
    """Stands in for a kernel: notes what it is launched with, and under which of Triton's keys that would be."""

    kernel: object
    launches: list[tuple[object, ...]] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Recorder:
        assert all(isinstance(size, int) for size in grid)
        return self

    def __call__(self, *arguments: object, num_warps: int, num_stages: int, **constants: object) -> None:
        names = self.kernel.arg_names
        keys = [specialization(name, value) for name, value in zip(names, arguments, strict=False)]
        assert names[len(arguments) :] == list(constants)
        self.launches.append((keys, constants, num_warps, num_stages))


def specialization(name: str, value: object) -> object:
    """What of an argument Triton compiles for."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, int) and name not in NOT_SPECIALIZED:
        return (int, value == 1, value % 16 == 0)
    return value if isinstance(value, torch.dtype) or value is None else type(value)


def described(variant: KernelVariant) -> tuple[object, ...]:
    keys = [specialization(name, value) for name, value in variant.arguments.items()]
    return (keys, dict(variant.constants), variant.num_warps, variant.num_stages)


def launches(step: Step, alibi: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """By kernel, of one step without splits and one with."""
    recorders = [Recorder(getattr(module, name)) for module, name in KERNELS]
    for (module, name), recorder in zip(KERNELS, recorders, strict=True):
        monkeypatch.setattr(module, name, recorder)
    backend = backend_for(step)
    layer = backend.for_layer(step.spec, alibi)
    for num_splits in (1, 4):
        metadata = metadata_for(step, backend, num_splits, 0)
        arguments = (step.query, step.key, step.value, torch.empty_like(step.query), step.cache, step.slots)
        layer.write_and_attend(*arguments, metadata, step.sinks)
    assert [len(recorder.launches) for recorder in recorders] == [2, 1, 1, 1]
    return [recorder.launches[-1] for recorder in recorders]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(9, 3, 64), (32, 8, 128), (4, 1, 256), (71, 1, 80)])
@pytest.mark.parametrize("extras", [False, True])
def test_a_step_launches_what_is_described(
    heads: tuple[int, int, int], dtype: torch.dtype, extras: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    window, soft_cap = (512, 30.0) if extras else (None, None)
    spec = AttentionSpec("layer", num_heads, num_kv_heads, head_dim, 0.1, window, soft_cap)
    step = make_step(spec, [Request(3, 1), Request(40, 1)], 0, 16, dtype, seed=1, with_sinks=extras)
    variants = attention_variants(spec, spec.cache_spec(16, dtype), dtype, has_sinks=extras, has_slopes=extras)
    for variant, (_, name) in zip(variants, KERNELS, strict=True):
        assert [*variant.arguments, *variant.constants] == variant.kernel.arg_names, name
    alibi = slopes(num_heads) if extras else None
    assert [described(variant) for variant in variants] == launches(step, alibi, monkeypatch)


def test_names_tell_variants_apart() -> None:
    spec = AttentionSpec("layer", 32, 8, 128, 0.1)
    cache = spec.cache_spec(16, torch.bfloat16)
    others = [
        attention_variants(replace(spec, sliding_window=512), cache, torch.bfloat16),
        attention_variants(replace(spec, soft_cap=30.0), cache, torch.bfloat16),
        attention_variants(spec, replace(cache, block_size=32), torch.bfloat16),
        attention_variants(spec, replace(cache, page_padding=256), torch.bfloat16),
        attention_variants(spec, replace(cache, dtype=torch.float8_e4m3fn), torch.bfloat16),
        attention_variants(spec, cache, torch.bfloat16, has_sinks=True),
    ]
    prefills = {variants[1].name for variants in others}
    assert len(prefills) == len(others)
    same = attention_variants(replace(spec, layer_name="another", scale=0.2), cache, torch.bfloat16)
    assert [variant.name for variant in same] == [v.name for v in attention_variants(spec, cache, torch.bfloat16)]


def test_a_layer_that_shares_a_cache_describes_no_write() -> None:
    spec = AttentionSpec("layer", 4, 2, 64, 0.1, shares_with="other")
    variants = attention_variants(spec, spec.cache_spec(16, torch.float32), torch.float32)
    assert [variant.name.split("-")[0] for variant in variants] == [
        "attend_prefill",
        "attend_decode_split",
        "attend_decode_reduce",
    ]


COMPILE = """
import json, sys, torch
from pathlib import Path
from compiled_engine.ops.attention import AttentionSpec
from compiled_engine.ops.triton.aot import compile_variants
from compiled_engine.ops.triton.attention import attention_variants
target, folder, dtype, cache_dtype = sys.argv[1], Path(sys.argv[2]), *(getattr(torch, name) for name in sys.argv[3:])
variants = []
for head_dim in (64, 128):
    spec = AttentionSpec("layer", 32, 8, head_dim, 0.1, 512, 30.0)
    variants += attention_variants(spec, spec.cache_spec(16, cache_dtype), dtype, has_sinks=True, has_slopes=True)
compiled = compile_variants(variants, [target], folder)
print(json.dumps({result.name: result.resources.spill_bytes for result in compiled}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "dtype", "cache_dtype"),
    [
        ("sm_90", "bfloat16", "bfloat16"),
        pytest.param("sm_90", "float32", "float32", marks=pytest.mark.slow),
        pytest.param("sm_90", "float16", "float8_e4m3fn", marks=pytest.mark.slow),
        pytest.param("sm_80", "bfloat16", "bfloat16", marks=pytest.mark.slow),
        pytest.param("sm_100", "bfloat16", "bfloat16", marks=pytest.mark.slow),
        pytest.param("gfx942", "bfloat16", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_all_variants_compile_and_stay_in_the_registers_of_sm_90(
    target: str, dtype: str, cache_dtype: str, tmp_path: Path
) -> None:
    """With every extra that a layer can have. In a process of its own: in this one, kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, target, str(tmp_path), dtype, cache_dtype]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    spills = json.loads(finished.stdout)
    assert len(spills) == 8
    if target == "sm_90":
        assert set(spills.values()) == {0}, spills
