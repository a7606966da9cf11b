"""Where the memory is: the parts that the engine counted, what the process has, and the largest weights."""

from __future__ import annotations

from dataclasses import dataclass

from compiled_engine_debug.memory import Group, cache_groups
from compiled_engine_debug.recording import Recording

_SHOWN_WEIGHTS = 10


@dataclass(frozen=True)
class Amount:
    """Bytes of one thing. ``width``: per cent of all parts together."""

    name: str
    label: str
    num_bytes: int
    width: float


@dataclass(frozen=True)
class MemoryUse:
    """``parts`` add up to ``total``; ``others`` are measured otherwise. ``largest``: weights, by name and bytes."""

    parts: tuple[Amount, ...]
    total: int
    others: tuple[tuple[str, str, int | None], ...]
    groups: tuple[Group, ...]
    largest: tuple[tuple[str, int, str], ...]
    num_weights: int


def memory_use(recording: Recording) -> MemoryUse | None:
    """The recorded memory; None where the engine did not become ready."""
    memory = recording.memory
    if memory is None:
        return None
    parts = {
        "weights": ("weights", memory.weights),
        "kv_cache": ("KV cache", memory.kv_cache),
        "graphs": ("captured graphs", memory.graphs),
        "workspaces": ("workspaces and buffers", memory.workspaces),
    }
    total = sum(num_bytes for _, num_bytes in parts.values())
    largest = sorted(recording.weights, key=lambda weight: -weight.num_bytes)[:_SHOWN_WEIGHTS]
    return MemoryUse(
        parts=tuple(
            Amount(name, label, num_bytes, round(100 * num_bytes / (total or 1), 3))
            for name, (label, num_bytes) in parts.items()
        ),
        total=total,
        others=(
            ("estimated_working", "a step's own, estimated", memory.estimated_working),
            ("resident", "resident in this process", memory.resident),
            ("device_allocated", "allocated on the device by torch", memory.device_allocated),
        ),
        groups=cache_groups(recording.caches),
        largest=tuple((weight.name, weight.num_bytes, weight.dtype) for weight in largest),
        num_weights=len(recording.weights),
    )
