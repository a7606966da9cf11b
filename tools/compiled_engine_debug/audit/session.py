"""One audit from start to end: make the runner, run the workload under the detectors, make steps for what it left."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from compiled_engine.compile.ledger import Ledger
from compiled_engine.config import EngineConfig
from compiled_engine.engine.core import Engine
from compiled_engine.errors import CaptureError
from compiled_engine.models import ModelFiles, find_model
from compiled_engine.runners import create_runner
from compiled_engine.runners.base import Runner
from compiled_engine_debug.audit.artifact import ArtifactOfAnotherModel
from compiled_engine_debug.audit.capture_boundary import CaptureBoundary
from compiled_engine_debug.audit.detector import Detector
from compiled_engine_debug.audit.driving import driving_batches
from compiled_engine_debug.audit.runner import AuditedRunner, AuditStopped
from compiled_engine_debug.audit.subject import Subject
from compiled_engine_debug.audit.unused_graph import UnusedGraph
from compiled_engine_debug.audit.workload import run_workload
from compiled_engine_debug.findings import Finding

logger = logging.getLogger(__name__)

Workload = Callable[[Engine], None]


@dataclass(frozen=True)
class DetectorReport:
    """What one detector did. ``looks``: things it compared; ``skipped``: why it could not look, None: it could."""

    name: str
    about: str
    looks: int
    findings: int
    skipped: str | None


@dataclass(frozen=True)
class AuditReport:
    """The outcome of an audit. ``num_steps``: steps that ran under the detectors."""

    detectors: tuple[DetectorReport, ...]
    findings: tuple[Finding, ...]
    num_steps: int

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "num_steps": self.num_steps,
            "detectors": [vars(item) for item in self.detectors],
            "findings": [item.to_json() for item in self.findings],
        }


def run_audit(config: EngineConfig, detectors: Sequence[Detector], workload: Workload = run_workload) -> AuditReport:
    """Audit the model that ``config`` names. Raises what starting the engine raises."""
    files = find_model(config.model)
    for detector in detectors:
        if isinstance(detector, ArtifactOfAnotherModel):
            found = list(detector.look_at_store(config, files))
            if found:
                return _unstarted(detectors, found, "the graphs are of another model")
    try:
        runner = create_runner(config, files, Ledger())
    except CaptureError as error:
        boundary = next((item for item in detectors if isinstance(item, CaptureBoundary)), None)
        if boundary is None:
            raise
        return _unstarted(detectors, [boundary.found(str(error))], "the graphs could not be captured")
    try:
        return audit_runner(runner, files, detectors, workload)
    finally:
        runner.close()


def audit_runner(
    runner: Runner, files: ModelFiles, detectors: Sequence[Detector], workload: Workload = run_workload
) -> AuditReport:
    """Audit a runner that is ready; it stays open. Its caches must hold nothing that is still wanted."""
    subject = Subject.of(runner, files)
    with AuditedRunner(subject, detectors) as audited:
        if not audited.stopped:
            engine = Engine(audited, seed=subject.config.seed)
            try:
                workload(engine)
                _drive(audited, subject, detectors)
                audited.finish()
            except AuditStopped:
                logger.info("stopped in step %d: what comes after a fault follows from it", audited.num_steps - 1)
            finally:
                engine.abort_all()
        findings = tuple(audited.findings)
    return AuditReport(
        tuple(_report(item, findings, item.refusal(subject)) for item in detectors), findings, audited.num_steps
    )


def _drive(audited: AuditedRunner, subject: Subject, detectors: Sequence[Detector]) -> None:
    """Make steps for the graphs that the workload has not used."""
    for watch in detectors:
        if isinstance(watch, UnusedGraph):
            audited.findings += watch.workload_findings(subject)
    for key in subject.keys:
        if key not in audited.used_keys:
            for batch in driving_batches(subject, key):
                audited.execute(batch)


def _unstarted(detectors: Sequence[Detector], found: Sequence[Finding], why: str) -> AuditReport:
    named = {item.detector for item in found}
    reports = tuple(_report(item, found, None if item.name in named else why) for item in detectors)
    return AuditReport(reports, tuple(found), 0)


def _report(detector: Detector, findings: Sequence[Finding], skipped: str | None) -> DetectorReport:
    count = sum(item.detector == detector.name for item in findings)
    if skipped is None and not count and findings and not detector.looks:
        skipped = "the run ended at a finding"
    return DetectorReport(detector.name, detector.about, detector.looks, count, skipped)
