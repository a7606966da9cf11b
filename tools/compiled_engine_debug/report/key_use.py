"""Captured sizes and what became of them: how often each served a step, and how much of that was padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiled_engine_debug.recording import Recording


@dataclass(frozen=True)
class KeyUse:
    """One key, declared or met in a step. ``num_padded`` counts the ``num_tokens`` real tokens and the padding.

    ``captured_bytes`` and ``captured_seconds`` add up the key's graphs, ``num_graphs`` of them.
    """

    key: str
    kind: str
    is_declared: bool
    size: int | None
    num_graphs: int
    captured_bytes: int
    captured_seconds: float
    num_steps: int
    num_tokens: int
    num_padded: int
    seconds: float

    @property
    def num_wasted(self) -> int:
        """Tokens that are padding."""
        return self.num_padded - self.num_tokens


def key_uses(recording: Recording) -> tuple[KeyUse, ...]:
    """Every key: the declared ones in their order, then others that steps or graphs name."""
    steps = recording.steps
    codes = {key: code for code, key in enumerate(dict.fromkeys(steps.key.tolist()))}
    of_step = np.array([codes[key] for key in steps.key.tolist()], dtype=np.int64)
    counts = np.bincount(of_step, minlength=len(codes))

    def total(values: NDArray[Any]) -> NDArray[Any]:
        return np.bincount(of_step, weights=values, minlength=len(codes))

    tokens, padded, seconds = (total(values) for values in (steps.num_tokens, steps.num_padded_tokens, steps.seconds))
    declared = {record.key: record for record in recording.keys}
    captured = [graph.key for graph in recording.graphs]
    uses = []
    for key in dict.fromkeys([*declared, *captured, *(key for key in codes if key is not None)]):
        record, code = declared.get(key), codes.get(key)
        graphs = [graph for graph in recording.graphs if graph.key == key]
        uses.append(
            KeyUse(
                key=key,
                kind=record.kind if record is not None else key.partition(" ")[0],
                is_declared=record is not None,
                size=None if record is None else record.num_padded_tokens,
                num_graphs=len(graphs),
                captured_bytes=sum(graph.num_bytes for graph in graphs),
                captured_seconds=sum(graph.seconds for graph in graphs),
                num_steps=0 if code is None else int(counts[code]),
                num_tokens=0 if code is None else int(tokens[code]),
                num_padded=0 if code is None else int(padded[code]),
                seconds=0.0 if code is None else float(seconds[code]),
            )
        )
    return tuple(uses)
