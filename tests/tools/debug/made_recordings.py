"""Recordings made of records, line by line, without an engine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compiled_engine.compile.ledger import Phase
from compiled_engine.compile.records import (
    BindingRecord,
    CacheRecord,
    CapturedGraphRecord,
    CompileRecord,
    HeaderRecord,
    KeyRecord,
    MemoryRecord,
    ModelRecord,
    StepRecord,
    WeightRecord,
)
from compiled_engine.config import EngineConfig

KINDS: Mapping[type, str] = {
    Phase: "phase",
    CacheRecord: "cache",
    WeightRecord: "weight",
    CapturedGraphRecord: "graph",
    MemoryRecord: "memory",
    CompileRecord: "compile",
    StepRecord: "step",
}
MODEL = ModelRecord("TinyForCausalLM", "float32", 128, 2)
VERSIONS: Mapping[str, str | None] = {"python": "3.12.1", "torch": "2.13.0", "transformers": "5.17.0"}


def write_recording(
    path: Path,
    *records: Any,
    keys: Iterable[KeyRecord] = (),
    config: EngineConfig | None = None,
    versions: Mapping[str, str | None] = VERSIONS,
    model: ModelRecord | None = MODEL,
    plan: Mapping[str, Any] | None = None,
) -> Path:
    """A recording of ``records``, in their order, of an engine with the settings ``config``; returns ``path``."""
    config = config or EngineConfig()
    header = HeaderRecord(1, "0.1.0", "2026-01-02T03:04:05Z", versions, config.device, asdict(config), model)
    lines: list[dict[str, Any]] = [{"kind": "header", **asdict(header)}]
    if plan is not None:
        lines.append({"kind": "plan", "plan": plan})
    lines += [{"kind": KINDS[type(record)], **asdict(record)} for record in records]
    lines.append({"kind": "keys", "keys": [asdict(key) for key in keys]})
    lines.append({"kind": "end", "num_steps": sum(isinstance(record, StepRecord) for record in records)})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def step(index: int = 0, num_tokens: int = 1, num_requests: int = 1, **fields: Any) -> StepRecord:
    """An eager step, unless ``fields`` say otherwise."""
    facts: dict[str, Any] = {
        "start": float(index),
        "seconds": 0.01,
        "num_padded_tokens": num_tokens,
        "num_padded_requests": num_requests,
        "num_sampled": num_requests,
        "mode": "eager",
        "key": None,
        "reason": None,
        "epoch": 1,
        "requests": (),
    }
    return StepRecord(index=index, num_tokens=num_tokens, num_requests=num_requests, **{**facts, **fields})


def cache(layer: str, address: int | None, num_bytes: int = 1024, group: int = 0, **fields: Any) -> CacheRecord:
    """A cache of float32."""
    facts: dict[str, Any] = {"shape": (num_bytes // 32, 2, 2, 1, 2), "dtype": "float32", "shares_with": None}
    return CacheRecord(layer=layer, group=group, address=address, num_bytes=num_bytes, **{**facts, **fields})


def weight(name: str, address: int | None, num_bytes: int = 64, dtype: str = "float32") -> WeightRecord:
    """A weight with one row."""
    return WeightRecord(name, num_bytes, dtype, (1, num_bytes // 4), address)


def binding(role: str, name: str, address: int, num_bytes: int = 64, **fields: Any) -> BindingRecord:
    """A contiguous float32 tensor that a graph uses."""
    facts: dict[str, Any] = {"shape": (num_bytes // 4,), "stride": (1,), "dtype": "float32", "epoch": 1}
    return BindingRecord(role=role, name=name, address=address, num_bytes=num_bytes, **{**facts, **fields})


def graph(key: str, *bindings: BindingRecord, part: int = 0, **fields: Any) -> CapturedGraphRecord:
    """A captured graph of two launches."""
    facts: dict[str, Any] = {"launches": ("piece a", "piece b"), "num_bytes": 100, "seconds": 0.5}
    return CapturedGraphRecord(key=key, part=part, bindings=bindings, **{**facts, **fields})
