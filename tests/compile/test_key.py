"""The key of stored graphs: whatever can change a graph changes it, and nothing else does."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import compiled_engine
from compiled_engine.compile import surroundings
from compiled_engine.compile.key import OPT_OUT, StoreKey, build_store_key, ops_tag
from compiled_engine.config import EngineConfig
from compiled_engine.errors import StoreError

PACKAGE = Path(compiled_engine.__file__).parent
MODEL = {"model.config.hidden_size": "64", "model.weights": "1" * 64}

OTHER_VALUES = {
    "model": "elsewhere",
    "dtype": "bfloat16",
    "max_model_len": 77,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 99,
    "block_size": 32,
    "kv_cache_memory": 12345678,
    "enable_prefix_caching": False,
    "piece_compiler": "inductor",
    "device": "cuda:1",
    "graph_mode": "full",
    "graph_sizes": (1, 3),
    "max_graph_size": 7,
    "token_buckets": (16, 48),
    "request_buckets": (4,),
    "bucket_gap": 64,
    "gpu_memory_fraction": 0.5,
    "graphs": "bundle",
    "store": False,
    "require_precompiled": True,
    "on_compile": "warn",
    "quantization": "int8",
    "record": "memory",
    "seed": 5,
    "num_threads": 3,
}
"""For every field a value that is not its default."""


def key_of(config: EngineConfig | None = None, dtype: torch.dtype = torch.float32, **options: object) -> StoreKey:
    return build_store_key(config or EngineConfig(), dtype, MODEL, **options)  # type: ignore[arg-type]


def test_every_field_of_the_config_was_decided_on() -> None:
    fields = {item.name for item in dataclasses.fields(EngineConfig)}
    assert set(OTHER_VALUES) == fields, "a field is new or gone: decide whether it can change a graph"
    assert set(OPT_OUT) <= fields
    assert all(len(reason) > 10 for reason in OPT_OUT.values())
    entered = {name.partition(".")[2] for name in key_of().components if name.startswith("engine.")}
    assert entered == fields - set(OPT_OUT) | {"dtype"}


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_a_field_changes_the_key_unless_it_is_opted_out(name: str) -> None:
    assert OTHER_VALUES[name] != getattr(EngineConfig(), name)
    changed = key_of(EngineConfig(**{name: OTHER_VALUES[name]}))  # type: ignore[arg-type]
    assert (changed == key_of()) == (name in OPT_OUT)
    assert (changed.digest == key_of().digest) == (name in OPT_OUT)
    assert [item.name for item in changed.differences(key_of().components)] == (
        [] if name in OPT_OUT else [f"engine.{name}"]
    )


def test_the_resolved_dtype_and_the_model_enter() -> None:
    assert key_of(dtype=torch.bfloat16) != key_of()
    for name in MODEL:
        assert build_store_key(EngineConfig(), torch.float32, {**MODEL, name: "other"}) != key_of()
    assert build_store_key(EngineConfig(), torch.float32, {**MODEL, "model.config.more": "1"}) != key_of()


def test_the_same_gives_the_same() -> None:
    assert key_of() == key_of()
    assert hash(key_of()) == hash(key_of())
    assert list(key_of().components) == sorted(key_of().components)


texts = st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=4)


@given(one=texts, other=texts)
def test_keys_are_equal_exactly_when_all_components_are(one: dict[str, str], other: dict[str, str]) -> None:
    keys = StoreKey(one), StoreKey(dict(reversed(other.items())))
    assert (keys[0].digest == keys[1].digest) == (one == other)
    differences = keys[0].differences(other)
    rebuilt = {**other, **{item.name: item.wanted for item in differences if item.wanted is not None}}
    for item in differences:
        assert item.stored == other.get(item.name)
        if item.wanted is None:
            del rebuilt[item.name]
    assert rebuilt == one


def test_models_share_a_toolchain_and_nothing_else_does() -> None:
    base = key_of()
    other_model = build_store_key(EngineConfig(), torch.float32, {**MODEL, "model.weights": "2" * 64, "model.a": "b"})
    assert other_model.toolchain == base.toolchain
    for name in base.components:
        changed = StoreKey({**base.components, name: "something else"})
        assert changed.digest != base.digest
        assert (changed.toolchain == base.toolchain) == name.startswith("model.")


@pytest.mark.parametrize(
    "name", ["TORCHINDUCTOR_MAX_AUTOTUNE", "TORCH_COMPILE_SOMETHING", "TORCHDYNAMO_X", "AOT_INDUCTOR_ENABLE_LTO", "CXX",
             "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"]
)  # fmt: skip
def test_variables_of_the_compilers_enter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unset = key_of(environment={})
    keys = {key_of(environment={name: value}).digest for value in ("0", "1", "")} | {unset.digest}
    assert len(keys) == 4
    monkeypatch.setenv(name, "0")
    assert key_of().components[f"env.{name}"] == "0"


@pytest.mark.parametrize("name", [*surroundings.ENVIRONMENT_OPT_OUT, "HOME", "PATH", "COMPILED_ENGINE_CACHE"])
def test_other_variables_do_not(name: str) -> None:
    assert key_of(environment={name: "1"}) == key_of(environment={})


def test_cpu_flags_enter_in_any_order(tmp_path: Path) -> None:
    files = {}
    for name, flags in {"a": "avx avx2 fma", "b": "fma avx avx2", "c": "avx avx2 fma avx512f"}.items():
        files[name] = tmp_path / name
        files[name].write_text(f"processor : 0\nflags : {flags}\n")
    keys = {name: key_of(cpuinfo=path) for name, path in files.items()}
    assert keys["a"] == keys["b"]
    assert keys["a"] != keys["c"]
    (difference,) = keys["c"].differences(keys["a"].components)
    assert (difference.name, difference.stored) == ("cpu.flags", "avx avx2 fma")


@pytest.mark.parametrize("name", ["__version__", "default_dtype", "matmul_precision", "capability", "machine"])
def test_torch_and_the_machine_enter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of()
    if name == "__version__":
        monkeypatch.setattr(torch, "__version__", "2.99.0")
    elif name == "default_dtype":
        monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    elif name == "matmul_precision":
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    elif name == "capability":
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "SVE256")
    else:
        monkeypatch.setattr(surroundings.platform, "machine", lambda: "riscv64")
    assert key_of() != before


def test_settings_that_this_process_gave_the_compilers_enter() -> None:
    import torch._dynamo.config
    import torch._inductor.config

    before = key_of()
    with torch._inductor.config.patch(epilogue_fusion=not torch._inductor.config.epilogue_fusion):
        assert key_of() != before
    with torch._dynamo.config.patch(specialize_float=not torch._dynamo.config.specialize_float):
        assert key_of() != before
    assert key_of() == before


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of this package's sources."""
    return Path(shutil.copytree(PACKAGE, tmp_path / "compiled_engine", ignore=shutil.ignore_patterns("__pycache__")))


def test_a_copy_of_the_sources_gives_the_same_key(sources: Path) -> None:
    assert key_of(source_root=sources) == key_of()


@pytest.mark.parametrize(
    "name",
    [
        "ops/attention.py",
        "ops/linear.py",
        "ops/library.py",
        "ops/cpu/attention.py",
        "compile/passes/merge_linears.py",
        "compile/passes/__init__.py",
        "compile/split.py",
        "compile/pieces.py",
        "models/definition.py",
        "models/attention_interface.py",
        "context/static_context.py",
    ],
)
def test_a_changed_source_changes_the_key_and_is_named(sources: Path, name: str) -> None:
    with (sources / name).open("a") as stream:
        stream.write("# a change\n")
    changed = key_of(source_root=sources)
    assert [item.name for item in changed.differences(key_of().components)] == [f"source.{name}"]
    assert changed.toolchain != key_of().toolchain
    assert (ops_tag(sources) != ops_tag()) == name.startswith("ops/")


def test_new_lost_and_renamed_sources_change_the_key(sources: Path) -> None:
    keys = {key_of(source_root=sources)}
    (sources / "compile" / "passes" / "another.py").write_text("")
    keys.add(key_of(source_root=sources))
    (sources / "ops" / "cpu" / "kernel.cpp").write_text("")
    keys.add(key_of(source_root=sources))
    (sources / "ops" / "linear.py").rename(sources / "ops" / "lines.py")
    keys.add(key_of(source_root=sources))
    (sources / "ops" / "lines.py").unlink()
    keys.add(key_of(source_root=sources))
    assert len(keys) == 5


def test_files_outside_the_rooms_of_graphs_do_not(sources: Path) -> None:
    (sources / "llm.py").write_text("")
    (sources / "ops" / "notes.txt").write_text("")
    assert key_of(source_root=sources) == key_of()


def test_without_sources_there_is_no_key(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no sources"):
        key_of(source_root=tmp_path)


def run_in(root: Path, program: str) -> str:
    """The output of ``program`` in a fresh process that finds the package in ``root``."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(Path(__file__).parents[1])])}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, cwd=root, check=True, capture_output=True, text=True).stdout.strip()


KEY_PROGRAM = """
import json, torch
from compiled_engine.compile.key import build_store_key, ops_tag
from compiled_engine.config import EngineConfig
key = build_store_key(EngineConfig(), torch.float32, {"model.weights": "1"})
print(json.dumps([key.digest, ops_tag(), dict(key.components)]))
"""


@pytest.mark.slow
def test_a_changed_schema_changes_key_and_tag(sources: Path) -> None:
    import json

    library = sources / "ops" / "library.py"
    before = json.loads(run_in(sources.parent, KEY_PROGRAM))
    text = library.read_text()
    assert "int activation)" in text
    library.write_text(text.replace("int activation)", "int activation, int mode=0)"))
    after = json.loads(run_in(sources.parent, KEY_PROGRAM))
    assert before[:2] != after[:2]
    assert before[0] != after[0]
    assert before[1] != after[1]
    changed = {name for name in after[2] if before[2].get(name) != after[2][name]}
    assert changed == {"op.compiled_engine::packed_linear", "source.ops/library.py"}
    assert set(before[2]) >= {"op.compiled_engine::attention", "op.compiled_engine::packed_linear"}


def test_key_and_load_import_no_compiler_and_no_transformers(tmp_path: Path) -> None:
    from compiled_engine.compile.store import GraphStore
    from store_models import make_model
    from tiny_models import write_tiny_model

    folder = write_tiny_model(tmp_path / "model")
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from compiled_engine.compile.key import build_store_key\n"
        "from compiled_engine.compile.store import GraphStore\n"
        "from compiled_engine.config import EngineConfig\n"
        "from compiled_engine.models import find_model, resolve_dtype, resolve_max_model_len\n"
        "from compiled_engine.models.fingerprint import model_components\n"
        f"files = find_model({str(folder)!r})\n"
        "dtype = resolve_dtype('auto', files)\n"
        "key = build_store_key(EngineConfig(), dtype, model_components(files))\n"
        f"loaded = GraphStore(Path({str(tmp_path / 'store')!r})).load(key)\n"
        "assert loaded is None or resolve_max_model_len(loaded.max_position, None) == 512\n"
        "print(key.digest, loaded is not None, *[m for m in ('torch._dynamo', 'torch._inductor', 'transformers') "
        "if m in sys.modules])\n"
    )
    digest, hit = run_in(PACKAGE.parent, program).split()
    assert hit == "False"

    from compiled_engine.models import find_model, resolve_dtype
    from compiled_engine.models.fingerprint import model_components

    files = find_model(str(folder))
    key = build_store_key(EngineConfig(), resolve_dtype("auto", files), model_components(files))
    assert key.digest == digest, "this process, in which compilers and transformers were used, has another key"
    GraphStore(tmp_path / "store").save(key, make_model(tmp_path / "packages"))
    assert run_in(PACKAGE.parent, program).split() == [digest, "True"]


def test_a_setting_that_was_changed_and_restored_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture changes settings of the compilers for a while; the next start in this process must find its graphs."""
    import torch._dynamo
    import torch._inductor.config

    before = key_of()
    with torch._dynamo.config.patch(specialize_float=True), torch._inductor.config.patch(deterministic=True):
        assert key_of() != before
    assert key_of() == before


def test_what_a_compiler_notes_in_its_own_settings_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTInductor writes into its settings while it compiles; the next start in this process must find its graphs."""
    import torch._inductor.config

    before = key_of()
    with torch._inductor.config.patch({"aot_inductor.metadata": {"AOTI_DEVICE_KEY": "cpu"}}):
        assert key_of() == before


def test_equal_gpus_share_graphs_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [("A", 9, 0), ("A", 9, 0), ("B", 8, 0)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(**dict(zip(("name", "major", "minor"), gpus[device.index], strict=True))),
    )
    keys = [key_of(EngineConfig(device=f"cuda:{index}")) for index in range(3)]
    assert keys[0] == keys[1]
    assert [item.name for item in keys[0].differences(keys[2].components)] == ["gpu.capability", "gpu.name"]
    assert not [name for name in key_of().components if name.startswith("gpu.")]
