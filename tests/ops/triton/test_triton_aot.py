"""Kernels compiled ahead of time: for all targets, found again by launches, and what they take of a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton

from compiled_engine.errors import ConfigError
from compiled_engine.ops.attention import AttentionSpec
from compiled_engine.ops.triton import resources
from compiled_engine.ops.triton.aot import compile_variants, parse_target
from compiled_engine.ops.triton.kernel_cache import MovableCache, use_kernel_cache
from compiled_engine.ops.triton.model_variants import SMOLLM2, layer_shape, model_variants, read_model_shape
from compiled_engine.ops.triton.resources import Resources, resources_of

WINDOWS = ("--window=0", "--window=512")
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
LAUNCHES = Path(__file__).with_name("launch_without_device.py")
SMOLLM2_KERNELS = {"_write_kernel", "_prefill_kernel", "_split_kernel", "_reduce_kernel", "sample_kernel"}


def run(*command: object) -> subprocess.CompletedProcess[str]:
    """A Python process that compiles kernels, where this one interprets them."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    arguments = [sys.executable, *map(str, command)]
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)


def compile_ahead(*options: object) -> list[list[str]]:
    """The cells of the command's table, without the heading."""
    result = run("-m", "compiled_engine.ops.triton.aot", *options)
    assert result.returncode == 0, result.stderr
    rows = [line.split("│")[1:-1] for line in result.stdout.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row] for row in rows]


def launch(target: str, folder: Path, block_size: int = 16) -> dict[str, bool]:
    result = run(LAUNCHES, target, folder, block_size)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    """The folder of SmolLM2's kernels for sm_90 and the table that the command printed."""
    first = tmp_path_factory.mktemp("kernels")
    table = compile_ahead("--targets", "sm_90", "--out", first)
    # As if they had come from another machine.
    folder = tmp_path_factory.mktemp("other") / "place"
    shutil.move(first / "triton", folder)
    return folder, table


@pytest.mark.slow
def test_the_table_has_all_kernels_of_the_model(smollm2: tuple[Path, list[list[str]]]) -> None:
    folder, table = smollm2
    variants = model_variants(SMOLLM2, torch.bfloat16, 16)
    assert [row[:2] for row in table] == [[variant.name, "sm_90"] for variant in variants]
    sizes = {path.stat().st_size for path in folder.rglob("*.cubin")}
    for _, _, registers, shared_bytes, spill_bytes, binary_bytes, seconds in table:
        assert 0 < int(registers) <= 255
        assert int(shared_bytes.replace(",", "")) <= 232_448
        assert spill_bytes == "0"
        assert int(binary_bytes.replace(",", "")) in sizes
        assert float(seconds) > 0


@pytest.mark.slow
def test_launches_find_everything_compiled(smollm2: tuple[Path, list[list[str]]]) -> None:
    """Real launches of real tensors in another process, in a folder that was moved; nothing is written."""
    folder, _ = smollm2
    before = files(folder)
    assert launch("sm_90", folder) == dict.fromkeys(SMOLLM2_KERNELS, True)
    assert files(folder) == before


@pytest.mark.slow
def test_other_constants_are_other_kernels(smollm2: tuple[Path, list[list[str]]], tmp_path: Path) -> None:
    folder = shutil.copytree(smollm2[0], tmp_path / "copy")
    was_found = launch("sm_90", folder, block_size=32)
    depends_on_block_size = {"_write_kernel", "_prefill_kernel", "_split_kernel"}
    assert {name for name, found in was_found.items() if not found} == depends_on_block_size
    assert len(files(folder)) > len(files(smollm2[0]))


@pytest.mark.slow
def test_what_is_there_is_not_compiled_again(smollm2: tuple[Path, list[list[str]]], tmp_path: Path) -> None:
    """But for an entry that lost its binary."""
    folder = shutil.copytree(smollm2[0], tmp_path / "triton")
    next(folder.rglob("_write_kernel.cubin")).unlink()
    table = compile_ahead("--targets", "sm_90", "--out", tmp_path)
    assert [row[0].split("-")[0] for row in table if row[-1] != "cached"] == ["write_to_cache"]
    assert launch("sm_90", folder) == dict.fromkeys(SMOLLM2_KERNELS, True)


@pytest.mark.slow
def test_heads_of_128_spill_nothing(tmp_path: Path) -> None:
    options = ("--heads=32", "--kv-heads=8", "--head-dim=128", "--vocab=1000", "--targets=sm_90")
    table = compile_ahead(*options, "--out", tmp_path)
    assert {row[4] for row in table} == {"0"}


@pytest.mark.slow
def test_all_targets_take_all_shapes(tmp_path: Path) -> None:
    """SmolLM2, and one like Gemma 3 with two kinds of layers."""
    gemma = ("--heads=4", "--kv-heads=1", "--head-dim=256", "--vocab=262144", *WINDOWS, "--soft-cap=50")
    for options in ((), gemma):
        table = compile_ahead("--targets", ",".join(TARGETS), *options, "--out", tmp_path)
        assert {row[1] for row in table} == set(TARGETS)
        assert all(int(row[2]) > 0 for row in table)
        assert len({row[0] for row in table}) * len(TARGETS) == len(table)
    folder = tmp_path / "triton"
    assert len(list(folder.rglob("*.hsaco"))) * 3 == len(list(folder.rglob("*.cubin"))) > 0
    for target in TARGETS:
        assert launch(target, folder) == dict.fromkeys(SMOLLM2_KERNELS, True)


@pytest.mark.parametrize("target", ["sm_12", "foo", "", "sm_90a"])
def test_unsupported_targets_are_refused(target: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{target}' is not supported: choose among sm_80.*gfx942"):
        parse_target(target)


@pytest.mark.slow
def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    for options, message in (
        (("--targets", "sm_90,sm_12"), "'sm_12' is not supported: choose among sm_80"),
        (("--heads", 9, "--kv-heads", 2), "9 heads, 2 KV heads"),
        (("--config", tmp_path / "none.json"), "none.json cannot be read"),
    ):
        result = run("-m", "compiled_engine.ops.triton.aot", *options, "--out", tmp_path / "out")
        assert result.returncode == 2
        assert message in result.stderr
        assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_an_interpreter_compiles_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unset"):
        compile_variants((), ("sm_90",), tmp_path)


def test_entries_may_move_and_must_be_whole(tmp_path: Path) -> None:
    with triton.knobs.cache.scope():
        use_kernel_cache(tmp_path / "old")
        cache = MovableCache("entry")
        cache.put_group("kernel.json", {name: cache.put(name, name) for name in ("kernel.json", "kernel.cubin")})
        (tmp_path / "old").rename(tmp_path / "new")
        use_kernel_cache(tmp_path / "new")
        cache, entry = MovableCache("entry"), tmp_path / "new" / "entry"
        assert cache.get_group("kernel.json") == {name: str(entry / name) for name in ("kernel.json", "kernel.cubin")}
        assert cache.get_group("other.json") is None
        (entry / "kernel.cubin").unlink()
        assert cache.get_group("kernel.json") is None


def test_resources_without_the_tool_that_tells_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoTools:
        @property
        def cuobjdump(self) -> None:
            raise RuntimeError("Cannot find cuobjdump")

    monkeypatch.setattr(resources, "triton", SimpleNamespace(knobs=SimpleNamespace(nvidia=NoTools())))
    kernel = SimpleNamespace(metadata=SimpleNamespace(shared=48), asm={"cubin": b""})
    assert resources_of(kernel) == Resources(None, 48, None)


CONFIG = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "vocab_size": 1000}


@pytest.mark.parametrize(
    ("more", "layers"),
    [
        ({}, [layer_shape(8, 2, 64)]),
        ({"num_key_value_heads": None, "head_dim": 32}, [layer_shape(8, 8, 32)]),
        ({"sliding_window": 16, "use_sliding_window": False}, [layer_shape(8, 2, 64)]),
        ({"sliding_window": 16, "layer_types": ["sliding_attention"] * 3}, [layer_shape(8, 2, 64, window=16)]),
        ({"sliding_window": 16}, [layer_shape(8, 2, 64), layer_shape(8, 2, 64, window=16)]),
        (
            {
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "attn_logit_softcapping": 50.0,
                "global_head_dim": 128,
                "num_global_key_value_heads": 1,
            },
            [layer_shape(8, 1, 128, soft_cap=50.0), layer_shape(8, 2, 64, window=16, soft_cap=50.0)],
        ),
    ],
)
def test_layers_of_a_configuration(more: dict[str, object], layers: list[AttentionSpec], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | more))
    shape = read_model_shape(path)
    assert (list(shape.layers), shape.vocab_size, shape.has_sinks) == (layers, 1000, False)
    path.write_text(json.dumps({"vocab_size": 5, "text_config": CONFIG | more}))
    assert read_model_shape(path) == shape
    path.write_text(json.dumps(CONFIG | more | {"model_type": "gpt_oss"}))
    assert read_model_shape(path).has_sinks


@pytest.mark.parametrize(
    "text", ["{", "[]", "7", json.dumps({"vocab_size": 5}), json.dumps(CONFIG | {"num_attention_heads": 0})]
)
def test_configurations_that_cannot_be_used(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError):
        read_model_shape(path)
