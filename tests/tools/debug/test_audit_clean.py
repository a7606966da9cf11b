"""A sound engine has no findings, on every runner, and every detector has looked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from audited_runners import TinyRunners

from compiled_engine_debug.audit.detectors import NAMES, make_detectors
from compiled_engine_debug.audit.session import audit_runner
from graph_runners import MODES

NEED_GRAPHS = ("capture-boundary", "address-changed", "output-kept")


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRunners]:
    tiny = TinyRunners(tmp_path_factory.mktemp("audited"))
    yield tiny
    tiny.close()


@pytest.mark.parametrize("mode", [*MODES, "cpu"])
def test_nothing_is_found_in_a_sound_engine(runners: TinyRunners, mode: str) -> None:
    report = runners.audit(mode, names=NAMES)
    assert report.findings == ()
    assert report.num_steps > 15
    assert [item.name for item in report.detectors] == list(NAMES)
    for item in report.detectors:
        without_graphs = mode in ("none", "cpu") and item.name in (*NEED_GRAPHS, "unused-graph")
        assert (item.skipped is not None) == without_graphs
        assert (item.looks > 0) != without_graphs


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "num_layers"), [("gemma3", 4), ("gpt2", 2), ("qwen3", 2)])
def test_nothing_is_found_with_other_models(runners: TinyRunners, architecture: str, num_layers: int) -> None:
    """Gemma 3 has two cache groups, one of them with a sliding window that prompts outgrow."""
    for mode in ("full_and_piecewise", "cpu"):
        assert runners.audit(mode, architecture, num_layers).findings == ()


def test_the_runner_is_left_as_it_was(runners: TinyRunners) -> None:
    runner = runners.gpu("full")
    layers = [layer.computation for layer in runner.static_context.values()]  # type: ignore[attr-defined]
    weights = {name: tensor.clone() for name, tensor in runners.subject("full").model.weights.items()}  # type: ignore[union-attr]
    assert runner.graphed is not None
    attributes = [set(vars(item)) for item in (runner, runner.graphed.model, runner.graphed.backend)]

    runners.audit("full")

    assert [layer.computation for layer in runner.static_context.values()] == layers  # type: ignore[attr-defined]
    assert [set(vars(item)) for item in (runner, runner.graphed.model, runner.graphed.backend)] == attributes
    for name, tensor in runners.subject("full").model.weights.items():  # type: ignore[union-attr]
        assert tensor.equal(weights[name])


def test_every_graph_is_replayed(runners: TinyRunners) -> None:
    """Also those that the workload itself has no step for."""
    detectors = make_detectors(["unused-graph"])
    audit_runner(runners.gpu("full"), runners.files(), detectors)
    (watch,) = detectors
    assert watch.unused(runners.subject("full")) == ()  # type: ignore[attr-defined]
