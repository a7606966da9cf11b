"""The emulation of CUDA graphs: it replays on captured memory, checks it, and refuses what CUDA graphs would lose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch

from compiled_engine.compile.graphs.backend import GraphPart
from compiled_engine.compile.graphs.bindings import Role, Tensors, bindings_of, check_bindings
from compiled_engine.compile.graphs.keys import GraphKey, GraphKind
from compiled_engine.compile.graphs.recording import RecordingBackend
from compiled_engine.compile.launch import Launch
from compiled_engine.context import (
    CacheLayer,
    ForwardContext,
    KVCacheSpec,
    StaticForwardContext,
    StepKind,
    allocate_kv_caches,
    bind_kv_cache,
    unbind_kv_cache,
)
from compiled_engine.errors import CaptureError, GraphOutputKept, StaleGraph
from compiled_engine.ops.attention import AttentionSpec, PagedAttention, attend
from compiled_engine.ops.cpu import CpuAttention
from compiled_engine.ops.cpu.build import load_kernels
from kernel_folder import KERNELS

PART = GraphPart(GraphKey(GraphKind.PIECEWISE, 4, 0, None, 0, 0), 2)


class Doubling:
    """Work on an input that stays where it is: out = 2 * input, then out + 1."""

    def __init__(self) -> None:
        self.input = torch.arange(4.0)
        self.out = torch.zeros(4)

    def work(self, launch: Launch) -> Sequence[torch.Tensor]:
        (doubled,) = launch("double", partial(self._double, self.input))
        launch("add one", partial(self._add_one, doubled))
        return (self.out,)

    def _add_one(self, tensor: torch.Tensor) -> None:
        torch.add(tensor, 1, out=self.out)

    def tensors(self) -> Tensors:
        return {(Role.INPUT, "input"): self.input, (Role.OUTPUT, "out"): self.out}

    @staticmethod
    def _double(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (tensor * 2,)


@pytest.fixture
def doubling() -> Doubling:
    return Doubling()


@pytest.fixture
def backend() -> RecordingBackend:
    return RecordingBackend(StaticForwardContext())


def captured(backend: RecordingBackend, doubling: Doubling) -> Callable[[], torch.Tensor]:
    """Captures; returns what replays and gives a copy of the output."""
    backend.capture_one(PART, doubling.work, doubling.tensors())

    def replay() -> torch.Tensor:
        backend.replay(PART, doubling.tensors)
        return backend.outputs(PART)[0].clone()

    return replay


def test_a_replay_computes_anew_from_the_same_memory(backend: RecordingBackend, doubling: Doubling) -> None:
    replay = captured(backend, doubling)
    doubling.input.copy_(torch.tensor([5.0, 6.0, 7.0, 8.0]))
    assert replay().tolist() == [11, 13, 15, 17]
    doubling.input.zero_()
    assert replay().tolist() == [1, 1, 1, 1]


def test_a_replay_reads_the_captured_tensor_whatever_is_there_now(
    backend: RecordingBackend, doubling: Doubling
) -> None:
    """Once the places are verified, another tensor goes unnoticed until the epoch changes, as with CUDA graphs."""
    replay = captured(backend, doubling)
    replay()
    doubling.input = torch.full((4,), 100.0)
    assert replay().tolist() == [1, 3, 5, 7]


def test_outputs_are_overwritten_by_the_next_replay_and_may_not_be_held(
    backend: RecordingBackend, doubling: Doubling
) -> None:
    captured(backend, doubling)
    backend.replay(PART, doubling.tensors)
    held = backend.outputs(PART)
    with pytest.raises(GraphOutputKept, match=r"output 0 of graph piecewise 4 tokens, part 2 is still held"):
        backend.replay(PART, doubling.tensors)
    before = held[0].clone()
    del held
    doubling.input.add_(1)
    backend.replay(PART, doubling.tensors)
    assert backend.outputs(PART)[0].tolist() != before.tolist()


def test_the_record_names_launches_and_bindings(backend: RecordingBackend, doubling: Doubling) -> None:
    record = backend.capture_one(PART, doubling.work, doubling.tensors())
    assert record.launches == ("double", "add one")
    assert record.num_bytes == 16
    assert record.seconds > 0
    assert [(binding.role, binding.name, binding.address) for binding in record.bindings] == [
        (Role.INPUT, "input", doubling.input.data_ptr()),
        (Role.OUTPUT, "out", doubling.out.data_ptr()),
    ]
    assert backend.records == (record,)
    assert backend.can_run(PART)
    backend.cleanup()
    assert not backend.can_run(PART)
    with pytest.raises(CaptureError, match="never captured"):
        backend.replay(PART, doubling.tensors)


def test_a_part_is_captured_once(backend: RecordingBackend, doubling: Doubling) -> None:
    captured(backend, doubling)
    with pytest.raises(CaptureError, match="captured already"):
        captured(backend, doubling)


def test_what_runs_outside_a_launch_is_refused(backend: RecordingBackend) -> None:
    """It would be computed at capture and never again."""
    tensor = torch.ones(3)

    def work(launch: Launch) -> Sequence[torch.Tensor]:
        view = tensor[1:].view(2, 1)
        return (view + 1,)

    with pytest.raises(CaptureError, match=r"aten\.add.* runs outside every launch of graph piecewise 4 tokens"):
        backend.capture_one(PART, work, {})
    assert not backend.can_run(PART)


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (lambda tensor: None, "the input 'x' was at .* has none now"),
        (lambda tensor: tensor.clone(), "the input 'x' was at .* is at"),
        (lambda tensor: tensor.view(2, 3), r"the input 'x' had shape \(3, 2\).* has shape \(2, 3\)"),
        (lambda tensor: tensor.as_strided((3, 2), (1, 3)), r"strides \(2, 1\).*strides \(1, 3\)"),
        (lambda tensor: tensor.view(torch.int32), r"torch.float32, and has .*torch.int32"),
    ],
)
def test_every_way_of_being_elsewhere_is_told(now: Callable[[torch.Tensor], torch.Tensor | None], message: str) -> None:
    tensor = torch.zeros(3, 2)
    bindings = bindings_of({(Role.INPUT, "x"): tensor}, 0)
    check_bindings(bindings, {(Role.INPUT, "x"): tensor}, None)
    moved = now(tensor)
    with pytest.raises(StaleGraph, match=message) as refused:
        check_bindings(bindings, {} if moved is None else {(Role.INPUT, "x"): moved}, "someone")
    assert "someone" not in str(refused.value), "who bound caches has no part in it"


def test_the_epoch_is_adopted_when_nothing_moved() -> None:
    context = StaticForwardContext()
    spec = KVCacheSpec(4, 1, 8, torch.float32)
    context.register("layer", CacheLayer("layer", spec))
    context.seal()
    caches = allocate_kv_caches({"layer": spec}, 2)
    bind_kv_cache(caches, context)
    backend = RecordingBackend(context)
    asked = []

    def present() -> Tensors:
        asked.append(context.epoch)
        return {(Role.CACHE, name): layer.kv_cache for name, layer in context.items() if layer.is_bound}

    backend.capture_one(PART, lambda launch: (), present())
    asked.clear()
    for _ in range(3):
        backend.replay(PART, present)
    assert len(asked) == 1, "the first replay compares, the others need not"
    unbind_kv_cache(context)
    bind_kv_cache(caches, context)
    for _ in range(2):
        backend.replay(PART, present)
    assert len(asked) == 2
    unbind_kv_cache(context)
    for _ in range(2):
        with pytest.raises(StaleGraph, match=r"layer 'layer' was at .* has none now \(.*test_recording\.py:\d+ in"):
            backend.replay(PART, present)


def test_attention_inside_a_piece_is_refused() -> None:
    """vllm#53030: captured although it must run eagerly, it would be replayed with the metadata of its capture."""
    spec = AttentionSpec("layers.0.attn", 2, 1, 8, scale=0.5)
    backend = CpuAttention(torch.float32, load_kernels(KERNELS))
    layer = PagedAttention(spec, spec.cache_spec(4, torch.float32), backend)
    context = StaticForwardContext()
    context.register("layers.0.attn", layer)
    step = ForwardContext(context, (), (), 1, 1, StepKind.CAPTURE, graph_key=PART.key, captures_attention=False)
    query = torch.zeros(1, 2, 8)
    with pytest.raises(CaptureError, match=r"layer 'layers\.0\.attn' runs inside a captured piece of graph piecewise"):
        attend(layer, query, query[:, :1], query[:, :1], query.clone(), step)
