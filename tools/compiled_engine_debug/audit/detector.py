"""What every detector is to the audit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from compiled_engine_debug.audit.step import AttentionCall, Step
from compiled_engine_debug.audit.subject import Subject
from compiled_engine_debug.findings import Finding


class Detector:
    """Looks for one kind of fault. ``name`` is its stable identifier; ``looks`` counts what it has compared so far.

    The audit asks detectors in the order of ``detectors.DETECTORS``, causes before what follows from them, and ends a
    run where one has found something: what others find then may be no more than a consequence.
    """

    name = ""
    about = ""
    ends_run = True
    """Whether what follows a finding may follow from it. If not, the run goes on."""

    def __init__(self) -> None:
        self.looks = 0

    def refusal(self, subject: Subject) -> str | None:
        """Why nothing of this kind can be seen on this runner; None: it can."""
        return None

    def start(self, subject: Subject) -> Iterable[Finding]:
        """Once, before the first step."""
        return ()

    def before_step(self, subject: Subject, step: Step) -> Iterable[Finding]:
        """Before the runner has the step."""
        return ()

    def before_attention(self, step: Step, call: AttentionCall) -> None:
        """Right before one layer writes and attends."""

    def after_attention(self, step: Step, call: AttentionCall) -> None:
        """Right after it."""

    def after_step(self, subject: Subject, step: Step) -> Iterable[Finding]:
        """After the step, also when it ended in ``step.error``."""
        return ()

    def finish(self, subject: Subject) -> Iterable[Finding]:
        """Once, after the last step of a run that had no findings."""
        return ()

    def close(self) -> None:
        """Undo what ``start`` has set up."""

    def found(self, message: str, **place: Any) -> Finding:
        """A finding of this detector."""
        return Finding(self.name, message, **place)
