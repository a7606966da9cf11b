"""Where graphs come from: a model on disk, its weights, and its definition with attention replaced.

The definitions are transformers' own; importing this room does not import transformers.
What cannot be honoured is refused by name here, before anything is compiled.
"""

from __future__ import annotations

from compiled_engine.models.checkpoint import Checkpoint
from compiled_engine.models.definition import ModelDefinition, build_definition
from compiled_engine.models.fingerprint import model_components
from compiled_engine.models.gguf import convert_gguf
from compiled_engine.models.limits import resolve_dtype, resolve_max_model_len
from compiled_engine.models.locate import ModelFiles, find_model
from compiled_engine.models.weights import ExpectedWeights, expected_weights, resolve_names

__all__ = [
    "Checkpoint",
    "ExpectedWeights",
    "ModelDefinition",
    "ModelFiles",
    "build_definition",
    "convert_gguf",
    "expected_weights",
    "find_model",
    "model_components",
    "resolve_dtype",
    "resolve_max_model_len",
    "resolve_names",
]
