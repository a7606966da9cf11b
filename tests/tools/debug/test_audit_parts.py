"""The parts of the audit, each against what was worked out by hand, and the command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from audited_runners import QUICK, TinyRunners
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_faults import cache_rebound, patched

from compiled_engine.compile.graphs import graphed_model
from compiled_engine.compile.graphs.keys import GraphKey, GraphKind
from compiled_engine.compile.store_entry import StoredModel
from compiled_engine.config import EngineConfig
from compiled_engine.errors import ConfigError, LogitsError
from compiled_engine.ops.sampling import greedy_batch
from compiled_engine.runners.batch import ScheduledBatch, ScheduledRequest
from compiled_engine_debug.audit import artifact
from compiled_engine_debug.audit.artifact import ArtifactOfAnotherModel
from compiled_engine_debug.audit.detectors import NAMES, make_detectors
from compiled_engine_debug.audit.expected import expected_step
from compiled_engine_debug.audit.liveness import live_slots
from compiled_engine_debug.audit.runner import AuditedRunner
from compiled_engine_debug.audit.session import audit_runner, run_audit
from compiled_engine_debug.audit.slots import slot_sums
from compiled_engine_debug.audit.subject import shape_of_batch
from compiled_engine_debug.audit.unused_graph import UnusedGraph
from compiled_engine_debug.cli import main
from graph_runners import SETTINGS
from tiny_models import edit_config, write_tiny_model

PREFILL = ScheduledRequest("a", (7, 8, 9), 2, ((3, 5),), samples=True)
DECODE = ScheduledRequest("b", (6,), 4, ((2, 4),), samples=True)
CHUNK = ScheduledRequest("c", (5, 5), 0, ((9,),), samples=False)
BATCH = ScheduledBatch((PREFILL, DECODE, CHUNK), greedy_batch(2))
DECODES = ScheduledBatch((DECODE, replace(DECODE, request_id="d", block_tables=((7, 8),))), greedy_batch(2))


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRunners]:
    tiny = TinyRunners(tmp_path_factory.mktemp("parts"))
    yield tiny
    tiny.close()


def test_a_step_is_laid_out_as_by_hand() -> None:
    step = expected_step(BATCH, 4, None)
    assert step.arrays == {
        "input_ids": [7, 8, 9, 6, 5, 5],
        "positions": [2, 3, 4, 4, 0, 1],
        "query_start_loc": [0, 3, 4, 6],
        "seq_lens": [5, 5, 2],
        "logits_indices": [2, 3],
        "slot_mapping of group 0": [14, 15, 20, 16, 36, 37],
    }
    assert step.block_tables == (((3, 5), (2, 4), (9,)),)
    assert step.token_owners == ("a", "a", "a", "b", "c", "c")
    assert [step.owner("query_start_loc", index) for index in range(4)] == ["a", "a", "b", "c"]
    assert [step.owner("logits_indices", index) for index in range(2)] == ["a", "b"]


def test_padding_is_laid_out_as_by_hand() -> None:
    mixed = expected_step(BATCH, 4, GraphKey(GraphKind.FULL, 8, 5, None, 64, 1)).arrays
    assert mixed["input_ids"][6:] == mixed["positions"][6:] == mixed["slot_mapping of group 0"][6:] == [0, 0]
    assert (mixed["query_start_loc"], mixed["seq_lens"]) == ([0, 3, 4, 6, 6, 6], [5, 5, 2, 0, 0])
    assert mixed["logits_indices"] == [2, 3, 0, 0, 0]

    pieces = expected_step(BATCH, 4, GraphKey(GraphKind.PIECEWISE, 8, 0, None, 0, 0)).arrays
    assert len(pieces["input_ids"]) == 8
    assert (pieces["query_start_loc"], pieces["seq_lens"]) == ([0, 3, 4, 6], [5, 5, 2])

    decode = expected_step(DECODES, 4, GraphKey(GraphKind.FULL, 4, 4, 1, 64, 1))
    assert (decode.arrays["query_start_loc"], decode.arrays["seq_lens"]) == ([0, 1, 2, 3, 4], [5, 5, 1, 1])
    assert decode.request_owners == ("b", "d", None, None)
    assert decode.block_tables == (((2, 4), (7, 8), (), ()),)


def test_the_shape_of_a_batch() -> None:
    shape = shape_of_batch(BATCH)
    assert (shape.num_tokens, shape.num_requests, shape.max_query_len, shape.max_seq_len) == (6, 3, 3, 5)
    assert not shape.is_uniform
    assert shape_of_batch(DECODES).is_decode


def test_a_slot_is_live_from_its_write_to_its_last_read() -> None:
    """Blocks of 4 tokens. Request a writes positions 0 to 4, then 5; request b takes its second block over."""
    first = ScheduledRequest("a", (9,) * 5, 0, ((1, 2),), samples=True)
    second = ScheduledRequest("a", (9,), 5, ((1, 2),), samples=True)
    other = ScheduledRequest("b", (9,), 0, ((2,),), samples=True)
    batches = [ScheduledBatch((request,), greedy_batch(1)) for request in (first, second, other)]
    assert live_slots(batches, 4, [None]) == [(set(),), ({4, 5, 6, 7, 8},), (set(),)]
    # A window of 2 positions: the query at position 5 sees 4 and itself.
    assert live_slots(batches, 4, [2]) == [(set(),), ({8},), (set(),)]


@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    slot=st.integers(0, 5),
    element=st.integers(0, 11),
    bit=st.integers(0, 15),
)
def test_a_changed_bit_changes_its_slots_sum_alone(dtype: torch.dtype, slot: int, element: int, bit: int) -> None:
    slots = torch.randn(6, 2, 2, 3).to(dtype)
    slots[0, 0, 0, 0] = torch.nan
    before = slot_sums(slots)
    words = slots.view(torch.int32 if dtype is torch.float32 else torch.int16).reshape(6, 12)
    words[slot, element] ^= 1 << min(bit, 14)
    assert torch.nonzero(slot_sums(slots) != before).flatten().tolist() == [slot]


def test_two_exchanged_halves_change_a_slots_sum() -> None:
    slots = torch.randn(3, 2, 2, 4)
    exchanged = slots.flip(1).contiguous()
    assert (slot_sums(slots) != slot_sums(exchanged)).all()


def test_attention_in_a_piecewise_graph_is_found_at_the_start(runners: TinyRunners) -> None:
    """A cut that is not made leaves attention inside, which the engine refuses to capture."""

    def uncut(instructions: object) -> tuple[object, ...]:
        return (tuple(instructions),)  # type: ignore[arg-type]

    settings = {**SETTINGS, "graph_mode": "piecewise", "model": str(runners.model())}
    with patched(graphed_model, "cut_at_attention", uncut):
        report = run_audit(EngineConfig(**settings), make_detectors(["capture-boundary", "metadata-mismatch"]))
    (finding,) = report.findings
    assert finding.detector == "capture-boundary"
    assert "model.layers.0.self_attn" in finding.message
    assert [item.skipped is None for item in report.detectors] == [True, False]


@pytest.mark.parametrize(
    ("mode", "edit", "says"),
    [
        ("piecewise", lambda names: (*names, "attention of layer 'model.layers.1.self_attn'"), "inside it"),
        ("full", lambda names: names[:1] + names[2:], "lacks attention"),
        ("full", lambda names: (names[1], names[0], *names[2:]), "another order"),
        ("full", lambda names: (*names, "attention of layer 'model.layers.1.self_attn'"), "inside it"),
    ],
)
def test_launches_that_are_not_the_plans(runners: TinyRunners, mode: str, edit: object, says: str) -> None:
    backend = runners.subject(mode).backend
    assert backend is not None
    kept = backend._graphs[next(iter(backend._graphs))]
    original = kept.record
    kept.record = replace(original, launches=edit(original.launches))  # type: ignore[operator]
    try:
        (finding,) = runners.audit(mode, names=["capture-boundary"]).findings
    finally:
        kept.record = original
    assert says in finding.message
    assert finding.key == str(original.part.key)


def test_a_graph_that_was_not_captured_and_one_that_was_not_declared(runners: TinyRunners) -> None:
    runner = runners.gpu("full_decode_only")
    last = runner.dispatcher.keys()[-1]
    backend = runners.subject("full_decode_only").backend
    assert backend is not None
    undeclared = GraphKey(GraphKind.FULL, 3, 3, 1, 96, 1)
    graphs = dict(backend._graphs)
    try:
        (part, graph) = next((part, graph) for part, graph in graphs.items() if part.key == last)
        del backend._graphs[part]
        other = replace(part, key=undeclared)
        backend._graphs[other] = replace(graph, record=replace(graph.record, part=other))
        findings = runners.audit("full_decode_only", names=["unused-graph"]).findings
    finally:
        backend._graphs.clear()
        backend._graphs.update(graphs)
    assert [finding.key for finding in findings[:2]] == [str(last), str(undeclared)]
    assert "was not captured" in findings[0].message
    assert "not declared" in findings[1].message


def test_strict_names_what_the_workload_leaves(runners: TinyRunners) -> None:
    report = audit_runner(runners.gpu("full"), runners.files(), [UnusedGraph(strict=True)], lambda engine: None)
    assert [finding.key for finding in report.findings] == [str(key) for key in runners.subject("full").keys]


@pytest.mark.parametrize("names", [["metadata-mismatch"], ["output-kept", "cache-alias"]])
def test_any_choice_of_detectors_sees_a_step_of_every_graph(runners: TinyRunners, names: list[str]) -> None:
    alone = audit_runner(runners.gpu("full"), runners.files(), make_detectors(names), lambda engine: None)
    assert alone.num_steps >= len(runners.subject("full").keys) > 0
    assert alone.findings == ()


def test_a_fault_in_a_step_made_for_a_graph_hides_nothing_found_before(runners: TinyRunners) -> None:
    runner = runners.gpu("full")
    layer = next(iter(runner.static_context))
    detectors = [UnusedGraph(strict=True), *make_detectors(["address-changed"])]
    with cache_rebound(runner, layer, step=0, quietly=False):
        report = audit_runner(runner, runners.files(), detectors, lambda engine: None)
    found = [finding.detector for finding in report.findings]
    assert found == ["unused-graph"] * len(runners.subject("full").keys) + ["address-changed"]


def test_an_error_that_no_detector_explains_goes_on(runners: TinyRunners) -> None:
    subject = runners.subject("cpu")

    def fail(batch: ScheduledBatch) -> None:
        raise LogitsError("no token")

    detectors = make_detectors(QUICK)
    with (
        patched(subject.runner, "execute", fail),
        AuditedRunner(subject, detectors) as audited,
        pytest.raises(LogitsError),
    ):
        audited.execute(ScheduledBatch((replace(CHUNK, block_tables=((9,),)),), greedy_batch(0)))


def test_stored_graphs_of_another_model(runners: TinyRunners, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a store holds is looked at before it is loaded."""
    model = runners.subject("cpu", "llama", 4).model
    assert model is not None
    expected = artifact.Expected.of(EngineConfig(dtype="float32", store=False), runners.files())
    stored = StoredModel(model.plan, {}, expected.constants, {}, None, "GemmaForCausalLM")
    monkeypatch.setattr(artifact, "lookup", lambda config, files: (None, stored))
    found = list(ArtifactOfAnotherModel().look_at_store(EngineConfig(dtype="float32"), runners.files()))
    assert [finding.node for finding in found] == ["layer", None]
    assert found[0].layer == "model.layers.3.self_attn"
    assert "GemmaForCausalLM" in found[1].message

    name = next(iter(expected.constants))
    constants = {**expected.constants, name: expected.constants[name] * 2}
    stored = StoredModel(expected.plan, {}, constants, {}, None, expected.class_name)  # type: ignore[arg-type]
    (finding,) = ArtifactOfAnotherModel().look_at_store(EngineConfig(dtype="float32"), runners.files())
    assert finding.node == name


@pytest.mark.slow
@settings(max_examples=6)
@given(stored=st.integers(2, 4), wanted=st.integers(2, 4))
def test_stored_graphs_of_a_model_of_another_depth(runners: TinyRunners, stored: int, wanted: int) -> None:
    """The first layer that one of the two does not have is named."""
    model = runners.subject("cpu", "llama", stored).model
    assert model is not None
    files = runners.files("llama", wanted)
    expected = artifact.Expected.of(EngineConfig(dtype="float32", store=False), files)
    held = StoredModel(model.plan, {}, expected.constants, {}, None, expected.class_name)
    with patched(artifact, "lookup", lambda config, files: (None, held)):
        found = list(ArtifactOfAnotherModel().look_at_store(EngineConfig(dtype="float32"), files))
    layers = [finding.layer for finding in found]
    assert layers == ([] if stored == wanted else [f"model.layers.{min(stored, wanted)}.self_attn"])


def test_an_unknown_detector_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no detector 'addresses': choose among artifact"):
        make_detectors(["addresses"])


ARGUMENTS = ["--piece-compiler", "eager", "--dtype", "float32", "--max-model-len", "96", "--block-size", "4"]


def test_the_command_tells_and_exits_with_0(runners: TinyRunners, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(runners.model()), *ARGUMENTS]) == 0
    output = capsys.readouterr().out
    for name in NAMES:
        assert name in output


def test_the_command_writes_json(runners: TinyRunners, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--json", "--detectors", "unused-graph,cache-alias", "--graph-sizes", "2,4"]
    assert main(["audit", "--model", str(runners.model()), *ARGUMENTS, *options, "--max-num-batched-tokens", "16"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [item["name"] for item in report["detectors"]] == ["unused-graph", "cache-alias"]
    assert report["num_steps"] > 10
    assert report["findings"] == []


def test_the_commands_other_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_model(tmp_path / "model", num_hidden_layers=1)
    strict = ["--strict", "--detectors", "unused-graph", "--graph-sizes", ",".join(map(str, range(1, 25)))]
    limits = ["--max-num-seqs", "24", "--max-num-batched-tokens", "24", "--graph-mode", "full_decode_only"]
    assert main(["audit", str(folder), *ARGUMENTS, *strict, *limits]) == 1
    assert "no step of the workload used it" in capsys.readouterr().out
    assert main(["audit", str(folder), "--detectors", "nothing"]) == 2
    assert main(["audit", str(folder), "--max-num-seqs", "0"]) == 2
    edit_config(folder, model_type="unheard_of")
    assert main(["audit", str(folder), *ARGUMENTS]) == 3
    assert "the audit could not be done" in capsys.readouterr().err
