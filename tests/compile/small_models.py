"""Hand-made models for tests of the compile room, and the means to run what it makes of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from compiled_engine.compile.capture import CapturedGraph
from compiled_engine.compile.counters import CompileCounters
from compiled_engine.compile.ledger import Ledger
from compiled_engine.compile.model import CompiledModel
from compiled_engine.compile.opening import CompiledPiece, open_packages
from compiled_engine.compile.packages import compile_packages
from compiled_engine.compile.pieces import create_piece_compiler
from compiled_engine.compile.pipeline import PlannedGraph, compile_pieces, count_compiled, plan_model
from compiled_engine.compile.plan import INPUT_IDS, LOGITS_INDICES, POSITIONS
from compiled_engine.compile.weights import WeightSource, materialize
from compiled_engine.context import (
    ForwardContext,
    StaticForwardContext,
    allocate_kv_caches,
    bind_kv_cache,
    set_forward_context,
    unbind_kv_cache,
)
from compiled_engine.models import Checkpoint, ModelDefinition, find_model
from compiled_engine.ops.attention import AttentionSpec, PagedAttention
from compiled_engine.ops.cpu import CpuAttention
from compiled_engine.ops.cpu.build import load_kernels
from compiled_engine.ops.quantized_rows import QuantizedRows
from compiled_engine.runners.batch import ScheduledRequest
from compiled_engine.runners.inputs import build_step_inputs
from compiled_engine.runners.loading import CheckpointWeights
from kernel_folder import KERNELS

VOCAB_SIZE, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 23, 16, 4, 2, 4
BLOCK_SIZE, NUM_BLOCKS = 4, 40


@dataclass
class Output:
    """The one field of transformers' output that capture reads."""

    logits: torch.Tensor


class Attend(nn.Module):
    """Projections and attention under one layer name; ``dense`` computes it without a cache, for comparison."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.dense = False
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.shape[1]
        query = self.q_proj(hidden).view(rows, HEADS, HEAD_DIM)
        key = self.k_proj(hidden).view(rows, KV_HEADS, HEAD_DIM)
        value = self.v_proj(hidden).view(rows, KV_HEADS, HEAD_DIM)
        if self.dense:
            q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        else:
            out = query.new_empty(query.shape)
            torch.ops.compiled_engine.attention(query, key, value, out, self.name)
        return self.o_proj(out.reshape(1, rows, HEADS * HEAD_DIM))


class Layer(nn.Module):
    """One layer; ``factor`` is a constant in its graph, ``width`` the size of its inner layer."""

    def __init__(self, name: str, width: int = 24, factor: float = 1.0) -> None:
        super().__init__()
        self.attention = Attend(name)
        self.gate, self.up = nn.Linear(HIDDEN, width), nn.Linear(HIDDEN, width)
        self.down = nn.Linear(width, HIDDEN)
        self.factor = factor

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(F.layer_norm(hidden, (HIDDEN,)))
        inner = F.layer_norm(hidden, (HIDDEN,))
        return hidden + self.down(F.silu(self.gate(inner)) * self.up(inner)) * self.factor


class SmallModel(nn.Module):
    """A causal language model with transformers' calling convention. Positions are learned."""

    def __init__(self, layers: Sequence[Layer], tied: bool = False) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB_SIZE, HIDDEN), nn.Embedding(64, HIDDEN)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(HIDDEN, VOCAB_SIZE, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.requires_grad_(False)

    def backbone(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool, logits_to_keep: torch.Tensor
    ) -> Output:
        hidden = self.backbone(self.embed(input_ids) + self.place(position_ids))
        return Output(self.head(hidden[:, logits_to_keep]))

    def dense_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits [num_tokens, vocab_size] of one sequence, computed without cache, plan or op."""
        attends = [module for module in self.modules() if isinstance(module, Attend)]
        ids = torch.tensor(token_ids)
        for module in attends:
            module.dense = True
        try:
            return self(ids[None], torch.arange(len(ids))[None], False, torch.arange(len(ids))).logits[0]
        finally:
            for module in attends:
                module.dense = False


class BodyModel(SmallModel):
    """A model whose backbone is ``body(self, hidden)``; for graphs that attention does not matter to."""

    def __init__(self, body: Callable[..., torch.Tensor], **modules: nn.Module) -> None:
        super().__init__([])
        self.body = body
        for name, module in modules.items():
            self.add_module(name, module)
        self.requires_grad_(False)

    def backbone(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.body(self, hidden)


def small_model(num_layers: int, **options: object) -> SmallModel:
    """A model of equal layers."""
    return SmallModel([Layer(f"layers.{index}.attention") for index in range(num_layers)], **options)  # type: ignore[arg-type]


def specs_of(module: nn.Module) -> tuple[AttentionSpec, ...]:
    """The attention layers of a hand-made model, in order."""
    return tuple(
        AttentionSpec(part.name, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5)
        for part in module.modules()
        if isinstance(part, Attend)
    )


class ModuleWeights:
    """A ``WeightSource``: a module's own tensors."""

    def __init__(self, module: nn.Module) -> None:
        self.tensors = dict(module.named_parameters(remove_duplicate=False))
        self.tensors |= dict(module.named_buffers(remove_duplicate=False))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def stored_dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def quantized(self, name: str) -> QuantizedRows | None:
        return None

    def read_into(self, name: str, out: torch.Tensor) -> None:
        out.copy_(self.tensors[name])


def run_graph(
    captured: CapturedGraph,
    source: WeightSource,
    input_ids: Sequence[int],
    logits_indices: Sequence[int],
) -> torch.Tensor:
    """The logits that a captured graph, as it is now, computes."""
    weights = materialize(captured.weights.values(), source)
    given = {
        INPUT_IDS: torch.tensor(input_ids),
        POSITIONS: torch.arange(len(input_ids)),
        LOGITS_INDICES: torch.tensor(logits_indices),
    }
    sizes = {}
    for name, tensor in given.items():
        if (node := captured.placeholder(name)) is not None:
            sizes[node.meta["example_value"].shape[0].node.expr] = len(tensor)
    arguments: list[object] = []
    for node in captured.graph_module.graph.find_nodes(op="placeholder"):
        if node.name in captured.inputs:
            arguments.append(given[captured.inputs[node.name]])
        elif node.name in captured.weights:
            arguments.append(weights[captured.weights[node.name].key])
        else:
            arguments.append(sizes[node.meta["example_value"].node.expr])
    return captured.graph_module(*arguments)[0]


def quiet(what: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


class Running:
    """A plan with pieces, weights, context and bound caches, and sequences whose blocks are kept apart."""

    def __init__(
        self,
        planned: PlannedGraph,
        pieces: Mapping[str, CompiledPiece],
        source: WeightSource,
        dtype: torch.dtype = torch.float32,
        num_blocks: int = NUM_BLOCKS,
    ) -> None:
        self.context = StaticForwardContext()
        self.backend = CpuAttention(dtype, load_kernels(KERNELS))
        for spec in planned.plan.layers:
            layer = PagedAttention(spec, spec.cache_spec(BLOCK_SIZE, dtype), self.backend)
            self.context.register(spec.layer_name, layer)
        self.context.seal()
        self.num_blocks = num_blocks
        self.model = CompiledModel(planned.plan, pieces, materialize(planned.plan.weights, source), self.context)
        self.caches = self.new_caches()
        bind_kv_cache(self.caches, self.context)

    def new_caches(self) -> dict[str, torch.Tensor]:
        """Caches of NaN: whatever is read without having been written shows."""
        specs = {name: layer.spec for name, layer in self.context.items() if layer.spec is not None}
        caches = allocate_kv_caches(specs, self.num_blocks)
        for cache in caches.values():
            cache.fill_(float("nan"))
        return caches

    def rebind(self, caches: dict[str, torch.Tensor]) -> None:
        unbind_kv_cache(self.context)
        bind_kv_cache(caches, self.context)
        self.caches = caches

    @torch.inference_mode()
    def run(self, requests: Sequence[ScheduledRequest]) -> torch.Tensor:
        """Logits of the rows that sample."""
        inputs = build_step_inputs(requests, BLOCK_SIZE, 2)
        metadata = self.backend.build_metadata(inputs.query_start_loc, inputs.seq_lens, inputs.block_tables[0])
        # One table for all groups of the context.
        groups = len(self.context.groups)
        context = ForwardContext(
            self.context,
            (metadata,) * groups,
            inputs.slot_mappings * groups,
            inputs.num_tokens,
            inputs.num_padded_tokens,
        )
        with set_forward_context(context):
            hidden = self.model.hidden_states(inputs.input_ids, inputs.positions)
        return self.model.logits(hidden, inputs.logits_indices)[: inputs.num_logits]

    def run_whole(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits of the last token of each sequence, all computed in one step."""
        return self.run([whole_request(row, sequence) for row, sequence in enumerate(sequences)])


def whole_request(row: int, tokens: Sequence[int]) -> ScheduledRequest:
    """A prompt in one piece, in blocks that belong to ``row`` (up to eight of them)."""
    return chunk(row, tokens, 0, len(tokens))


def chunk(row: int, tokens: Sequence[int], first: int, last: int) -> ScheduledRequest:
    """Tokens ``first`` to ``last`` of a sequence whose earlier ones are cached. Its blocks lie in descending order."""
    blocks = tuple(range(8 * (row + 1), 8 * row, -1))[: -(-last // BLOCK_SIZE)]
    return ScheduledRequest(f"request {row}", tuple(tokens[first:last]), first, (blocks,), samples=True)


def plan_small(module: nn.Module, counters: CompileCounters | None = None) -> PlannedGraph:
    return plan_model(module, specs_of(module), torch.device("cpu"), counters or CompileCounters())


def compiled(
    planned: PlannedGraph, compiler: str = "eager", counters: CompileCounters | None = None
) -> dict[str, CompiledPiece]:
    """All pieces, by key; ``compiler`` may be "aoti", whose pieces go through packages on disk."""
    counters = counters or CompileCounters()
    if compiler != "aoti":
        return compile_pieces(planned, create_piece_compiler(compiler), counters, quiet)
    with tempfile.TemporaryDirectory() as folder:
        packages = compile_packages(planned.pieces, Path(folder), quiet, Ledger())
        count_compiled(packages, planned, counters)
        return open_packages(packages)


@dataclass(frozen=True)
class Small:
    """A hand-made model of three equal layers, planned, with eager pieces."""

    module: SmallModel
    planned: PlannedGraph
    pieces: dict[str, CompiledPiece]

    def running(self) -> Running:
        return Running(self.planned, self.pieces, ModuleWeights(self.module))


@dataclass(frozen=True)
class TinyLlama:
    """A tiny Llama of three layers out of a checkpoint, planned."""

    folder: Path
    definition: ModelDefinition
    planned: PlannedGraph
    counters: CompileCounters

    def running(self, compiler: str) -> Running:
        with Checkpoint(find_model(str(self.folder))) as checkpoint:
            weights = CheckpointWeights(self.definition.weight_names, self.definition.expected.buffers, checkpoint)
            return Running(self.planned, compiled(self.planned, compiler), weights)
