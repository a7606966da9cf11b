"""Offline LLM inference whose graphs are captured once with torch.compile and find their KV caches through a context.

``LLM`` generates, ``SamplingParams`` says how, ``EngineConfig`` lists the settings, ``RequestOutput`` holds the
answers. Importing this package imports neither torch nor transformers; the first use of a name brings in what it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from compiled_engine.threads import limit_spinning
from compiled_engine.version import __version__

if TYPE_CHECKING:
    from compiled_engine.config import EngineConfig
    from compiled_engine.engine.outputs import CompletionOutput, RequestOutput
    from compiled_engine.engine.sampling_params import SamplingParams
    from compiled_engine.llm import LLM

__all__ = ["LLM", "CompletionOutput", "EngineConfig", "RequestOutput", "SamplingParams", "__version__"]

limit_spinning()

_HOMES = {
    "LLM": ".llm",
    "SamplingParams": ".engine.sampling_params",
    "EngineConfig": ".config",
    "RequestOutput": ".engine.outputs",
    "CompletionOutput": ".engine.outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
