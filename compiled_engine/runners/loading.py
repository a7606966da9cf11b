"""A plan or a module with its weights, out of a checkpoint and of what a model definition computed itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch

from compiled_engine.compile.ledger import Ledger
from compiled_engine.compile.model import CompiledModel
from compiled_engine.compile.weights import materialize, num_weight_bytes
from compiled_engine.config import EngineConfig
from compiled_engine.context import StaticForwardContext
from compiled_engine.models import Checkpoint, ModelDefinition, ModelFiles
from compiled_engine.ops.quantized_rows import QuantizedRows
from compiled_engine.runners.precompile import RunnableGraphs

logger = logging.getLogger(__name__)


def load_model(
    config: EngineConfig,
    graphs: RunnableGraphs,
    files: ModelFiles,
    static_context: StaticForwardContext,
    ledger: Ledger,
    device: torch.device | None = None,
) -> CompiledModel:
    """Make the weights by the plan's recipes, on ``device`` (None: the CPU), and what runs the plan with them.

    ``static_context`` has the plan's attention layers. Raises ``WeightsError`` and ``PlanError``.
    """
    with ledger.phase("weights") as phase, Checkpoint(files) as checkpoint:
        logger.info("reading %.0f MB of weights", checkpoint.num_bytes / 1e6)
        source = CheckpointWeights(graphs.weight_names, graphs.constants, checkpoint)
        head_weights = {name.removeprefix("weight:") for name in graphs.plan.head.inputs}
        weights = materialize(graphs.plan.weights, source, config.quantization, head_weights, device)
        phase.num_bytes = num_weight_bytes(graphs.plan.weights, weights)
    return CompiledModel(graphs.plan, graphs.pieces, weights, static_context)


def load_module(
    definition: ModelDefinition,
    files: ModelFiles,
    ledger: Ledger,
    to_device: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]],
) -> None:
    """Read the weights into ``definition``'s module, on the device that ``to_device`` copies host tensors to.

    One tensor at a time, so that no second copy of the model is alive; tied weights stay one tensor. Raises
    ``WeightsError``.
    """
    module = definition.module
    places: dict[int, list[str]] = {}
    for path, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        places.setdefault(id(tensor), []).append(path)
    del tensor
    num_bytes = 0
    with ledger.phase("weights") as phase, Checkpoint(files) as checkpoint:
        logger.info("reading %.0f MB of weights", checkpoint.num_bytes / 1e6)
        for paths in places.values():
            num_bytes += _move(module, paths, definition.weight_names, checkpoint, to_device)
        phase.num_bytes = num_bytes


def _move(
    module: torch.nn.Module,
    paths: Sequence[str],
    weight_names: Mapping[str, str],
    checkpoint: Checkpoint,
    to_device: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]],
) -> int:
    """Fill the one tensor that stands at ``paths`` and replace it by its copy on the device; returns its bytes.

    A tensor without a name in the checkpoint holds what the model computed itself.
    """
    parent, _, attribute = paths[0].rpartition(".")
    tensor = getattr(module.get_submodule(parent), attribute)
    name = next((path for path in paths if path in weight_names), None)
    if name is not None:
        checkpoint.read(weight_names[name], out=tensor.data)
    (moved,) = to_device([tensor.data])
    if isinstance(tensor, torch.nn.Parameter):
        moved = torch.nn.Parameter(moved, requires_grad=False)
    for path in paths:
        parent, _, attribute = path.rpartition(".")
        setattr(module.get_submodule(parent), attribute, moved)
    return int(moved.nbytes)


class CheckpointWeights:
    """A ``WeightSource``: tensors by the names of the model definition.

    ``names`` maps them to the checkpoint's; ``constants`` are tensors that are in no checkpoint.
    """

    def __init__(self, names: Mapping[str, str], constants: Mapping[str, torch.Tensor], checkpoint: Checkpoint) -> None:
        self._names = names
        self._constants = constants
        self._checkpoint = checkpoint

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor ``name``; ``KeyError`` if there is none."""
        if name in self._constants:
            return tuple(self._constants[name].shape)
        return self._checkpoint[self._names[name]].shape

    def stored_dtype(self, name: str) -> torch.dtype:
        """The dtype that holds every number of the tensor ``name`` exactly: float32 for GGUF blocks."""
        if name in self._constants:
            return self._constants[name].dtype
        return self._checkpoint.dtype_of(self._names[name])

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Copy the tensor ``name`` into ``out``, converting to its dtype."""
        if name in self._constants:
            out.copy_(self._constants[name])
        else:
            self._checkpoint.read(self._names[name], out=out)

    def quantized(self, name: str) -> QuantizedRows | None:
        """Codes and scales of the tensor ``name``; None where it is stored as plain numbers."""
        return None if name in self._constants else self._checkpoint.quantized(self._names[name])
