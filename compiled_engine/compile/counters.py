"""Counting what compilation did, and a way for tests to say what it must do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields


@dataclass
class CompileCounters:
    """What happened since this object was made. One per engine; handed down, never global.

    ``pieces`` are the parts of the backbone between attentions, ``pieces_compiled`` those that had to be compiled
    because no equal one was there; the head (logits) is counted by ``heads`` and ``heads_compiled``.
    ``passes`` counts the rewrites of each pass by its name.
    """

    captures: int = 0
    pieces: int = 0
    pieces_compiled: int = 0
    heads: int = 0
    heads_compiled: int = 0
    attention_layers: int = 0
    passes: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def expect(self, **changes: int) -> Iterator[None]:
        """Fail unless exactly these counters grow by exactly these amounts inside the block.

        Counters not named must not matter to the caller; name them with 0 to forbid a change. Raises
        ``AssertionError`` listing expected and actual growth, ``TypeError`` for an unknown counter.
        """
        known = {item.name for item in fields(self)} - {"passes"}
        if unknown := set(changes) - known:
            raise TypeError(f"no such counters: {sorted(unknown)}; there are {sorted(known)}")
        before = {name: getattr(self, name) for name in changes}
        yield
        actual = {name: getattr(self, name) - before[name] for name in changes}
        if actual != changes:
            raise AssertionError(f"compile counters grew by {actual}, expected {changes}")
