"""Climbing the ladder: every rung runs the same steps and is compared with those below it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from compiled_engine.compile.opening import CompiledPiece
from compiled_engine.compile.pieces import PieceCompiler
from compiled_engine.compile.pipeline import Progress
from compiled_engine.compile.plan import GraphPlan
from compiled_engine.compile.split import Piece
from compiled_engine.config import EngineConfig
from compiled_engine.models import ModelFiles, resolve_dtype
from compiled_engine.runners.batch import ScheduledBatch
from compiled_engine_debug.bisect.calls import CallLog, PieceCall, RealRows
from compiled_engine_debug.bisect.compare import Limits, Measured, Watch, default_tolerance
from compiled_engine_debug.bisect.compilers import ToolMissing
from compiled_engine_debug.bisect.oracle import TransformersOracle, measure_noise
from compiled_engine_debug.bisect.outcome import Divergence, RungOutcome, Verdict
from compiled_engine_debug.bisect.run import run_steps
from compiled_engine_debug.bisect.rungs import ORACLE, Rung, config_of
from compiled_engine_debug.bisect.runners import CapturedModel, ProbedRunner
from compiled_engine_debug.bisect.trace import Site, Trace
from compiled_engine_debug.bisect.verdict import Below, judge
from compiled_engine_debug.bisect.walk import Culprit, Good, Suspect, find_culprit
from compiled_engine_debug.bisect.workload import plan_steps, standard_prompts

# In which transformers' rounding errors are measured.
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}


@dataclass(frozen=True)
class _Pieces:
    """Compiled pieces, and what compiled them."""

    compiler: PieceCompiler
    compiled: dict[str, CompiledPiece]


@dataclass(frozen=True)
class _Built:
    """A rung that is ready to run, or has run. ``log`` notes calls of its pieces when asked to."""

    name: str
    runner: ProbedRunner
    pieces: _Pieces
    log: CallLog

    def calls(self, steps: Sequence[ScheduledBatch], last: int) -> list[PieceCall]:
        """The calls of pieces in step ``last``, which is run again after all steps before it."""
        for step in steps[:last]:
            self.runner.execute(step)
        self.log.start()
        self.runner.execute(steps[last])
        self.log.stop()
        return self.log.calls


@dataclass(frozen=True)
class _Standing:
    """A rung that has run and is kept for comparison. ``built`` None: transformers. ``first``: where it diverged."""

    name: str
    trace: Trace
    built: _Built | None = None
    first: Measured | None = None

    def close(self) -> None:
        if self.built is not None:
            self.built.runner.close()


class Ladder:
    """The rungs of one model under one workload.

    ``config`` has room for all prompts with ``max_tokens`` new tokens each. ``prompts`` None: standard ones.
    ``tolerance``: what two rungs may differ by; None: by dtype, and more where rounding errors are large. Raises
    ``CaptureError`` or ``ModelError`` for a model that cannot be run.
    """

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        progress: Progress,
        *,
        prompts: Sequence[Sequence[int]] | None = None,
        max_tokens: int = 6,
        tolerance: float | None = None,
    ) -> None:
        self.config = config
        self._files = files
        self._progress = progress
        dtype = resolve_dtype(config.dtype, files, config.device_type)
        self.tolerance = default_tolerance(dtype) if tolerance is None else tolerance
        # One oracle at a time: its weights need not be in memory beside those of another, or of two rungs.
        oracle = TransformersOracle(config, files, dtype)
        given = standard_prompts(oracle.vocab_size) if prompts is None else prompts
        self.texts = oracle.write(given, max_tokens, progress)
        self._oracle = _Standing(ORACLE, oracle.trace(self.texts, progress))
        del oracle
        noise = self._measure_noise(_WIDER[dtype]) if tolerance is None else {}
        self._limits = Limits(self.tolerance, noise)
        progress("capturing the model", 0, 1)
        self._captured = CapturedModel(config, files)
        self._steps: tuple[ScheduledBatch, ...] = ()

    @property
    def plan(self) -> GraphPlan:
        """The plan that all rungs run."""
        return self._captured.planned.plan

    @property
    def pieces(self) -> Mapping[str, Piece]:
        """The plan's pieces before any compiler has seen them, by key."""
        return self._captured.planned.pieces

    @property
    def oracle_trace(self) -> Trace:
        """What transformers computes."""
        return self._oracle.trace

    @property
    def steps(self) -> tuple[ScheduledBatch, ...]:
        """What every rung runs; empty until the lowest has been built."""
        return self._steps

    def climb(self, rungs: Sequence[Rung]) -> Iterator[RungOutcome]:
        """Run ``rungs``, the lowest first; the outcome of each as soon as it is known."""
        clean = below = self._oracle
        pieces: _Pieces | None = None
        with tempfile.TemporaryDirectory(prefix="compiled_engine_debug_") as folder:
            try:
                for number, rung in enumerate(rungs):
                    started = time.monotonic()
                    self._progress(f"rung {rung.name}", number, len(rungs))
                    try:
                        made = self._pieces(rung, pieces, Path(folder))
                        outcome, standing = self._run(self._build(rung, made), clean, below)
                    except ToolMissing as error:
                        yield RungOutcome(rung.name, Verdict.SKIPPED, str(error).partition("\n")[0])
                        continue
                    except Exception as error:  # whatever compiled code raises: the other rungs are still of interest
                        text = f"{type(error).__name__}: {error}".partition("\n")[0]
                        yield RungOutcome(rung.name, Verdict.FAILED, text)
                        continue
                    pieces = made
                    for passed in _no_longer_needed(outcome, clean, below):
                        passed.close()
                    below = standing
                    clean = standing if outcome.is_clean else clean
                    yield replace(outcome, seconds=time.monotonic() - started)
            finally:
                below.close()
                clean.close()

    def _measure_noise(self, wider: torch.dtype) -> dict[Site, float]:
        exact = TransformersOracle(self.config, self._files, wider)
        return measure_noise(self._oracle.trace, exact.trace(self.texts, self._progress))

    def _pieces(self, rung: Rung, below: _Pieces | None, folder: Path) -> _Pieces:
        if rung.compiler is None:
            if below is None:
                raise ToolMissing("no rung below could compile pieces")
            return below
        compiler = rung.compiler(folder, torch.device(self.config.device))
        return _Pieces(compiler, self._captured.compile(compiler, self._progress))

    def _build(self, rung: Rung, pieces: _Pieces) -> _Built:
        log = CallLog(self._captured.planned.plan)
        graphs = self._captured.with_pieces(log.watched(pieces.compiled))
        config = config_of(rung, self.config, self._steps)
        runner = ProbedRunner(config, self._files, graphs, rung.adjust)
        if not self._steps:
            # Every rung has as many blocks as the lowest, or more.
            self._steps = plan_steps(self.texts, runner.runner.limits)
        return _Built(rung.name, runner, pieces, log)

    def _run(self, built: _Built, clean: _Standing, below: _Standing) -> tuple[RungOutcome, _Standing]:
        below_them = {standing.name: standing for standing in (self._oracle, clean, below)}
        watches = {name: Watch(name, self._limits) for name in below_them}
        pairs = [(standing.trace, watches[name]) for name, standing in below_them.items()]
        try:
            run = run_steps(built.runner, self._steps, self.texts, self._oracle.trace, pairs)
        except BaseException:
            built.runner.close()
            raise
        judgement = judge(
            watches[ORACLE],
            watches[clean.name],
            None if below is clean else Below(watches[below.name], below.first),
            by_oracle=self.config.quantization is None,
        )
        divergences: tuple[Divergence, ...] = ()
        if judgement.watch is not None:
            reference = below_them[judgement.watch.reference]
            places = judgement.watch.first_places
            divergences = tuple(self._divergence(built, reference, measured) for measured in places)
        outcome = RungOutcome(
            built.name,
            judgement.verdict,
            run.note,
            below.name,
            watches[below.name].largest,
            watches[ORACLE].largest,
            divergences,
            run.tokens,
        )
        first = divergences[0].measured if divergences else below.first
        return outcome, _Standing(built.name, run.trace, built, None if outcome.is_clean else first)

    def _divergence(self, built: _Built, reference: _Standing, measured: Measured) -> Divergence:
        self._progress(f"looking for the node in rung {built.name}", 0, 1)
        return Divergence(built.name, reference.name, measured, self._culprit(built, reference, measured))

    def _culprit(self, built: _Built, reference: _Standing, measured: Measured) -> Culprit:
        step = measured.place.step
        batch = self._steps[step]
        suspect = Suspect(
            built.calls(self._steps, step), built.pieces.compiled, built.pieces.compiler, built.runner.model
        )
        good = None
        if reference.built is not None:
            good = Good(reference.built.calls(self._steps, step), reference.built.runner.model)
        rows = RealRows(batch.num_scheduled_tokens, sum(request.samples for request in batch.requests))
        return find_culprit(measured.place.site, self._captured, suspect, good, rows, self._limits)


def _no_longer_needed(outcome: RungOutcome, clean: _Standing, below: _Standing) -> list[_Standing]:
    """Of the rungs that were kept, those that nothing above is compared with once the new one stands."""
    passed = [below] if below is not clean else []
    return [*passed, clean] if outcome.is_clean else passed
