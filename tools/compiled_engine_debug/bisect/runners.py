"""Runners for the rungs: the engine's own, with given pieces and with probes in their layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from compiled_engine.compile.capture import CapturedGraph, capture
from compiled_engine.compile.counters import CompileCounters
from compiled_engine.compile.ledger import Ledger
from compiled_engine.compile.model import CompiledModel
from compiled_engine.compile.opening import CompiledPiece
from compiled_engine.compile.pieces import PieceCompiler
from compiled_engine.compile.pipeline import PlannedGraph, Progress, compile_pieces, plan_model
from compiled_engine.compile.weights import WeightRecipe, materialize
from compiled_engine.config import EngineConfig
from compiled_engine.errors import LogitsError
from compiled_engine.models import Checkpoint, ModelDefinition, ModelFiles, build_definition, resolve_dtype
from compiled_engine.runners.batch import ScheduledBatch, StepOutput
from compiled_engine.runners.cpu import CpuRunner
from compiled_engine.runners.gpu import GpuRunner
from compiled_engine.runners.loading import CheckpointWeights
from compiled_engine.runners.precompile import RunnableGraphs
from compiled_engine_debug.bisect.probes import Probes, ProbeSizes
from compiled_engine_debug.bisect.trace import Rows

PlanRunner = CpuRunner | GpuRunner
"""The runners that run plans."""

Adjustment = Callable[[PlanRunner], None]
"""Changes a runner whose layers, weights and caches are there and which has captured nothing yet."""


class CapturedModel:
    """The model captured once for all rungs: its plan, its pieces, and what its weights are called."""

    def __init__(self, config: EngineConfig, files: ModelFiles) -> None:
        """Raises ``CaptureError`` for a model that does not fit into one graph, and ``ModelError``."""
        self._config = config
        self._files = files
        self.device = torch.device(config.device)
        definition = self._definition()
        self.planned: PlannedGraph = plan_model(definition.module, definition.layers, self.device, CompileCounters())
        self._constants = dict(definition.expected.buffers)
        self._names = dict(definition.weight_names)
        self._max_position = definition.max_position

    def capture(self) -> CapturedGraph:
        """The model's graph before any pass, captured again: few ladders need it. Raises ``CaptureError``."""
        return capture(self._definition().module, self.device)

    def weights(self, recipes: Iterable[WeightRecipe]) -> dict[str, torch.Tensor]:
        """Weights as runners make them from the checkpoint, by key."""
        head = {name.removeprefix("weight:") for name in self.planned.plan.head.inputs}
        with Checkpoint(self._files) as checkpoint:
            source = CheckpointWeights(self._names, self._constants, checkpoint)
            return materialize(recipes, source, self._config.quantization, head, self.device)

    def compile(self, compiler: PieceCompiler, progress: Progress) -> dict[str, CompiledPiece]:
        """Every unlike piece of the plan, by key. Raises ``CaptureError``."""
        return compile_pieces(self.planned, compiler, CompileCounters(), progress)

    def _definition(self) -> ModelDefinition:
        definition = build_definition(
            self._files, resolve_dtype(self._config.dtype, self._files, self._config.device_type)
        )
        # Parameters hold nothing yet; capture asks where they are.
        definition.module.to(self.device)
        return definition

    def with_pieces(self, pieces: Mapping[str, CompiledPiece]) -> RunnableGraphs:
        """What a runner needs to run ``pieces``."""
        return RunnableGraphs(self.planned.plan, pieces, self._constants, self._names, self._max_position)


class ProbedRunner:
    """An engine's runner on ``graphs``, probed. ``adjust`` is applied before the probes are put in.

    On the CPU without captured graphs it is a ``CpuRunner``, else a ``GpuRunner``.
    """

    def __init__(
        self, config: EngineConfig, files: ModelFiles, graphs: RunnableGraphs, adjust: Adjustment | None
    ) -> None:
        self.config = config
        self._adjust = adjust
        self.runner: PlanRunner = self._build(files, graphs)

    @property
    def model(self) -> CompiledModel:
        """What runs the plan."""
        return model_of(self.runner)

    def execute(self, batch: ScheduledBatch) -> StepOutput | None:
        """Run one step; None where its logits are such that no token can be chosen, which the probes show."""
        try:
            return self.runner.execute(batch)
        except LogitsError:
            return None

    def read(self, step: int, batch: ScheduledBatch) -> Iterator[Rows]:
        """What the step that has just run computed: see ``Probes.read``."""
        return self._probes.read(step, batch, self.config.block_size)

    def close(self) -> None:
        """See ``Runner.close``."""
        self.runner.close()

    def _build(self, files: ModelFiles, graphs: RunnableGraphs) -> PlanRunner:
        if self.config.captures_graphs or self.config.device_type != "cpu":
            return _PreparedGpuRunner(self.config, files, graphs, self._prepare)
        runner = CpuRunner(self.config, files, Ledger(), _in_silence, graphs)
        self._prepare(runner)
        return runner

    def _prepare(self, runner: PlanRunner) -> None:
        if self._adjust is not None:
            self._adjust(runner)
        config = self.config
        rows = max(config.max_num_batched_tokens, config.max_num_seqs)
        device = torch.device(config.device)
        sizes = ProbeSizes(rows, config.max_num_seqs)
        self._probes = Probes(model_of(runner), runner.static_context, runner.dtype, device, sizes)


class _PreparedGpuRunner(GpuRunner):
    """Lets the ladder in between loading and capturing: what is in place then is captured too."""

    def __init__(self, config: EngineConfig, files: ModelFiles, graphs: RunnableGraphs, prepare: Adjustment) -> None:
        self._prepare = prepare
        super().__init__(config, files, Ledger(), _in_silence, graphs)

    def _warm_up(self) -> None:
        self._prepare(self)
        super()._warm_up()


def model_of(runner: PlanRunner) -> CompiledModel:
    """What runs the plan of ``runner``, which must be open."""
    if isinstance(runner, CpuRunner):
        return runner.model
    if runner.graphed is None:
        raise ValueError("the runner is closed")
    return runner.graphed.model


def without_graphs(config: EngineConfig) -> EngineConfig:
    """``config`` for a rung that captures nothing."""
    return replace(config, graph_mode="none", graph_sizes=None, max_graph_size=None)


def _in_silence(*arguments: Any) -> None:
    """Progress of what takes no time here."""
