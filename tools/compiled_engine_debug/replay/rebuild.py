"""What a replay runs on: a model of the recorded shapes, and the recorded settings as far as they can be had here."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compiled_engine.compile.records import ModelRecord
from compiled_engine.config import EngineConfig
from compiled_engine.errors import ConfigError
from compiled_engine.models import ModelFiles
from compiled_engine.models.support import load_config
from compiled_engine.runners.memory import available_memory
from compiled_engine_debug.bundle import Bundle, extract_weights

LARGEST_CACHE = 256 << 20
"""Bytes. An audit reads every cache slot twice in every step, so a recorded cache that is larger is made this large."""

# A model is built, written, and read again into the form that kernels want.
_COPIES = 3


@dataclass(frozen=True)
class Rebuilt:
    """The settings of a replay, and what in it is not as it was recorded."""

    config: EngineConfig
    notes: tuple[str, ...]


def rebuild(bundle: Bundle, folder: Path, overrides: Mapping[str, Any], seed: int = 0) -> Rebuilt:
    """Write the model of ``bundle`` into ``folder``, with random weights if it has none; choose the settings.

    ``overrides``: settings that replace recorded ones. Raises ``ConfigError`` for a bundle that cannot be replayed, and
    what the model's config makes ``models`` raise.
    """
    model = bundle.recording.header.model
    if model is None:
        raise ConfigError(f"{bundle.path}: the engine that was recorded did not start, so there is nothing to replay")
    if bundle.model_config is None:
        raise ConfigError(f"{bundle.path}: it has no model config, which a replay needs: make it with --model")
    config = make_config(bundle, model, folder, overrides)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(bundle.model_config), encoding="utf-8")
    if bundle.num_weight_files:
        extract_weights(bundle, folder)
        return config
    write_random_weights(folder, model, seed)
    return dataclasses.replace(config, notes=("weights are random", *config.notes))


def make_config(bundle: Bundle, model: ModelRecord, folder: Path, overrides: Mapping[str, Any]) -> Rebuilt:
    """The recorded settings for the model in ``folder``, and what had to differ."""
    header, notes = bundle.recording.header, []
    known = {item.name for item in dataclasses.fields(EngineConfig)}
    settings = {name: value for name, value in header.config.items() if name in known}
    if unknown := sorted(set(header.config) - known):
        notes.append(f"settings that are not known here are left out: {', '.join(unknown)}")
    settings |= {
        "model": str(folder),
        "dtype": model.dtype,
        "record": None,
        "graphs": None,
        "require_precompiled": False,
    }
    settings |= _memory(bundle, notes)
    if "device" not in overrides:
        settings |= _device(EngineConfig(**settings), notes)
    return Rebuilt(EngineConfig(**{**settings, **overrides}), tuple(notes))


def write_random_weights(folder: Path, model: ModelRecord, seed: int) -> None:
    """Give the config.json in ``folder`` weights in the recorded dtype. Raises ``ConfigError`` if memory lacks."""
    from transformers import AutoModelForCausalLM

    config = load_config(ModelFiles(folder, (), "of the bundle"))
    if config.vocab_size != model.vocab_size:
        raise ConfigError(f"the bundle's model config has {config.vocab_size} tokens, its recording {model.vocab_size}")
    dtype = getattr(torch, model.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"the recorded dtype {model.dtype!r} is not known here")
    with torch.device("meta"):
        sizes = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    num_bytes, free = sum(tensor.nbytes for tensor in sizes.parameters()), available_memory()
    if _COPIES * num_bytes > free:
        raise ConfigError(f"the model has {num_bytes} bytes of weights, and {free} bytes of memory are free: too few")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False).save_pretrained(folder)


def _memory(bundle: Bundle, notes: list[str]) -> dict[str, Any]:
    recorded = sum(cache.num_bytes for cache in bundle.recording.caches if cache.shares_with is None)
    if recorded == 0:
        return {}
    if recorded > LARGEST_CACHE:
        notes.append(f"the KV cache has {LARGEST_CACHE} bytes, {recorded} were recorded (see --kv-cache-memory)")
    return {"kv_cache_memory": min(recorded, LARGEST_CACHE)}


def _device(recorded: EngineConfig, notes: list[str]) -> dict[str, Any]:
    """The recorded device, or what can stand for it here."""
    if recorded.device_type == "cuda" and not torch.cuda.is_available():
        notes.append(f"recorded on {recorded.device}, and there is no GPU here: graphs are emulated on the CPU")
        return {"device": "cpu", "graph_mode": recorded.resolved_graph_mode}
    if recorded.device_type == "tpu" and importlib.util.find_spec("torch_xla") is None:
        notes.append("recorded on tpu, and torch_xla is not installed here: steps run eagerly on the CPU, unpadded")
        return {"device": "cpu"}
    return {}
