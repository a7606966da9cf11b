"""Tiny runners of many kinds, made once for all tests of a module, and audits of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planted_faults import Planted

from compiled_engine.models import ModelFiles, find_model
from compiled_engine.runners.cpu import CpuRunner
from compiled_engine.runners.gpu import GpuRunner
from compiled_engine_debug.audit.detectors import NAMES, make_detectors
from compiled_engine_debug.audit.session import AuditReport, audit_runner
from compiled_engine_debug.audit.subject import Subject
from compiled_engine_debug.findings import Finding
from graph_runners import eager_runner, new_runner
from tiny_models import write_tiny_model

QUICK = tuple(name for name in NAMES if name != "artifact-of-another-model")
"""All but the detector that captures the model anew, which takes longer than all others together."""
GRAPH_SIZES = (2, 4, 16)


class TinyRunners:
    """Runners by architecture, number of layers and graph mode ("cpu": the CPU's own runner)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[tuple[str, int], Path] = {}
        self._runners: dict[tuple[str, int, str], CpuRunner | GpuRunner] = {}

    def model(self, architecture: str = "llama", num_layers: int = 3) -> Path:
        """The folder of a model."""
        place = (architecture, num_layers)
        if place not in self._models:
            settings: dict[str, Any] = {"n_layer" if architecture == "gpt2" else "num_hidden_layers": num_layers}
            if architecture == "gemma3":
                kinds = ["sliding_attention", "full_attention"] * num_layers
                settings["layer_types"] = kinds[:num_layers]
            folder = self._folder / f"{architecture}-{num_layers}"
            self._models[place] = write_tiny_model(folder, architecture, **settings)
        return self._models[place]

    def files(self, architecture: str = "llama", num_layers: int = 3) -> ModelFiles:
        """The model as the engine finds it."""
        return find_model(str(self.model(architecture, num_layers)))

    def get(self, mode: str, architecture: str = "llama", num_layers: int = 3) -> CpuRunner | GpuRunner:
        """A runner that tests share: who changes it puts it back."""
        place = (architecture, num_layers, mode)
        if place not in self._runners:
            folder = self.model(architecture, num_layers)
            self._runners[place] = (
                eager_runner(folder) if mode == "cpu" else new_runner(folder, mode, graph_sizes=GRAPH_SIZES)
            )
        return self._runners[place]

    def gpu(self, mode: str, architecture: str = "llama", num_layers: int = 3) -> GpuRunner:
        """The same, for modes with staged steps."""
        runner = self.get(mode, architecture, num_layers)
        assert isinstance(runner, GpuRunner)
        return runner

    def subject(self, mode: str, architecture: str = "llama", num_layers: int = 3) -> Subject:
        """The same, as detectors see it."""
        return Subject.of(self.get(mode, architecture, num_layers), self.files(architecture, num_layers))

    def audit(
        self, mode: str, architecture: str = "llama", num_layers: int = 3, names: Sequence[str] = QUICK
    ) -> AuditReport:
        """An audit of the shared runner."""
        files = self.files(architecture, num_layers)
        return audit_runner(self.get(mode, architecture, num_layers), files, make_detectors(names))

    def close(self) -> None:
        """Close all runners."""
        for runner in self._runners.values():
            runner.close()


def assert_named(findings: Sequence[Finding], *planted: Planted) -> None:
    """Every fault has happened and is named exactly, and nothing else is named."""
    assert all(fault.happened for fault in planted)
    assert sorted(map(_place, findings)) == sorted(map(_place, planted)), list(map(str, findings))
    for finding, fault in zip(sorted(findings, key=_place), sorted(planted, key=_place), strict=True):
        for field in ("key", "node"):
            wanted = getattr(fault, field)
            assert wanted is None or getattr(finding, field) == wanted, str(finding)


def _place(found: Finding | Planted) -> tuple[str, ...]:
    return tuple(str(getattr(found, field)) for field in ("detector", "step", "layer", "request", "slot"))
