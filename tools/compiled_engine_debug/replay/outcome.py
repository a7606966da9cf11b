"""Comparing findings: which of a bundle's came back in its replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from compiled_engine_debug.audit.session import AuditReport
from compiled_engine_debug.findings import Finding


class Fate(str, Enum):
    """What became of a finding."""

    REAPPEARS = "reappears"
    GONE = "gone"
    NEW = "new"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Verdict:
    """``finding`` is the bundle's, of a new one the replay's. ``seen``: the replay's, if it has it.

    ``reason``: why nothing is known.
    """

    fate: Fate
    finding: Finding
    seen: Finding | None = None
    reason: str | None = None


def judge(reported: Sequence[Finding], audit: AuditReport) -> tuple[Verdict, ...]:
    """The verdict on each of ``reported``, in order, and then on what the replay alone has found.

    A finding is the same where detector, layer and kind of place are. An audit ends at the first step with findings: of
    those it has not come to nothing is known.
    """
    open_ones = list(audit.findings)
    verdicts: list[Verdict] = []
    for finding in reported:
        seen = next((item for item in open_ones if _place(item) == _place(finding)), None)
        if seen is not None:
            open_ones.remove(seen)
            verdicts.append(Verdict(Fate.REAPPEARS, finding, seen))
        else:
            reason = _reason_unknown(finding, audit)
            verdicts.append(Verdict(Fate.GONE if reason is None else Fate.UNKNOWN, finding, reason=reason))
    return (*verdicts, *(Verdict(Fate.NEW, finding, finding) for finding in open_ones))


def _place(finding: Finding) -> tuple[object, ...]:
    """What is compared. Steps, requests, slots and graphs are the workload's: only whether there is one counts."""
    return (
        finding.detector,
        finding.layer,
        finding.node,
        finding.request is None,
        finding.slot is None,
    )


def _reason_unknown(finding: Finding, audit: AuditReport) -> str | None:
    """Why the replay cannot tell that ``finding`` is gone; None: it can."""
    report = next((item for item in audit.detectors if item.name == finding.detector), None)
    if report is None:
        return "this version has no such detector"
    if report.skipped is not None:
        return report.skipped
    if audit.findings:
        return f"the replay ended with what was found in step {max(0, audit.num_steps - 1)}"
    return None
