"""What stands at the top of the page: what was recorded, and the numbers that say most about it."""

from __future__ import annotations

from dataclasses import dataclass

from compiled_engine_debug.recording import Recording
from compiled_engine_debug.report.text import count_text, seconds_text, share_text


@dataclass(frozen=True)
class Figure:
    """One number. ``name``: the page's name for it. ``value``: exactly; ``text``: as people read it."""

    name: str
    label: str
    value: int | float
    text: str


def facts(recording: Recording) -> tuple[str, ...]:
    """Model, device, versions and time, one text each."""
    header = recording.header
    model = header.model
    versions = [f"{name} {version}" for name, version in header.versions.items() if version is not None]
    return (
        str(header.config.get("model") or "default model"),
        "the engine did not start" if model is None else f"{model.architecture}, {model.dtype}",
        f"device {header.device}",
        f"compiled_engine {header.engine}",
        *versions,
        f"recorded {header.created}",
    )


def figures(recording: Recording) -> tuple[Figure, ...]:
    """The numbers at the top."""
    steps = recording.steps
    num_tokens, num_padded = int(steps.num_tokens.sum()), int(steps.num_padded_tokens.sum())
    ready = max((phase.start + phase.seconds for phase in recording.phases), default=0.0)
    keys = {graph.key for graph in recording.graphs}
    late = sum(record.after_warmup for record in recording.compiles)
    num_eager = int((steps.mode == "eager").sum())
    return (
        Figure("ready_seconds", "start-up", ready, seconds_text(ready)),
        _count("num_steps", "steps", len(steps)),
        _count("num_tokens", "tokens", num_tokens),
        Figure(
            "num_wasted_tokens",
            "padding",
            num_padded - num_tokens,
            share_text(num_padded - num_tokens, num_padded),
        ),
        Figure("num_eager_steps", "eager steps", num_eager, share_text(num_eager, len(steps))),
        _count("num_captured_keys", "captured keys", len(keys)),
        _count("num_layers", "attention layers", len(recording.caches)),
        _count("num_late_compiles", "late compiles", late),
    )


def _count(name: str, label: str, value: int) -> Figure:
    return Figure(name, label, value, count_text(value))
