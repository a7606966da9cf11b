"""One replay from start to end."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compiled_engine.engine.core import Engine
from compiled_engine.errors import ConfigError
from compiled_engine_debug.audit.detectors import make_detectors
from compiled_engine_debug.audit.session import AuditReport, run_audit
from compiled_engine_debug.bundle import Bundle
from compiled_engine_debug.replay.outcome import Fate, Verdict, judge
from compiled_engine_debug.replay.rebuild import rebuild
from compiled_engine_debug.replay.schedule import replay_steps
from compiled_engine_debug.steps import Steps


@dataclass(frozen=True)
class OtherKey:
    """A step that another graph served than was recorded; None: it ran eagerly. ``step``: as recorded."""

    step: int
    recorded: str | None
    replayed: str | None


@dataclass(frozen=True)
class ReplayReport:
    """The outcome of a replay. ``notes``: what was not as recorded. ``num_replayed``: recorded steps that ran again.

    ``num_recorded``: recorded steps. ``audit`` counts steps that were made up too.
    """

    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]
    num_recorded: int
    num_replayed: int
    other_keys: tuple[OtherKey, ...]
    audit: AuditReport

    def with_fate(self, fate: Fate) -> tuple[Verdict, ...]:
        """The findings that had ``fate``."""
        return tuple(verdict for verdict in self.verdicts if verdict.fate is fate)

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "notes": list(self.notes),
            "num_recorded": self.num_recorded,
            "num_replayed": self.num_replayed,
            "other_keys": [vars(item) for item in self.other_keys],
            "verdicts": [
                {
                    "fate": verdict.fate.value,
                    "reason": verdict.reason,
                    "finding": verdict.finding.to_json(),
                    "seen": None if verdict.seen is None else verdict.seen.to_json(),
                }
                for verdict in self.verdicts
            ],
            "audit": self.audit.to_json(),
        }


def replay(
    bundle: Bundle, *, overrides: Mapping[str, Any] | None = None, most_steps: int | None = None, seed: int = 0
) -> ReplayReport:
    """Run the steps of ``bundle`` again under an audit, on a model of the same shapes.

    ``overrides``: settings that replace recorded ones. ``most_steps``: run the first of them only. ``seed``: of weights
    and tokens. Raises ``ConfigError`` for what cannot be replayed, and what starting the engine raises.
    """
    if len(bundle.recording.steps) == 0:
        raise ConfigError(f"{bundle.path}: no step was recorded, so there is nothing to replay")
    run = _Run(bundle.recording.steps, seed, most_steps)
    with tempfile.TemporaryDirectory(prefix="compiled-engine-replay-") as folder:
        rebuilt = rebuild(bundle, Path(folder) / "model", overrides or {}, seed)
        audit = run_audit(rebuilt.config, make_detectors(), run)
    return ReplayReport(
        verdicts=judge(bundle.findings or (), audit),
        notes=rebuilt.notes,
        num_recorded=len(bundle.recording.steps),
        num_replayed=run.num_replayed,
        other_keys=tuple(run.other_keys),
        audit=audit,
    )


@dataclass
class _Run:
    """A workload that gives recorded steps straight to the engine's runner, past its scheduler."""

    steps: Steps
    seed: int
    most: int | None
    num_replayed: int = 0
    other_keys: list[OtherKey] = field(default_factory=list)

    def __call__(self, engine: Engine) -> None:
        for step in replay_steps(self.steps, engine.limits, self.seed, self.most):
            facts = engine.runner.execute(step.batch).facts
            if step.position is None:
                continue
            self.num_replayed += 1
            recorded, replayed = self.steps.key[step.position], None
            if facts is not None and facts.key is not None:
                replayed = str(facts.key)
            if replayed != recorded:
                self.other_keys.append(OtherKey(int(self.steps.index[step.position]), recorded, replayed))
