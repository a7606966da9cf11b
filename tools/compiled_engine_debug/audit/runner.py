"""The runner that asks detectors before, inside and after every step of another runner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

import torch

from compiled_engine.compile.graphs.keys import GraphKey, GraphKind
from compiled_engine.errors import CompiledEngineError
from compiled_engine.runners.base import Runner, RunnerLimits
from compiled_engine.runners.batch import ScheduledBatch, StepOutput
from compiled_engine_debug.audit.detector import Detector
from compiled_engine_debug.audit.expected import expected_step
from compiled_engine_debug.audit.probes import probed
from compiled_engine_debug.audit.step import AttentionCall, Step
from compiled_engine_debug.audit.subject import Subject
from compiled_engine_debug.findings import Finding


class AuditStopped(CompiledEngineError):
    """A step has findings: what would come after it follows from them."""


class AuditedRunner(Runner):
    """Delegates to the subject's runner and collects ``findings``.

    ``detectors`` are asked in their order; the first of them that finds something in a step ends the run with
    ``AuditStopped``, out of ``execute``. ``stopped``: findings have ended the run, or it must not begin. ``used_keys``:
    of graphs that have served a step. An error of the step that no detector explains goes on to the caller. Use it as a
    context manager: on leaving, every probe is taken out again. The inner runner stays open then.
    """

    def __init__(self, subject: Subject, detectors: Sequence[Detector]) -> None:
        self._subject = subject
        self._detectors = tuple(item for item in detectors if item.refusal(subject) is None)
        self._probes = ExitStack()
        self._step: Step | None = None
        self.findings: list[Finding] = []
        self.num_steps = 0
        self.stopped = False
        self.used_keys: set[GraphKey] = set()

    def __enter__(self) -> AuditedRunner:
        self._probes.enter_context(probed(self._subject, self))
        for detector in self._detectors:
            self._probes.callback(detector.close)
            found = list(detector.start(self._subject))
            self.findings += found
            self.stopped |= bool(found) and detector.ends_run
        return self

    def __exit__(self, *error: object) -> None:
        self._probes.close()

    @property
    def limits(self) -> RunnerLimits:
        return self._subject.runner.limits

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """See ``Runner.execute``. Raises ``AuditStopped`` too."""
        subject = self._subject
        key = subject.key_of(batch)
        step = Step(self.num_steps, batch, key, expected_step(batch, subject.block_size, key))
        self.num_steps += 1
        self._ask(lambda detector: detector.before_step(subject, step))
        self._step = step
        try:
            step.output = subject.runner.execute(batch)
        except CompiledEngineError as error:
            step.error = error
            try:
                self._ask(lambda detector: detector.after_step(subject, step), cause=error)
            finally:
                # The error holds the step's frames, and with them this step and outputs of graphs: let none be kept.
                step.error = None
            raise
        finally:
            self._step = None
        if key is not None and key.kind is GraphKind.FULL and subject.gpu is not None:
            # A replayed graph leaves its logits in its output.
            num_rows = len(step.output.sampled.token_ids)
            step.logits = subject.gpu.sampler.outputs(max(1, num_rows))["logits"][:num_rows].clone()
        if key is not None:
            self.used_keys.add(key)
        self._ask(lambda detector: detector.after_step(subject, step))
        return step.output

    def finish(self) -> None:
        """Ask the detectors for what they know after the last step, unless the run has ended at a finding."""
        if not self.stopped:
            for detector in self._detectors:
                self.findings += detector.finish(self._subject)

    def close(self) -> None:
        """Take the probes out and close the inner runner. Idempotent."""
        self._probes.close()
        self._subject.runner.close()

    def before_attention(self, call: AttentionCall) -> None:
        """See ``probes.Listener``."""
        if self._step is not None:
            for detector in self._detectors:
                detector.before_attention(self._step, call)

    def after_attention(self, call: AttentionCall) -> None:
        """See ``probes.Listener``."""
        if self._step is not None:
            self._step.calls.append(call)
            for detector in self._detectors:
                detector.after_attention(self._step, call)

    def model_given(self, input_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """See ``probes.Listener``."""
        if self._step is not None:
            self._step.inputs = {"input_ids": input_ids.clone(), "positions": positions.clone()}

    def logits_made(self, logits: torch.Tensor) -> None:
        """See ``probes.Listener``."""
        if self._step is not None:
            self._step.logits = logits.clone()

    def _ask(self, question: Callable[[Detector], Iterable[Finding]], cause: CompiledEngineError | None = None) -> None:
        """Raise ``AuditStopped`` if a detector answers with findings; those after it are not asked."""
        for detector in self._detectors:
            found = list(question(detector))
            if found:
                self.findings += found
                self.stopped = True
                raise AuditStopped("; ".join(map(str, found))) from cause
