"""What captured graphs use, against what they declare: on a stand-in for the driver, and on a runner."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import pytest
import torch

from compiled_engine.compile.graphs.backend import Captured, CapturedWork, GraphPart, GraphRecord
from compiled_engine.compile.graphs.bindings import Binding, Role
from compiled_engine.compile.graphs.cuda import CaptureWatcher
from compiled_engine.compile.graphs.keys import GraphKey, GraphKind
from compiled_engine.compile.graphs.recording import RecordingBackend
from compiled_engine.compile.launch import Launch, Work
from compiled_engine.errors import CaptureError, ContextStateError
from compiled_engine.runners.gpu import GpuRunner
from compiled_engine_debug.cuda_bindings.driver import GraphReader
from compiled_engine_debug.cuda_bindings.expected import Expected, expected_by_launch, known_ranges, range_of
from compiled_engine_debug.cuda_bindings.parameters import AddressRange
from compiled_engine_debug.cuda_bindings.prove import ProvenBindings, prove_bindings
from compiled_engine_debug.cuda_bindings.recapture import prove_runner
from compiled_engine_debug.cuda_bindings.watch import LaunchWatcher, WatchedGraph
from fake_cuda_driver import FakeCudaDriver
from gpu_checks import bindings as section
from gpu_checks.report import Verdict
from graph_runners import engine_of, make_prompts, new_runner, write
from tiny_models import write_tiny_model

BASE = 0x7F00_0000_0000


def word(value: int) -> bytes:
    return struct.pack("<Q", value)


@pytest.fixture
def fake() -> FakeCudaDriver:
    return FakeCudaDriver(allocations=[(BASE, 0x10000)])


@pytest.fixture
def reader(fake: FakeCudaDriver) -> GraphReader:
    return GraphReader(fake)  # type: ignore[arg-type]


KEY = GraphKey(GraphKind.FULL, 4, 4, 1, 64, 1)
OTHER_KEY = GraphKey(GraphKind.PIECEWISE, 16, 0, None, 0, 0)
PART = GraphPart(KEY)
CACHE, WEIGHT = Role.CACHE.value, Role.WEIGHT.value
# 0x1000 bytes of each cache, then weights of 0x100 bytes.
PLACES = {"layers.0": 0, "layers.1": 0x1000, "up.0": 0x2000, "up.1": 0x2100, "seq_lens": 0x3000}
EXPECTED = {
    "attention 0": Expected(frozenset({CACHE}), frozenset({(CACHE, "layers.0")})),
    "attention 1": Expected(frozenset({CACHE}), frozenset({(CACHE, "layers.1")})),
    "piece 0": Expected(frozenset({CACHE, WEIGHT}), frozenset({(WEIGHT, "up.0")})),
    "piece 1": Expected(frozenset({CACHE, WEIGHT}), frozenset({(WEIGHT, "up.1")})),
}
LAUNCHES = tuple(EXPECTED)


def at(name: str) -> int:
    return BASE + PLACES[name]


def binding(role: Role, name: str, num_elements: int) -> Binding:
    return Binding(role, name, at(name), 4 * num_elements, (num_elements,), (1,), torch.float32, 1)


DECLARED = (
    binding(Role.CACHE, "layers.0", 1024),
    binding(Role.CACHE, "layers.1", 1024),
    binding(Role.WEIGHT, "up.0", 64),
    binding(Role.WEIGHT, "up.1", 64),
    binding(Role.METADATA, "seq_lens", 4),
)


def arguments(**changed: str) -> list[tuple[str, str, tuple[str, ...]]]:
    """Launch, kernel and the names of its pointers. ``changed``: other names for some."""
    plain = [
        ("piece 0", "triton_up", ("up.0",)),
        ("attention 0", "attend", ("seq_lens", "layers.0")),
        ("piece 1", "triton_up", ("up.1",)),
        ("attention 1", "attend", ("seq_lens", "layers.1")),
    ]
    swap = {name.replace("_", "."): to for name, to in changed.items()}
    return [(launch, kernel, tuple(swap.get(name, name) for name in names)) for launch, kernel, names in plain]


def captured(
    fake: FakeCudaDriver, launches: Sequence[tuple[str, str, tuple[str, ...]]], part: GraphPart = PART
) -> WatchedGraph:
    """A graph of kernels that take an integer, then their pointers."""
    of_node = {
        fake.kernel(kernel, struct.pack("<i", 4), *(word(at(name)) for name in names)): launch
        for launch, kernel, names in launches
    }
    return WatchedGraph(part, fake.graph(*of_node), of_node)


def prove(
    reader: GraphReader,
    graph: WatchedGraph,
    declared: tuple[Binding, ...] = DECLARED,
    ranges: Sequence[Binding] = (),
    launches: tuple[str, ...] = LAUNCHES,
) -> ProvenBindings:
    record = GraphRecord(graph.part, declared, launches, 0, 0.0)
    known = [range_of(item) for item in ranges]
    (proven,) = prove_bindings([record], {graph.part: graph}, reader, known, EXPECTED)
    return proven


def test_a_right_graph_proves_all_that_it_declares(fake: FakeCudaDriver, reader: GraphReader) -> None:
    proven = prove(reader, captured(fake, arguments()), ranges=DECLARED)
    assert proven.findings() == ()
    assert {item.name for item in proven.proven} == set(PLACES)
    assert len(proven.uses) == 6


def test_swapped_caches_are_named_both_ways(fake: FakeCudaDriver, reader: GraphReader) -> None:
    """All that is declared is used, and nothing else: only the launches tell."""
    proven = prove(reader, captured(fake, arguments(layers_0="layers.1", layers_1="layers.0")))
    assert (proven.unproven, proven.undeclared) == ((), ())
    assert [(use.launch, use.meant[0].name) for use in proven.foreign] == [
        ("attention 0", "layers.1"),
        ("attention 1", "layers.0"),
    ]
    assert [(item.launch, item.name) for item in proven.unused] == [
        ("attention 0", "layers.0"),
        ("attention 1", "layers.1"),
    ]
    first = proven.findings()[0]
    assert (first.layer, first.key, first.node) == ("layers.1", str(KEY), "1 attend")
    assert first.message == (
        "another's memory: attend (part 0, node 1 in 'attention 0') is given KV cache of layer 'layers.1': parameter 2 "
        f"is {at('layers.1'):#x}"
    )


def test_a_wrong_weight_is_named_both_ways(fake: FakeCudaDriver, reader: GraphReader) -> None:
    proven = prove(reader, captured(fake, arguments(up_0="up.1")))
    assert [item.name for item in proven.unproven] == ["up.0"]
    messages = [finding.message for finding in proven.findings()]
    assert messages[0] == "weight 'up.0' is declared, and no node of the graph is given an address in it"
    assert "triton_up (part 0, node 0 in 'piece 0') is given weight 'up.1': parameter 1" in messages[1]
    assert messages[2:] == ["'piece 0' (part 0) is not given weight 'up.0'"]


def test_a_launch_that_made_no_node_lacks_what_it_should_use(fake: FakeCudaDriver, reader: GraphReader) -> None:
    proven = prove(reader, captured(fake, [*arguments()[:2], *arguments()[3:], ("other", "triton_up", ("up.1",))]))
    assert [(item.launch, item.name) for item in proven.unused] == [("piece 1", "up.1")]
    assert (proven.unproven, proven.foreign) == ((), ())


def test_without_known_launches_only_the_whole_is_compared(fake: FakeCudaDriver, reader: GraphReader) -> None:
    graph = WatchedGraph(PART, captured(fake, arguments(layers_0="layers.1")).graph, {})
    proven = prove(reader, graph)
    assert (proven.foreign, proven.unused) == ((), ())
    assert [item.name for item in proven.unproven] == ["layers.0"]
    assert {use.launch for use in proven.uses} == {None}


def test_a_piece_that_gets_a_cache_is_named(fake: FakeCudaDriver, reader: GraphReader) -> None:
    proven = prove(reader, captured(fake, [*arguments(), ("piece 0", "copy_kernel", ("layers.0",))]))
    assert [(use.launch, use.node.name) for use in proven.foreign] == [("piece 0", "copy_kernel")]


def test_known_memory_that_is_not_declared_is_named(fake: FakeCudaDriver, reader: GraphReader) -> None:
    """The interior of another layer's cache, as a view would have it."""
    undeclared = binding(Role.CACHE, "layers.1", 1024)
    without = tuple(item for item in DECLARED if item.name != "layers.1")
    graph = captured(fake, arguments())
    proven = prove(reader, graph, declared=without, ranges=[undeclared])
    (use,) = proven.undeclared
    assert (use.launch, use.meant[0].name, use.node.name) == ("attention 1", "layers.1", "attend")
    assert proven.foreign == ()
    (finding,) = proven.findings()
    assert finding.message.startswith("not declared: attend (part 0, node 3 in 'attention 1')")
    assert (
        prove(reader, graph, declared=without).findings()[0].message.startswith("'attention 1' (part 0) is not given")
    )


def test_memory_that_has_moved_since_the_capture_is_still_the_declared(
    fake: FakeCudaDriver, reader: GraphReader
) -> None:
    moved = AddressRange(CACHE, "layers.0", BASE + 0x8000, 4096)
    record = GraphRecord(PART, DECLARED, LAUNCHES, 0, 0.0)
    graph = captured(fake, arguments())
    (proven,) = prove_bindings([record], {PART: graph}, reader, [moved], EXPECTED)
    assert proven.findings() == ()
    PLACES["moved"] = 0x8010
    try:
        graph = captured(fake, arguments(layers_0="moved"))
    finally:
        del PLACES["moved"]
    (proven,) = prove_bindings([record], {PART: graph}, reader, [moved], EXPECTED)
    assert [use.found.address for use in proven.undeclared] == [BASE + 0x8010]
    assert [(item.name, item.address) for item in proven.unproven] == [("layers.0", at("layers.0"))]


def test_numbers_that_may_be_addresses_are_weak_and_prove_nothing(fake: FakeCudaDriver, reader: GraphReader) -> None:
    on_host = Binding(Role.METADATA, "on the host", 0x5500_0000, 64, (16,), (1,), torch.float32, 1)
    packed = b"\x01" + word(at("up.0"))
    graph = WatchedGraph(PART, fake.graph(fake.kernel("packed", packed, word(0x5500_0010))), {})
    proven = prove(reader, graph, declared=(DECLARED[2], on_host))
    assert [(use.doubt, use.meant[0].name) for use in proven.weak] == [
        ("not where a pointer is aligned", "up.0"),
        ("not in the driver's memory", "on the host"),
    ]
    assert {item.name for item in proven.unproven} == {"up.0", "on the host"}
    assert any(
        finding.message.startswith("weak, not where a pointer is aligned: packed (part 0, node 0) is given weight")
        for finding in proven.findings()
    )


def test_an_address_where_a_range_begins_means_that_one(fake: FakeCudaDriver, reader: GraphReader) -> None:
    """Caches that lie in each other's gaps overlap: what is inside one of them is the start of the other."""
    shape, stride = (4, 2, 16), (128, 16, 1)
    even, odd = (
        Binding(Role.CACHE, name, at("layers.0") + 4 * start, 512, shape, stride, torch.float32, 1)
        for name, start in (("layers.0", 0), ("layers.1", 64))
    )
    assert range_of(even).num_bytes == 4 * (3 * 128 + 16 + 15 + 1)
    nodes = {
        fake.kernel("attend", word(odd.address)): "attention 0",
        fake.kernel("attend", word(even.address)): "attention 1",
    }
    graph = WatchedGraph(PART, fake.graph(*nodes), nodes)
    proven = prove(reader, graph, declared=(even, odd))
    assert [(use.launch, [item.name for item in use.meant]) for use in proven.foreign] == [
        ("attention 0", ["layers.1"]),
        ("attention 1", ["layers.0"]),
    ]


def test_layers_that_share_a_cache_may_use_it_under_either_name(fake: FakeCudaDriver, reader: GraphReader) -> None:
    shared = Binding(Role.CACHE, "layers.1", at("layers.0"), 4096, (1024,), (1,), torch.float32, 1)
    nodes = {fake.kernel("attend", word(at("layers.0"))): f"attention {layer}" for layer in (0, 1)}
    graph = WatchedGraph(PART, fake.graph(*nodes), nodes)
    launches = tuple(nodes.values())
    assert prove(reader, graph, declared=(DECLARED[0], shared), launches=launches).findings() == ()


def test_parts_of_a_key_share_what_the_first_declares(fake: FakeCudaDriver, reader: GraphReader) -> None:
    parts = [GraphPart(OTHER_KEY, index) for index in (0, 2)]
    pieces = [item for item in arguments() if item[0].startswith("piece")]
    graphs = {part: captured(fake, [piece], part) for part, piece in zip(parts, pieces, strict=True)}
    records = [
        GraphRecord(parts[0], DECLARED[2:4], ("piece 0",), 0, 0.0),
        GraphRecord(parts[1], (), ("piece 1",), 0, 0.0),
        GraphRecord(PART, DECLARED, LAUNCHES, 0, 0.0),
    ]
    graphs[PART] = captured(fake, arguments())
    piecewise, full = prove_bindings(records, graphs, reader, [], EXPECTED)
    assert (piecewise.key, piecewise.findings()) == (OTHER_KEY, ())
    assert [use.part for use in piecewise.uses] == parts
    assert (full.key, full.findings()) == (KEY, ())
    del graphs[parts[1]]
    with pytest.raises(CaptureError, match="part 2 was captured without a watcher"):
        prove_bindings(records, graphs, reader, [], EXPECTED)


def test_nodes_that_cannot_be_read_and_empty_tensors_are_told_apart(fake: FakeCudaDriver, reader: GraphReader) -> None:
    empty = Binding(Role.WEIGHT, "nothing", at("up.0"), 0, (0, 8), (8, 1), torch.float32, 1)
    graph = WatchedGraph(PART, fake.graph(fake.other(3)), {})
    proven = prove(reader, graph, declared=(empty,))
    (finding,) = proven.findings()
    assert finding.message == "part 0, node 0: host cannot be read: what a host node uses cannot be told"
    assert finding.node == "0 host"


def test_nodes_belong_to_the_launch_that_made_them(fake: FakeCudaDriver, reader: GraphReader) -> None:
    watcher = LaunchWatcher(reader, stream=lambda: 77)
    graph = fake.graph()
    fake.captures[77] = graph
    made = []
    for launch, count in (("a", 2), ("b", 0), ("c", 1)):
        for _ in range(count):
            made.append(fake.fill(BASE))
            fake.add(graph, made[-1])
        watcher.launched(PART, launch)
    fake.captures.clear()
    watcher.captured(PART, graph)
    assert watcher.graphs[PART] == WatchedGraph(PART, graph, dict(zip(made, "aac", strict=True)))


def test_a_capture_that_failed_leaves_nothing_to_the_next(fake: FakeCudaDriver, reader: GraphReader) -> None:
    watcher = LaunchWatcher(reader, stream=lambda: 0)
    first, second = fake.graph(fake.fill(BASE)), fake.graph(fake.fill(BASE))
    for graph in (first, second):
        fake.captures[0] = graph
        watcher.launched(PART, f"launch {graph}")
    watcher.captured(PART, second)
    assert list(watcher.graphs[PART].launches.values()) == [f"launch {second}"]
    watcher.launched(PART, "of the second")
    watcher.captured(PART, first)
    assert watcher.graphs[PART].launches == {}
    fake.captures.clear()
    watcher.launched(PART, "not captured")
    watcher.captured(PART, second)
    assert watcher.graphs[PART].launches == {}


class NotedBackend(RecordingBackend):
    """The emulation, which puts a kernel with the addresses of all its tensors into a graph of ``fake`` per launch."""

    def __init__(self, runner: GpuRunner, watcher: CaptureWatcher, fake: FakeCudaDriver) -> None:
        super().__init__(runner.static_context)
        self._fake, self._watcher = fake, watcher

    def _capture(self, part: GraphPart, work: CapturedWork) -> Captured:
        graph = self._fake.captures[0] = self._fake.graph()

        def noted(launch: Launch) -> Sequence[torch.Tensor]:
            def run(name: str, launched: Work) -> Sequence[torch.Tensor]:
                outputs = launch(name, launched)
                addresses = dict.fromkeys(tensor.data_ptr() for tensor in tensors_in(launched))
                self._fake.add(graph, self._fake.kernel("kernel", *map(word, addresses)))
                self._watcher.launched(part, name)
                return outputs

            return work(run)

        captured = super()._capture(part, noted)
        self._fake.captures.clear()
        self._watcher.captured(part, graph)
        return captured


def tensors_in(thing: Any) -> Iterator[torch.Tensor]:
    """The tensors that a launch computes with. A layer's computation may hold a cache of its own."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, partial):
        owner = getattr(thing.func, "__self__", None)
        arguments = list(thing.args)
        if isinstance(owner, section._OtherCache):
            arguments[4] = owner._cache
        yield from tensors_in(arguments)
    elif isinstance(thing, (list, tuple)):
        for item in thing:
            yield from tensors_in(item)
    elif is_dataclass(thing):
        yield from tensors_in([getattr(thing, item.name) for item in fields(thing)])
    elif closure := getattr(thing, "__closure__", None):
        yield from tensors_in([cell.cell_contents for cell in closure])


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuRunner]:
    folder = tmp_path_factory.mktemp("llama")
    write_tiny_model(folder, "llama")
    runner = new_runner(folder)
    yield runner
    runner.close()


@pytest.fixture
def emulated() -> tuple[GraphReader, dict[str, Any]]:
    """A reader, and what ``prove_runner`` is to be told, for runners without a GPU."""
    fake = FakeCudaDriver(allocations=[(1, 2**63)])
    how = {"make_backend": partial(NotedBackend, fake=fake), "stream": lambda: 0}
    return GraphReader(fake), how  # type: ignore[arg-type]


def test_the_plan_names_the_launches_that_graphs_have(runner: GpuRunner) -> None:
    assert runner.graphed is not None
    model = runner.graphed.model
    expected = expected_by_launch(model.plan)
    launched = {name for record in runner.graph_records for name in record.launches}
    assert launched - set(expected) == {"copy of the logits", "copy to the next part"}
    assert set(expected) <= launched
    named = {pair for rule in expected.values() for pair in rule.bindings}
    assert named == {(CACHE, name) for name in runner.static_context} | {(WEIGHT, name) for name in model.weights}
    addresses = {(item.role, item.name): item.address for item in known_ranges(model)}
    caches = {(CACHE, name): layer.kv_cache.data_ptr() for name, layer in runner.static_context.items()}
    assert addresses == caches | {(WEIGHT, name): tensor.data_ptr() for name, tensor in model.weights.items()}


def test_graphs_of_a_runner_use_what_they_declare(
    runner: GpuRunner, emulated: tuple[GraphReader, dict[str, Any]]
) -> None:
    reader, how = emulated
    keys = runner.dispatcher.keys()
    before = (runner.graphed, runner.graph_records)
    for proven in prove_runner(runner, keys, reader, **how):
        assert [str(finding.message) for finding in proven.findings() if "is declared" not in finding.message] == []
        # The head, which turns hidden states into logits, is no part of piecewise graphs.
        full = proven.key.kind is GraphKind.FULL
        assert [item.name for item in proven.unproven] == ([] if full else ["packed(lm_head.weight)"])
        caches = {item.name for item in proven.proven if item.role == CACHE}
        assert caches == (set(runner.static_context) if full else set())
    assert (runner.graphed, runner.graph_records) == before
    assert len(write(engine_of(runner), make_prompts(3))) == 3


def test_the_gpu_check_names_what_it_plants(runner: GpuRunner, emulated: tuple[GraphReader, dict[str, Any]]) -> None:
    reader, how = emulated
    expected = write(engine_of(runner), make_prompts(3))
    outcome = section.prove_and_plant(runner, reader, **how)
    assert outcome.verdict is Verdict.PASSED, outcome.summary
    plain, swapped = outcome.rows[:-2], outcome.rows[-2:]
    assert [(row["undeclared"], row["foreign"], row["unread"]) for row in plain] == [(0, 0, 0)] * len(plain)
    first, second = section.two_caches(runner) or ("", "")
    assert f"in \"attention of layer '{first}'\") is given KV cache of layer '{second}'" in swapped[0]["said"]
    assert runner.graphed is not None
    first, second = section.two_weights(runner.graphed.model) or ("", "")
    assert f"is given weight '{second}'" in swapped[1]["said"]
    assert swapped[0]["foreign"] >= 2 <= swapped[1]["foreign"]
    # Nothing planted is left.
    assert write(engine_of(runner), make_prompts(3)) == expected


def test_the_gpu_check_fails_where_nothing_is_named(
    runner: GpuRunner, emulated: tuple[GraphReader, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, how = emulated
    prove: Callable[..., Any] = prove_runner
    clean = prove(runner, runner.dispatcher.keys()[-1:], reader, **how)
    monkeypatch.setattr(section, "prove_runner", lambda *_, **__: clean)
    outcome = section.prove_and_plant(runner, reader, **how)
    assert outcome.verdict is Verdict.FAILED
    assert "not found: KV cache of layer" in outcome.summary
    assert "not found: weight" in outcome.summary


def test_a_closed_runner_is_refused(emulated: tuple[GraphReader, dict[str, Any]]) -> None:
    class Closed:
        graphed = None

    reader, how = emulated
    closed: Any = Closed()
    with pytest.raises(ContextStateError, match="closed"):
        prove_runner(closed, (), reader, **how)
