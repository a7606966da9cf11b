"""Capturing a model as one graph with ``torch.compile``, without running it and without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from compiled_engine.compile.own_code import with_own_code
from compiled_engine.compile.plan import INPUT_IDS, LOGITS_INDICES, POSITIONS
from compiled_engine.compile.weights import WeightRecipe
from compiled_engine.errors import CaptureError

# Sizes of the example inputs: unlike each other, so that tokens and sampled rows get a symbol each, and above 1,
# because sizes 0 and 1 would be specialised.
_EXAMPLE_TOKENS, _EXAMPLE_ROWS = 8, 4


@dataclass(frozen=True)
class CapturedGraph:
    """A whole model as one FX graph of torch-level operations, attention as an opaque op.

    ``inputs`` maps the graph's tensor placeholders to the model inputs ``input_ids`` int64 [num_tokens], ``positions``
    int64 [num_tokens] and ``logits_indices`` int64 [num_sampled_rows]; ``weights`` maps the others to recipes.
    Placeholders of symbolic sizes are in neither. The graph's only output is logits [num_sampled_rows, vocab_size].
    """

    graph_module: torch.fx.GraphModule
    inputs: dict[str, str]
    weights: dict[str, WeightRecipe]

    def placeholder(self, name: str) -> torch.fx.Node | None:
        """The placeholder of the model input ``name``; None when the model does not use it."""
        for node in self.graph_module.graph.find_nodes(op="placeholder"):
            if self.inputs.get(node.name) == name:
                return node
        return None


def capture(module: nn.Module, device: torch.device | None = None) -> CapturedGraph:
    """Trace ``module``, a causal language model of transformers whose attention calls our op, into one graph.

    ``device``: where the module's tensors are (None: the CPU), and the graph's inputs will be. Nothing is computed and
    no page of a weight is touched: tracing sees shapes. The token and row dimensions are
    symbolic. Raises ``CaptureError`` for whatever does not fit into one graph, naming the source line.
    """
    from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

    if torch._dynamo.config.disable:
        raise CaptureError("Dynamo is switched off (TORCHDYNAMO_DISABLE), so no graph can be captured: unset it")
    captured: list[CapturedGraph] = []
    names = _tensor_names(module)
    examples = {
        INPUT_IDS: torch.zeros(_EXAMPLE_TOKENS, dtype=torch.int64, device=device),
        POSITIONS: torch.arange(_EXAMPLE_TOKENS, device=device),
        LOGITS_INDICES: torch.arange(_EXAMPLE_ROWS, device=device),
    }

    def backend(graph_module: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        captured.append(_describe(graph_module, example_inputs, names, examples))
        _check_sizes(captured[-1])
        outputs = len(graph_module.graph.output_node().args[0])  # type: ignore[arg-type]
        return lambda *args: (examples[INPUT_IDS],) * outputs

    def forward(input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        output = module(
            input_ids=input_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=logits_indices
        )
        return output.logits[0]

    for example in examples.values():
        torch._dynamo.mark_dynamic(example, 0)
    # One capture must not see another's graphs.
    compiled = torch.compile(
        with_own_code(forward),
        fullgraph=True,
        backend=backend,
        options={"guard_filter_fn": lambda entries: [False] * len(entries)},
    )
    # What Dynamo learned from an earlier model at the same source line must not turn this one's numbers into inputs.
    alone = torch._dynamo.config.patch(automatic_dynamic_shapes=False, specialize_float=True, specialize_int=True)
    try:
        with torch.no_grad(), alone:
            compiled(**examples)
    except (torch._dynamo.exc.TorchDynamoException, ConstraintViolationError) as error:
        if isinstance(refusal := getattr(error, "inner_exception", None), CaptureError):
            raise CaptureError(f"{refusal}\n(model class {type(module).__name__})") from None
        raise CaptureError(
            f"the model cannot be captured as one graph: {error}\n(model class {type(module).__name__})"
        ) from error
    if len(captured) != 1:
        raise CaptureError(f"expected one graph, torch.compile made {len(captured)}")
    return captured[0]


def _tensor_names(module: nn.Module) -> dict[int, str]:
    """Names of parameters and buffers by identity; of tied ones the first name."""
    names: dict[int, str] = {}
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), name)
    return names


def _describe(
    graph_module: torch.fx.GraphModule,
    example_inputs: list[Any],
    names: Mapping[int, str],
    examples: Mapping[str, torch.Tensor],
) -> CapturedGraph:
    input_names = {id(tensor): name for name, tensor in examples.items()}
    inputs: dict[str, str] = {}
    weights: dict[str, WeightRecipe] = {}
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    for node, value in zip(placeholders, example_inputs, strict=True):
        if isinstance(value, torch.Tensor) and id(value) in input_names:
            inputs[node.name] = input_names[id(value)]
        elif isinstance(value, torch.Tensor) and id(value) in names:
            weights[node.name] = WeightRecipe((names[id(value)],), tuple(value.shape), value.dtype)
        elif not isinstance(value, (int, torch.SymInt)):
            raise CaptureError(
                f"the graph has an input that is no model input, weight or size: {node.name} ({type(value).__name__})"
            )
    if constants := [node.name for node in graph_module.graph.nodes if node.op in ("get_attr", "call_module")]:
        raise CaptureError(f"the graph holds constants or submodules that are no weights: {', '.join(constants[:8])}")
    return CapturedGraph(graph_module, inputs, weights)


def _check_sizes(captured: CapturedGraph) -> None:
    """Refuse a graph that is right for some numbers of tokens or rows only.

    Dynamo follows one side of ``if num_tokens > 512`` and guards it; here nothing would check the guard.
    """
    nodes = {name: captured.placeholder(name) for name in (INPUT_IDS, POSITIONS, LOGITS_INDICES)}
    sizes = {name: node.meta["example_value"].shape[0] for name, node in nodes.items() if node is not None}
    for name, size in sizes.items():
        if not isinstance(size, torch.SymInt):
            raise CaptureError(f"the model fixes the length of {name} to {size}: its graph would fit no other length")
        for guard in size.node.shape_env.guards:
            # All that may be asked is that there are as many positions as tokens.
            if not (guard.expr.is_Equality and all(side.is_symbol for side in guard.expr.args)):
                raise CaptureError(
                    f"the model takes another path for some lengths, and one graph holds one path: {guard.expr}, asked "
                    f"at {guard.sloc}"
                )
    if LOGITS_INDICES in sizes and sizes[LOGITS_INDICES].node.expr in [
        size.node.expr for name, size in sizes.items() if name != LOGITS_INDICES
    ]:
        raise CaptureError("the model wants as many sampled rows as tokens: its head cannot run on some rows alone")
