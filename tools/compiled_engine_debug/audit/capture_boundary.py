"""``capture-boundary``: work that is in a captured graph and must not be, or that is in none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from compiled_engine.compile.graphs.backend import GraphRecord
from compiled_engine.compile.graphs.keys import GraphKind
from compiled_engine.compile.plan import GraphPlan
from compiled_engine_debug.audit.detector import Detector
from compiled_engine_debug.audit.launches import full_launches, part_launches
from compiled_engine_debug.audit.subject import Subject
from compiled_engine_debug.findings import Finding


class CaptureBoundary(Detector):
    """Compares the recorded launches of every graph with those that the plan asks for there.

    A piecewise graph has the pieces of its stretch and no attention; a full graph has every step of the plan. What
    follows the logits in a full graph is the sampler's own.
    """

    name = "capture-boundary"
    about = "recorded launches of every graph against the plan: attention inside, work outside"

    def refusal(self, subject: Subject) -> str | None:
        return "no graph is captured" if subject.backend is None or not subject.backend.records else None

    def start(self, subject: Subject) -> Iterable[Finding]:
        if subject.plan is None or subject.backend is None:
            return []
        return [found for record in subject.backend.records for found in self._look(record, subject.plan)]

    def _look(self, record: GraphRecord, plan: GraphPlan) -> Iterator[Finding]:
        present = list(record.launches)
        self.looks += len(present)
        if record.part.key.kind is GraphKind.FULL:
            wanted = full_launches(plan)
            after_head = present.index(wanted[-1]) + 1 if wanted[-1] in present else len(present)
            wanted += [name for name in present[after_head:] if not _is_attention(name)]
        else:
            wanted = part_launches(plan).get(record.part.index, [])
        for name in _beyond(present, wanted):
            what = "attention, which would be replayed with the metadata of its capture," if _is_attention(name) else ""
            yield self._finding(record, name, f"has {what or 'work of another place,'} inside it: {name}")
        missing = _beyond(wanted, present)
        for name in missing:
            yield self._finding(record, name, f"lacks {name}: it ran outside every launch and is not replayed")
        if not missing and sorted(present) == sorted(wanted) and present != wanted:
            name = next(one for one, other in zip(present, wanted, strict=True) if one != other)
            yield self._finding(record, name, f"runs its launches in another order than the plan, from {name} on")

    def _finding(self, record: GraphRecord, launch: str, says: str) -> Finding:
        layer = launch.removeprefix("attention of layer ").strip("'") if _is_attention(launch) else None
        return self.found(f"graph {record.part} {says}", layer=layer, key=str(record.part.key), node=launch)


def _is_attention(launch: str) -> bool:
    return launch.startswith("attention of layer ")


def _beyond(names: list[str], others: list[str]) -> list[str]:
    """Of ``names`` those that ``others`` lack, as often as they do."""
    left = list(others)
    beyond = []
    for name in names:
        if name in left:
            left.remove(name)
        else:
            beyond.append(name)
    return beyond
