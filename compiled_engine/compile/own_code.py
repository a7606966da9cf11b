"""Functions that share nothing with others in the eyes of Dynamo."""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType
from typing import Any

import torch


def with_own_code(function: Any) -> Any:
    """A copy of a Python function, its closure included, with a code object of its own.

    Dynamo keeps what it compiled on the code object, so functions of one source line would see each other's graphs,
    check the guards of all of them, and share one limit of recompilations.
    """
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


def forget_compiled(functions: Iterable[Any]) -> None:
    """Let Dynamo drop what it compiled for ``functions``, which were made by ``with_own_code``.

    What it keeps on a code object is invisible to Python's garbage collector, and may hold tensors.
    """
    for function in functions:
        torch._dynamo.eval_frame.remove_from_cache(function)
