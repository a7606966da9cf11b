"""Plans that many tests of this room look at, made once."""

from __future__ import annotations

import pytest
import torch
from small_models import Small, TinyLlama, compiled, plan_small, small_model

from compiled_engine.compile.counters import CompileCounters
from compiled_engine.compile.pipeline import plan_model
from compiled_engine.models import build_definition, find_model
from compiled_engine.ops.cpu.build import load_kernels
from kernel_folder import KERNELS
from tiny_models import write_tiny_model


@pytest.fixture(scope="session", autouse=True)
def _kernels() -> None:
    """Packed weights are made and read by kernels."""
    load_kernels(KERNELS)


@pytest.fixture(scope="session")
def small() -> Small:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module = small_model(3)
    planned = plan_small(module)
    return Small(module, planned, compiled(planned))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny_llama"), "llama")
    definition = build_definition(find_model(str(folder)), torch.float32)
    counters = CompileCounters()
    planned = plan_model(definition.module, definition.layers, torch.device("cpu"), counters)
    return TinyLlama(folder, definition, planned, counters)
