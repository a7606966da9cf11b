"""Recordings made without an engine, and what a recorder writes, for several test files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from compiled_engine.compile.ledger import Ledger
from compiled_engine.compile.recorder import Recorder
from compiled_engine.compile.records import (
    BindingRecord,
    CacheRecord,
    CapturedGraphRecord,
    KeyRecord,
    MemoryRecord,
    ModelRecord,
    RunnerRecord,
    ScheduledShare,
    StepRecord,
    WeightRecord,
)
from compiled_engine.config import EngineConfig

RUNNER = RunnerRecord(
    model=ModelRecord("LlamaForCausalLM", "float32", 128, 2),
    caches=(
        CacheRecord("layers.0", 0, 4096, (9, 4, 2, 2, 8), "float32", 4608, None),
        CacheRecord("layers.1", 0, 4096, (9, 4, 2, 2, 8), "float32", 4608, "layers.0"),
    ),
    weights=(WeightRecord("embed", 64, "float32", (4, 4), 8192), WeightRecord("norm", 16, "float32", (4,), None)),
    graphs=(
        CapturedGraphRecord(
            key="piecewise 8 tokens",
            part=2,
            bindings=(BindingRecord("weight", "embed", 8192, 64, (4, 4), (4, 1), "float32", 1),),
            launches=("piece abc (x)", "copy to the next part"),
            num_bytes=512,
            seconds=0.25,
        ),
    ),
    keys=(KeyRecord("piecewise 8 tokens", 8, 0, "piecewise"),),
    memory=MemoryRecord(80, 4608, 512, 32, None, 1 << 30, None),
)


def make_step(index: int, num_tokens: int = 3, **changes: Any) -> StepRecord:
    """A step of two requests, of which the second samples."""
    facts: dict[str, Any] = {
        "index": index,
        "start": 1.5 + index / 100,
        "seconds": 0.0078125,
        "num_tokens": num_tokens,
        "num_padded_tokens": 8,
        "num_requests": 2,
        "num_padded_requests": 2,
        "num_sampled": 1,
        "mode": "piecewise",
        "key": "piecewise 8 tokens",
        "reason": None,
        "epoch": 1,
        "requests": (
            ScheduledShare("0", 4 * index, num_tokens - 1, False),
            ScheduledShare(f"é{index}", index, 1, True),
        ),
    }
    return StepRecord(**{**facts, **changes})


def new_recorder(file: Path | None = None, capacity: int = 10_000, **settings: Any) -> Recorder:
    """A recorder with a ledger that has one phase."""
    ledger = Ledger()
    ledger.add("weights", 0.5, start=0.25, num_bytes=80, note="read")
    return Recorder(EngineConfig(**settings), ledger, file, capacity)


def write_recording(file: Path, num_steps: int = 3, runner: RunnerRecord = RUNNER) -> Path:
    """A complete recording, as the recorder of an engine writes it."""
    recorder = new_recorder(file)
    recorder.start(runner)
    for index in range(num_steps):
        recorder.add_step(make_step(index))
    recorder.close()
    return file


def lines_of(file: Path) -> list[dict[str, Any]]:
    """Every line of ``file``, each of which must be whole."""
    text = file.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]
