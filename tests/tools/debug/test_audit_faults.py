"""Planted faults are found and named exactly, layer, slot, step and request, and nothing else is named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from audited_runners import GRAPH_SIZES, QUICK, TinyRunners, assert_named
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planted_faults import (
    Planted,
    buffer_moved,
    cache_rebound,
    compile_in_step,
    key_added,
    output_held,
    padding_leaking,
    plan_with_swapped_layers,
    plans_edited,
    registration_swapped,
    row_stale,
    slot_mapping_shifted,
    slot_overwritten,
    weight_moved,
    write_dropped,
)

from compiled_engine.ops.attention import PagedAttention
from compiled_engine_debug.audit.detectors import make_detectors
from compiled_engine_debug.audit.session import audit_runner
from graph_runners import new_runner

few = settings(max_examples=15)
graph_modes = st.sampled_from(["full", "full_and_piecewise", "full_decode_only"])
all_modes = st.sampled_from(["cpu", "none", "piecewise", "full", "full_and_piecewise"])
sizes = st.sampled_from([("llama", 2), ("llama", 4), ("gemma3", 3)])
steps = st.integers(0, 9)
places = st.integers(0, 100)


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRunners]:
    tiny = TinyRunners(tmp_path_factory.mktemp("faulty"))
    yield tiny
    tiny.close()


def layer_of(runners: TinyRunners, mode: str, size: tuple[str, int], place: int) -> str:
    names = list(runners.get(mode, *size).static_context)
    return names[place % len(names)]


@pytest.mark.slow
@few
@given(mode=graph_modes, size=sizes, step=steps, place=places, quietly=st.booleans())
def test_a_rebound_cache(
    runners: TinyRunners, mode: str, size: tuple[str, int], step: int, place: int, quietly: bool
) -> None:
    layer = layer_of(runners, mode, size, place)
    with cache_rebound(runners.get(mode, *size), layer, step=step, quietly=quietly) as planted:
        (finding,) = runners.audit(mode, *size).findings
    assert_named([finding], planted)
    assert finding.message.count("0x") == 2
    assert ("planted_faults.py" in finding.message) or quietly
    assert runners.audit(mode, *size).findings == ()


@few
@given(step=steps, place=places)
def test_a_moved_weight_and_a_moved_buffer(runners: TinyRunners, step: int, place: int) -> None:
    runner = runners.gpu("full_and_piecewise", "llama", 2)
    weights = sorted(runners.subject("full_and_piecewise", "llama", 2).model.weights)  # type: ignore[union-attr]
    for fault in (weight_moved(runner, weights[place % len(weights)], step=step), buffer_moved(runner, step=step)):
        with fault as planted:
            assert_named(runners.audit("full_and_piecewise", "llama", 2).findings, planted)


@pytest.mark.slow
@few
@given(mode=all_modes, size=sizes, place=places)
def test_two_registrations_swapped(runners: TinyRunners, mode: str, size: tuple[str, int], place: int) -> None:
    one = layer_of(runners, mode, size, place)
    other = layer_of(runners, mode, size, place + 1)
    with registration_swapped(runners.get(mode, *size), one, other) as planted:
        for fault in planted:
            fault.happened = True
        assert_named(runners.audit(mode, *size).findings, *planted)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "piecewise", "none"])
def test_two_layers_swapped_in_the_plan(runners: TinyRunners, mode: str) -> None:
    names = [f"model.layers.{index}.self_attn" for index in range(4)]
    one, other = names[1], names[3]
    with plans_edited(lambda plan: plan_with_swapped_layers(plan, one, other)):
        runner = new_runner(runners.model("llama", 4), mode, graph_sizes=GRAPH_SIZES)
    report = audit_runner(runner, runners.files("llama", 4), make_detectors(QUICK))
    runner.close()
    planted = [Planted("swapped-layers", layer=a, node=b, happened=True) for a, b in ((one, other), (other, one))]
    assert_named(report.findings, *planted)


@pytest.mark.slow
@few
@given(mode=all_modes, size=sizes, step=steps, place=places, mapped=st.booleans())
def test_an_overwritten_slot(
    runners: TinyRunners, mode: str, size: tuple[str, int], step: int, place: int, mapped: bool
) -> None:
    layer = layer_of(runners, mode, size, place)
    with slot_overwritten(runners.get(mode, *size), layer, step=step, mapped=mapped, place=place) as planted:
        findings = runners.audit(mode, *size).findings
    assume(planted.happened)
    assert_named(findings, planted)


@pytest.mark.slow
@few
@given(mode=all_modes, size=sizes, step=steps, place=places)
def test_a_dropped_write(runners: TinyRunners, mode: str, size: tuple[str, int], step: int, place: int) -> None:
    layer = layer_of(runners, mode, size, place)
    with write_dropped(runners.get(mode, *size), layer, step=step, place=place) as planted:
        findings = runners.audit(mode, *size).findings
    assert_named(findings, planted)
    assert "was not written" in findings[0].message


@pytest.mark.slow
@few
@given(mode=all_modes, size=sizes, step=steps, row=places)
def test_a_shifted_slot_mapping(runners: TinyRunners, mode: str, size: tuple[str, int], step: int, row: int) -> None:
    with slot_mapping_shifted(runners.get(mode, *size), step=step, row=row) as planted:
        assert_named(runners.audit(mode, *size).findings, planted)


@pytest.mark.slow
@few
@given(
    mode=st.sampled_from(["full", "full_and_piecewise", "none"]),
    array=st.sampled_from(["seq_lens", "positions", "block_tables"]),
    step=steps,
    row=places,
)
def test_a_stale_row_of_metadata(runners: TinyRunners, mode: str, array: str, step: int, row: int) -> None:
    with row_stale(runners.gpu(mode, "llama", 2), array, step=step, row=row) as planted:
        assert_named(runners.audit(mode, "llama", 2).findings, planted)


@pytest.mark.slow
@settings(max_examples=6)
@given(
    size=sizes, mode=graph_modes, num_requests=st.sampled_from([1, 3, 5, 6]), max_seq_len=st.sampled_from([16, 48, 96])
)
def test_a_key_that_nothing_is_dispatched_to(
    runners: TinyRunners, size: tuple[str, int], mode: str, num_requests: int, max_seq_len: int
) -> None:
    with key_added(num_requests, max_seq_len) as planted:
        runner = new_runner(runners.model(*size), mode, graph_sizes=GRAPH_SIZES)
    report = audit_runner(runner, runners.files(*size), make_detectors(QUICK))
    runner.close()
    assert_named(report.findings, planted)
    # Nothing follows from it, so the rest is looked at too.
    assert all(item.looks > 0 for item in report.detectors)


@pytest.mark.slow
@few
@given(mode=all_modes, size=sizes, step=steps, place=places)
def test_padding_that_leaks(runners: TinyRunners, mode: str, size: tuple[str, int], step: int, place: int) -> None:
    layer = layer_of(runners, mode, size, place)
    subject = runners.subject(mode, *size)
    with padding_leaking(runners.get(mode, *size), subject, layer, step=step) as planted:
        assert_named(runners.audit(mode, *size).findings, planted)


@few
@given(mode=st.sampled_from(["full", "piecewise", "full_and_piecewise"]), step=steps, whole=st.booleans())
def test_an_output_that_is_held(runners: TinyRunners, mode: str, step: int, whole: bool) -> None:
    with output_held(runners.gpu(mode, "llama", 2), step=step, whole=whole) as planted:
        findings = runners.audit(mode, "llama", 2).findings
    if not planted.happened:
        # A step too large for any graph hands nothing out.
        assert findings == ()
        return
    # Logits and hidden states are one output each.
    assert_named(findings, planted)


@few
@given(mode=all_modes, step=steps, place=places)
def test_a_compile_after_warm_up(runners: TinyRunners, mode: str, step: int, place: int) -> None:
    layer = layer_of(runners, mode, ("llama", 2), place)
    subject = runners.subject(mode, "llama", 2)
    with compile_in_step(runners.get(mode, "llama", 2), subject, layer, step=step) as planted:
        findings = runners.audit(mode, "llama", 2).findings
    assert_named(findings, planted)
    assert "planted_faults.py" in findings[0].message


def test_a_cache_in_the_memory_of_another(runners: TinyRunners) -> None:
    """Where nothing is captured no address is compared, and the overlap alone tells."""
    context = runners.get("cpu").static_context
    first, second, *_ = context.values()
    assert isinstance(second, PagedAttention)
    kept = second.kv_cache
    second._kv_cache = first.kv_cache
    try:
        findings = runners.audit("cpu").findings
    finally:
        second._kv_cache = kept
    planted = Planted("cache-alias", layer=first.layer_name, node=second.layer_name, happened=True)
    assert_named(findings, planted)


def test_a_model_whose_graphs_are_of_another(runners: TinyRunners, tmp_path: Path) -> None:
    """The other model has the same sizes and weights' names; only a constant in its pieces differs."""
    from tiny_models import write_tiny_model

    other = write_tiny_model(tmp_path / "other", "llama", num_hidden_layers=2, rms_norm_eps=0.5)
    runner = new_runner(other, "full_and_piecewise", graph_sizes=GRAPH_SIZES)
    report = audit_runner(runner, runners.files("llama", 2), make_detectors())
    runner.close()
    assert_named(report.findings, Planted("artifact-of-another-model", node="piece", happened=True))


def test_a_step_that_fails_leaves_no_output_behind(runners: TinyRunners) -> None:
    """Its error holds the frames of the step, which hold what graphs handed out: the next audit would name that."""
    runner = runners.gpu("piecewise", "llama", 2)
    with buffer_moved(runner, step=5):
        assert {item.detector for item in runners.audit("piecewise", "llama", 2).findings} == {"metadata-mismatch"}
    assert runners.audit("piecewise", "llama", 2).findings == ()
