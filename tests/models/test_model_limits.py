"""Arithmetic type and longest sequence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import tiny_models
from compiled_engine.errors import ConfigError
from compiled_engine.models import limits
from compiled_engine.models.limits import cpu_has_bf16, max_positions, resolve_dtype, resolve_max_model_len
from compiled_engine.models.locate import ModelFiles


def files_of(folder: Path, dtype: torch.dtype) -> ModelFiles:
    save_file({"w": torch.ones(4, dtype=dtype)}, folder / "model.safetensors")
    return ModelFiles(folder, (folder / "model.safetensors",), "test")


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bf16", [False, True])
def test_auto_is_float32_unless_16_bits_meet_bf16_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, has_bf16: bool
) -> None:
    monkeypatch.setattr(limits, "cpu_has_bf16", lambda: has_bf16)
    expected = torch.bfloat16 if has_bf16 and stored != torch.float32 else torch.float32
    assert resolve_dtype("auto", files_of(tmp_path, stored)) == expected


def test_named_dtypes(tmp_path: Path) -> None:
    files = files_of(tmp_path, torch.float32)
    assert [resolve_dtype(name, files) for name in ("float32", "bfloat16", "float16")] == [
        torch.float32,
        torch.bfloat16,
        torch.float16,
    ]
    with pytest.raises(ConfigError, match="'int8'"):
        resolve_dtype("int8", files)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor : 0\nflags : fpu avx2 avx512_bf16\n", True),
        ("processor : 0\nflags : fpu avx2 amx_tile amx_bf16\n", True),
        ("processor : 0\nFeatures : fp asimd bf16\n", True),
        ("processor : 0\nflags : fpu avx2 avx512f\n", False),
        ("bugs : bf16\n", False),
        ("", False),
    ],
)
def test_bf16_instructions_are_read_from_cpuinfo(tmp_path: Path, text: str, expected: bool) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert cpu_has_bf16(tmp_path / "cpuinfo") is expected
    assert cpu_has_bf16(tmp_path / "none") is False


def test_longest_sequence_is_the_models_unless_less_is_asked_for() -> None:
    assert resolve_max_model_len(512, None) == 512
    assert resolve_max_model_len(512, 512) == 512
    assert resolve_max_model_len(512, 7) == 7
    with pytest.raises(ConfigError, match=r"513.*512"):
        resolve_max_model_len(512, 513)
    with pytest.raises(ConfigError, match="set max_model_len"):
        resolve_max_model_len(None, None)
    assert resolve_max_model_len(None, 99) == 99


def test_a_model_without_a_limit_or_with_one_of_zero_has_none() -> None:
    assert max_positions(SimpleNamespace(max_position_embeddings=512)) == 512
    assert max_positions(SimpleNamespace(max_position_embeddings=0)) is None
    assert max_positions(SimpleNamespace()) is None


def test_gpt2_calls_its_limit_n_positions() -> None:
    import transformers

    config = transformers.GPT2Config(n_positions=tiny_models.MAX_POSITIONS)
    assert max_positions(config) == tiny_models.MAX_POSITIONS
