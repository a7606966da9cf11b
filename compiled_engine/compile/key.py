"""The key of stored graphs: a hash of everything that can change them, every part of which is kept to explain a miss.

Nothing is traced and no compiler is imported to compute it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from compiled_engine.compile.surroundings import (
    compiler_setting_components,
    cpu_components,
    environment_components,
    gpu_components,
    schema_components,
    source_components,
    torch_components,
)
from compiled_engine.config import EngineConfig

OPT_OUT: Mapping[str, str] = {
    "model": "the model enters by what its files hold",
    "dtype": "enters as the type that it is resolved to",
    "max_model_len": "bounds requests and sizes caches; graphs are for any number of tokens",
    "max_num_seqs": "bounds a step; graphs are for any number of tokens and sampled rows",
    "max_num_batched_tokens": "bounds a step; graphs are for any number of tokens",
    "block_size": "a matter of caches, which are no argument of any piece",
    "kv_cache_memory": "sizes caches, which are no argument of any piece",
    "enable_prefix_caching": "decides which tokens are computed, not how",
    "graph_mode": "graphs are captured from pieces at every start",
    "graph_sizes": "graphs are captured from pieces at every start",
    "max_graph_size": "graphs are captured from pieces at every start",
    "token_buckets": "steps are padded to them on a TPU only, whose graphs are not stored",
    "request_buckets": "steps are padded to them on a TPU only, whose graphs are not stored",
    "bucket_gap": "steps are padded by it on a TPU only, whose graphs are not stored",
    "gpu_memory_fraction": "sizes caches, which are no argument of any piece",
    "graphs": "where graphs are looked for",
    "store": "whether graphs are looked for",
    "require_precompiled": "what a miss leads to",
    "on_compile": "what a later compilation leads to",
    "quantization": "how packed weights store their numbers, which their buffers say themselves",
    "num_threads": "kernels and pieces ask for the number of threads when they run",
    "record": "whether what happens is kept",
    "seed": "sampling is no part of a graph",
}
"""Fields of ``EngineConfig`` that cannot change a graph, each with the reason. All others enter the key."""

MODEL_PREFIX = "model."


@dataclass(frozen=True)
class Difference:
    """One component in which two keys differ; None where a key has no such component."""

    name: str
    stored: str | None
    wanted: str | None


@dataclass(frozen=True, eq=False)
class StoreKey:
    """What a stored plan belongs to: ``components``, sorted by name.

    ``digest``: sha256 (hexadecimal) of all of them. ``toolchain``: of those that are no model's own; a compiled piece
    depends on these and on what it computes, so models share pieces under one toolchain.
    """

    components: Mapping[str, str]
    digest: str = dataclasses.field(init=False)
    toolchain: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        components = dict(sorted(self.components.items()))
        object.__setattr__(self, "components", MappingProxyType(components))
        object.__setattr__(self, "digest", _digest(components))
        shared = {name: text for name, text in components.items() if not name.startswith(MODEL_PREFIX)}
        object.__setattr__(self, "toolchain", _digest(shared))

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, StoreKey) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def differences(self, stored: Mapping[str, str]) -> tuple[Difference, ...]:
        """The components in which ``stored`` differs from this key, by name."""
        names = sorted(set(stored) | set(self.components))
        pairs = [Difference(name, stored.get(name), self.components.get(name)) for name in names]
        return tuple(pair for pair in pairs if pair.stored != pair.wanted)


def build_store_key(
    config: EngineConfig,
    dtype: torch.dtype,
    model: Mapping[str, str],
    *,
    source_root: Path | None = None,
    environment: Mapping[str, str] | None = None,
    cpuinfo: Path | None = None,
) -> StoreKey:
    """The key for a model under ``config``: ``model`` holds its components, ``dtype`` is ``config.dtype`` resolved.

    ``source_root`` (default: this package's folder), ``environment`` (``os.environ``) and ``cpuinfo``
    (``/proc/cpuinfo``) are where sources, variables and CPU flags are read. Raises ``StoreError`` when this package
    has no sources on disk.
    """
    engine = {"engine.dtype": str(dtype).removeprefix("torch.")}
    for item in dataclasses.fields(config):
        if item.name not in OPT_OUT:
            engine[f"engine.{item.name}"] = repr(getattr(config, item.name))
    # Whichever of several equal GPUs it is.
    engine["engine.device"] = config.device_type
    return StoreKey(
        {
            **{name if name.startswith(MODEL_PREFIX) else MODEL_PREFIX + name: text for name, text in model.items()},
            **engine,
            **schema_components(),
            **source_components(source_root),
            **torch_components(),
            **compiler_setting_components(),
            **cpu_components(cpuinfo),
            **gpu_components(config.device),
            **environment_components(environment),
        }
    )


def ops_tag(source_root: Path | None = None) -> str:
    """A hash of our ops: their schemas and sources, effects among them.

    For ``torch.compiler.config.cache_key_tag``: Inductor's own cache does not see them (pytorch#187319).
    """
    sources = source_components(source_root)
    return _digest({**schema_components(), **{k: v for k, v in sources.items() if k.startswith("source.ops/")}})


def _digest(components: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(sorted(components.items())).encode()).hexdigest()
