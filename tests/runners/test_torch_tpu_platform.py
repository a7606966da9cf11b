"""torch_tpu's platform against a fake of its public interface, and a check that it uses nothing else of torch_tpu.

The fake is the least that the platform touches: a package ``torch_tpu`` to import, ``torch.tpu``, three functions of
``torch.accelerator``, and a backend "tpu". Its device is an object with the type "tpu", because torch knows that name
only after torch_tpu has given it to torch's device for private use.
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from compiled_engine.errors import ConfigError
from compiled_engine.runners import torch_tpu_platform
from compiled_engine.runners.platforms import ExecutionCounts, XlaPlatform, find_platform
from compiled_engine.runners.torch_tpu_platform import TorchTpuPlatform

# ``torch.tpu`` of torch_tpu 0.2.0, from _PUBLIC_MODULES of its public_api.py: functions and submodules.
PUBLIC_NAMES = frozenset(
    {
        "EagerMode",
        "Event",
        "Precision",
        "Stream",
        "allow_excess_precision",
        "current_device",
        "current_stream",
        "default_generators",
        "default_stream",
        "device",
        "device_count",
        "device_of",
        "eager_mode",
        "get_amp_supported_dtype",
        "get_device_name",
        "get_device_properties",
        "get_rng_state",
        "initial_seed",
        "is_available",
        "is_initialized",
        "manual_seed",
        "manual_seed_all",
        "precision",
        "set_device",
        "set_eager_mode",
        "set_rng_state",
        "set_stream",
        "stream",
        "synchronize",
        "topology_aware_mesh",
        "compiler",
        "distributed",
        "ops",
        "optimizers",
        "pallas",
        "profiler",
    }
)
# Those of them that raise for callers other than torch from torch 2.11 on and name ``torch.accelerator``'s instead.
INTERNAL_NAMES = frozenset(
    {
        "current_device",
        "current_stream",
        "device",
        "device_count",
        "get_rng_state",
        "initial_seed",
        "is_available",
        "set_device",
        "set_stream",
        "synchronize",
    }
)
TPU = SimpleNamespace(type="tpu", index=0)


class FakeAccelerator:
    """What torch.accelerator is asked, with the device it is asked about."""

    def __init__(self, device: SimpleNamespace | None) -> None:
        self.device = device
        self.synchronized: list[object] = []

    def current_accelerator(self, check_available: bool = False) -> SimpleNamespace | None:
        # Dynamo asks without the check, and knows of no accelerator here.
        return self.device if check_available else None

    def synchronize(self, device: object) -> None:
        self.synchronized.append(device)

    def get_memory_info(self, device: object) -> tuple[int, int]:
        assert device is self.device
        return 7 * 2**30, 16 * 2**30


class FakeTpu(ModuleType):
    """The module ``torch.tpu``."""

    def get_device_name(self, device: object = None) -> str:
        return "TPU v6e"


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
    """torch_tpu is there, with one TPU."""
    fake = FakeAccelerator(TPU)
    monkeypatch.setitem(sys.modules, "torch_tpu", ModuleType("torch_tpu"))
    monkeypatch.setitem(sys.modules, "torch.tpu", FakeTpu("torch.tpu"))
    for name in ("current_accelerator", "synchronize", "get_memory_info"):
        monkeypatch.setattr(torch.accelerator, name, getattr(fake, name))
    return fake


@pytest.fixture
def backend_calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """The graphs that the backend "tpu" is given to compile; it runs them as they are."""
    graphs: list[torch.fx.GraphModule] = []

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        # The sizes of a graph are fixed: none of them is an input.
        assert all(isinstance(value, torch.Tensor) for value in inputs)
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch_tpu_platform, "lookup_backend", {"tpu": compile_graph}.__getitem__)
    return graphs


def test_what_it_says_of_itself(accelerator: FakeAccelerator) -> None:
    platform: XlaPlatform = TorchTpuPlatform()
    assert (platform.name, platform.emulated, platform.description) == ("torch_tpu", False, "TPU v6e")
    assert platform.device is TPU
    assert platform.ragged_paged_attention is None
    assert "not been seen" in platform.warm_start
    assert platform.free_memory(1.0) == 7 * 2**30
    platform.wait()
    assert accelerator.synchronized == [TPU]


def test_it_is_found_where_torch_tpu_is_installed(
    accelerator: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", {"torch_tpu": object()}.get)
    assert isinstance(find_platform(), TorchTpuPlatform)


def test_every_tensor_is_moved_to_the_device(accelerator: FakeAccelerator) -> None:
    class Moved:
        def __init__(self, name: str) -> None:
            self.name = name

        def to(self, device: object) -> tuple[str, object]:
            return self.name, device

    assert TorchTpuPlatform().to_device([Moved("a"), Moved("b")]) == [("a", TPU), ("b", TPU)]  # type: ignore[list-item]


def test_graphs_are_counted_and_caches_updated_in_place(
    accelerator: FakeAccelerator, backend_calls: list[torch.fx.GraphModule]
) -> None:
    """One graph for each shape, of all functions together; another platform's graphs do not count."""
    platform, other = TorchTpuPlatform(), TorchTpuPlatform()
    cache = torch.zeros(8, 2)

    def write(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        platform.donate(cache)
        cache.index_copy_(0, slots, rows)
        return cache.sum()

    compiled = platform.compile(write)
    address = platform.buffer_address(cache)
    assert platform.counts() == ExecutionCounts(graphs=0, stray=0)
    for size, graphs in [(2, 1), (2, 1), (3, 2), (2, 2)]:
        assert compiled(torch.ones(size, 2), torch.arange(size)).item() == cache.sum().item()
        assert platform.counts() == ExecutionCounts(graphs=graphs, stray=0)
    assert platform.buffer_address(cache) == address
    assert cache[:3].eq(1).all()
    platform.compile(lambda rows: rows * 2)(torch.ones(5))
    assert platform.counts().graphs == len(backend_calls) == 3
    assert other.counts().graphs == 0


def test_a_graph_that_does_not_compile_is_not_counted(
    accelerator: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch_tpu_platform, "lookup_backend", {"tpu": refuse}.__getitem__)
    platform = TorchTpuPlatform()
    with pytest.raises(Exception, match="out of memory"):
        platform.compile(lambda rows: rows + 1)(torch.ones(2))
    assert platform.counts().graphs == 0


def test_parts_of_a_function_are_never_run_apart(
    accelerator: FakeAccelerator, backend_calls: list[torch.fx.GraphModule]
) -> None:
    def broken(rows: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return rows + 1

    with pytest.raises(torch._dynamo.exc.Unsupported):
        TorchTpuPlatform().compile(broken)(torch.ones(2))


def test_without_torch_tpu_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_tpu", None)
    with pytest.raises(ConfigError, match=r"torch_tpu cannot be imported .*pip install torch_tpu"):
        TorchTpuPlatform()


@pytest.mark.parametrize("device", [None, SimpleNamespace(type="cuda", index=0)])
def test_without_a_tpu_the_error_says_why(accelerator: FakeAccelerator, device: SimpleNamespace | None) -> None:
    accelerator.device = device
    with pytest.raises(ConfigError, match="found no TPU, or does not register itself because TORCH_DEVICE_BACKEND"):
        TorchTpuPlatform()


def names_used(source: str) -> tuple[set[str], set[str]]:
    """The modules of torch_tpu that a source imports, in any way, and the names it takes from ``torch.tpu``."""
    modules: set[str] = set()
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                modules.update(alias.name for alias in node.names)
            case ast.ImportFrom(module=str(module)):
                modules.update(f"{module}.{alias.name}" for alias in node.names)
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(module))]):
                modules.add(module)
            case ast.Attribute(value=ast.Name(id="tpu") | ast.Attribute(attr="tpu"), attr=name):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="torch_tpu"), attr=name):
                modules.add(f"torch_tpu.{name}")
            case ast.Call(func=ast.Name(id="getattr")):
                names.add("getattr")
    return {module for module in modules if module.startswith(("torch_tpu", "torch.tpu"))}, names


def test_nothing_but_the_public_interface_is_used() -> None:
    modules, names = names_used(Path(torch_tpu_platform.__file__).read_text(encoding="utf-8"))
    assert modules == {"torch_tpu", "torch.tpu"}
    assert names == {"get_device_name"}
    assert names <= PUBLIC_NAMES - INTERNAL_NAMES


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from torch_tpu._internal import sync", ({"torch_tpu._internal.sync"}, set())),
        ("import torch_tpu\ntorch_tpu._internal", ({"torch_tpu", "torch_tpu._internal"}, set())),
        ("import importlib\nimportlib.import_module('torch_tpu._loader')", ({"torch_tpu._loader"}, set())),
        ("torch.tpu._get_cache_misses()", (set(), {"_get_cache_misses"})),
        ("tpu.synchronize()", (set(), {"synchronize"})),
        ("getattr(tpu, name)", (set(), {"getattr"})),
    ],
)
def test_the_check_finds_other_uses(source: str, found: tuple[set[str], set[str]]) -> None:
    assert names_used(source) == found
