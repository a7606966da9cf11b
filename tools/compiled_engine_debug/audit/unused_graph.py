"""``unused-graph``: graphs that no step can ask for, and graphs that were to be captured and were not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from compiled_engine.compile.graphs.keys import GraphKey, GraphKind, StepShape
from compiled_engine_debug.audit.detector import Detector
from compiled_engine_debug.audit.launches import part_launches
from compiled_engine_debug.audit.step import Step
from compiled_engine_debug.audit.subject import Subject
from compiled_engine_debug.findings import Finding


class UnusedGraph(Detector):
    """Compares the keys that were declared, captured, can be dispatched to, and were used.

    A graph that the workload did not use is no fault by itself: the audit makes a step for it. With ``strict`` it is
    one, which tells whether a workload covers its graphs.
    """

    name = "unused-graph"
    about = "keys that were declared, captured, can be dispatched to, and were used"
    ends_run = False

    def __init__(self, strict: bool = False) -> None:
        super().__init__()
        self._strict = strict
        self.used: Counter[GraphKey] = Counter()

    def refusal(self, subject: Subject) -> str | None:
        return "no graph is declared" if not subject.keys else None

    def start(self, subject: Subject) -> Iterable[Finding]:
        backend, plan = subject.backend, subject.plan
        if backend is None or plan is None:
            return
        captured: dict[GraphKey, set[int]] = {}
        for record in backend.records:
            captured.setdefault(record.part.key, set()).add(record.part.index)
        for key in subject.keys:
            self.looks += 1
            wanted = {0} if key.kind is GraphKind.FULL else set(part_launches(plan))
            if missing := wanted - captured.get(key, set()):
                # A step that is dispatched to it would fail.
                self.ends_run = True
                parts = "" if missing == wanted else f", part {min(missing)},"
                yield self.found(f"graph {key}{parts} is declared and was not captured", key=str(key))
            elif shape_for(subject, key) is None:
                yield self.found(f"graph {key} is captured, and no step can be dispatched to it", key=str(key))
        for key in captured:
            if key not in subject.keys:
                yield self.found(f"graph {key} is captured and not declared: no step asks for it", key=str(key))

    def after_step(self, subject: Subject, step: Step) -> Iterable[Finding]:
        if step.key is not None and step.error is None:
            self.used[step.key] += 1
        return ()

    def unused(self, subject: Subject) -> tuple[GraphKey, ...]:
        """Declared keys that no step has used so far."""
        return tuple(key for key in subject.keys if key not in self.used)

    def workload_findings(self, subject: Subject) -> Iterator[Finding]:
        """After the workload, before steps are made for what it left: what ``strict`` asks for."""
        if self._strict:
            for key in self.unused(subject):
                yield self.found(f"graph {key} is captured, and no step of the workload used it", key=str(key))


def shape_for(subject: Subject, key: GraphKey) -> StepShape | None:
    """A step that is dispatched to ``key``, the largest that fits; None if there is none at all.

    The dispatcher is asked for every shape that could be meant. What it looks at is the number of tokens and of
    requests, whether each has one, and the longest request, of which the ends of buckets are all that matters.
    """
    limits, gpu = subject.runner.limits, subject.gpu
    if gpu is None:
        return None
    ends = sorted({*(other.max_seq_len for other in subject.keys), *_starts(subject)} - {0})
    lengths = [length for length in [*reversed(ends), limits.max_model_len] if length <= limits.max_model_len]
    for num_tokens in range(min(key.num_padded_tokens, limits.max_num_batched_tokens), 0, -1):
        for num_requests in range(min(limits.max_num_seqs, num_tokens), 0, -1):
            longest = num_tokens - (num_requests - 1)
            for max_seq_len in lengths:
                if longest > max_seq_len or (key.max_seq_len and max_seq_len > key.max_seq_len):
                    continue
                uniform = num_tokens == num_requests * longest
                shape = StepShape(num_tokens, num_requests, longest, max_seq_len, uniform)
                if gpu.decide(shape).key == key:
                    return shape
    return None


def _starts(subject: Subject) -> set[int]:
    """One more than the end of each bucket, and one."""
    return {1} | {key.max_seq_len + 1 for key in subject.keys if key.max_seq_len}
