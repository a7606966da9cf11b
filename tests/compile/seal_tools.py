"""What the tests of the seal share: functions to trace, and a look at what is tapped."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
import torch.export._trace
import torch.utils.cpp_extension

from compiled_engine.compile.taps import TAP_POINTS


def scale(x: torch.Tensor, factor: int = 2) -> torch.Tensor:
    return torch.relu(x) * factor


def fresh(backend: str = "eager", dynamic: bool | None = False) -> Callable[..., Any]:
    """A function that torch has not traced yet, nor anything else."""
    torch._dynamo.reset()
    return torch.compile(lambda x, factor=2: scale(x, factor), backend=backend, dynamic=dynamic)


def tapped_functions() -> list[Any]:
    """What stands at each tap point whose module is imported. Bound methods are equal if function and object are."""
    found = []
    for point in TAP_POINTS:
        owner: Any = sys.modules.get(point.module)
        if point.owner is not None:
            owner = getattr(owner, point.owner, None)
        found.append(getattr(owner, point.attribute, None))
    return found


@contextmanager
def torch_left_as_found() -> Iterator[None]:
    """A block that begins with nothing traced, and must leave torch's functions and Python's finders as they were."""
    torch._dynamo.reset()
    gc.collect()  # what earlier tests forgot
    before = tapped_functions()
    finders = list(sys.meta_path)
    yield
    assert tapped_functions() == before
    assert sys.meta_path == finders
