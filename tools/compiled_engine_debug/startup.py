"""Ledgers of several starts side by side: phase by phase, with what was found and what was not."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from compiled_engine.compile.ledger import Phase
from compiled_engine_debug.recording import RecordingError
from compiled_engine_debug.runs import read_run


@dataclass(frozen=True)
class Start:
    """One start: where it is from, its ``phases`` in order, and seconds from its zero to the end of the last phase."""

    name: str
    phases: tuple[Phase, ...]
    total_seconds: float

    @property
    def num_hits(self) -> int:
        """Phases that found what they looked for."""
        return sum(_says(phase, "hit") for phase in self.phases)

    @property
    def num_misses(self) -> int:
        """Phases that did not."""
        return sum(_says(phase, "miss") for phase in self.phases)

    @property
    def kind(self) -> str:
        """ "warm": all was found; "cold": something was not; "plain": nothing was looked for."""
        if self.num_misses:
            return "cold"
        return "warm" if self.num_hits else "plain"

    @property
    def outside_seconds(self) -> float:
        """Seconds of the total that no phase covers."""
        return self.total_seconds - sum(phase.seconds for phase in self.phases if phase.depth == 0)


@dataclass(frozen=True)
class Row:
    """One phase in every start, in their order; None where one has no such phase. ``depth``: phases it is inside."""

    name: str
    depth: int
    phases: tuple[Phase | None, ...]

    @property
    def differences(self) -> tuple[float | None, ...]:
        """Seconds that each start but the first took more than the first."""
        first, *others = (None if phase is None else phase.seconds for phase in self.phases)
        return tuple(None if first is None or other is None else other - first for other in others)


def read_start(path: Path) -> Start:
    """The start in a recording, in a bundle, or in a file that ``--ledger-json`` wrote.

    Raises ``RecordingError`` or ``BundleError``.
    """
    ledger = _ledger_of(path)
    if ledger is None:
        phases = tuple(read_run(path).phases)
        return Start(str(path), phases, _end_of(phases))
    try:
        phases = tuple(Phase(**item) for item in ledger["phases"])
        checked = all(isinstance(phase.name, str) and phase.depth >= 0 for phase in phases)
        if not checked:
            raise TypeError("a phase has a name that is no text, or a negative depth")
        return Start(str(path), phases, float(ledger.get("total_seconds", _end_of(phases))))
    except (TypeError, ValueError) as error:
        known = ", ".join(item.name for item in fields(Phase))
        problem = f"its phases are not those of a ledger ({error}): give a file that --ledger-json wrote"
        raise RecordingError(path, None, f"{problem}; a phase has {known}") from error


def compare_starts(starts: Sequence[Start]) -> tuple[Row, ...]:
    """Every phase of every start, in their order, those inside others after these.

    Phases are the same when they have the same name inside the same phases, counting those of one name.
    """
    trees = [_tree_of(start.phases) for start in starts]
    return tuple(_rows(trees, 0))


def to_json(starts: Sequence[Start], rows: Iterable[Row]) -> dict[str, Any]:
    """Everything as plain data."""
    return {
        "starts": [
            {
                "name": start.name,
                "total_seconds": start.total_seconds,
                "outside_seconds": start.outside_seconds,
                "num_hits": start.num_hits,
                "num_misses": start.num_misses,
                "kind": start.kind,
            }
            for start in starts
        ],
        "phases": [
            {
                "name": row.name,
                "depth": row.depth,
                "seconds": [None if phase is None else phase.seconds for phase in row.phases],
                "num_bytes": [None if phase is None else phase.num_bytes for phase in row.phases],
                "notes": [None if phase is None else phase.note for phase in row.phases],
                "differences": list(row.differences),
            }
            for row in rows
        ],
    }


@dataclass
class _Node:
    phase: Phase | None
    inside: dict[tuple[str, int], _Node] = field(default_factory=dict)


def _tree_of(phases: Iterable[Phase]) -> _Node:
    """Phases by name and by how many of that name came before inside the same phase."""
    root = _Node(None)
    open_nodes = [root]
    for phase in phases:
        # A phase that was added from elsewhere may be deeper than what is known to be around it.
        del open_nodes[phase.depth + 1 :]
        around = open_nodes[-1].inside
        count = 0
        while (phase.name, count) in around:
            count += 1
        around[phase.name, count] = node = _Node(phase)
        open_nodes.append(node)
    return root


def _rows(nodes: Sequence[_Node | None], depth: int) -> Iterable[Row]:
    for name, count in _merged([() if node is None else tuple(node.inside) for node in nodes]):
        matching = [None if node is None else node.inside.get((name, count)) for node in nodes]
        yield Row(name, depth, tuple(None if node is None else node.phase for node in matching))
        yield from _rows(matching, depth + 1)


def _merged(sequences: Sequence[tuple[tuple[str, int], ...]]) -> list[tuple[str, int]]:
    """All items, each once; an item that earlier sequences lack comes after the one that it follows in its own."""
    merged: list[tuple[str, int]] = []
    for sequence in sequences:
        place = 0
        for item in sequence:
            if item in merged:
                place = merged.index(item) + 1
            else:
                merged.insert(place, item)
                place += 1
    return merged


def _ledger_of(path: Path) -> Mapping[str, Any] | None:
    """The ledger in a file that holds one and nothing else; None for any other file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # reading it as a recording tells what is wrong, if anything is
    return data if isinstance(data, dict) and isinstance(data.get("phases"), list) else None


def _end_of(phases: Iterable[Phase]) -> float:
    return max((phase.start + phase.seconds for phase in phases), default=0.0)


def _says(phase: Phase, word: str) -> bool:
    return phase.note is not None and word in phase.note.replace(",", " ").split()
