"""Tests that need torch_xla. They run on its CPU device, in an environment of their own: ``make test-xla``.

Without torch_xla every test file of this folder is reported as skipped and not imported. ``make test-xla`` sets
``COMPILED_ENGINE_REQUIRE_XLA=1``, which turns that into an error, so that no skip passes for a test.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

# Read by torch_xla when it is first used.
os.environ.setdefault("PJRT_DEVICE", "CPU")

INSTALLED = importlib.util.find_spec("torch_xla") is not None
SKIP_REASON = "torch_xla is not installed: make test-xla runs these in an environment of their own"

if os.environ.get("COMPILED_ENGINE_REQUIRE_XLA") == "1":
    # Where this fails, pytest stops with an error: neither a missing nor a broken torch_xla may end in skips.
    import torch_xla  # noqa: F401


class SkippedFile(pytest.Module):
    """A test file that is not imported: its place in the report says why."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        pytest.skip(SKIP_REASON, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return None if INSTALLED else SkippedFile.from_parent(parent, path=module_path)


@pytest.fixture
def xla_device() -> torch.device:
    """The device of torch_xla, here its emulation of one on the CPU."""
    import torch_xla

    return torch_xla.device()


@pytest.fixture
def graph_count() -> Callable[[], int]:
    """Counts the compiled graphs that torch_xla keeps."""
    from torch_xla import runtime

    return runtime.get_num_cached_compilation_graph
