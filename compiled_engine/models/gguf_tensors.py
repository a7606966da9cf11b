"""The tensors of a GGUF file, one at a time, as weights of the transformers model that the file holds.

transformers knows for every architecture how GGUF's names and numbers become its own, but its loader widens the whole
file first. Here its parts are used on single tensors, so that memory holds one widened tensor at most, and a quantised
matrix stays as it is where its numbers only change rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from compiled_engine.models.gguf_blocks import BLOCK_FORMATS, decode_blocks
from compiled_engine.models.safetensors_file import NewTensor, write_safetensors
from compiled_engine.models.weights import expected_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CHUNK_NUMBERS = 1 << 18
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class PlannedWeight:
    """How one weight is stored: as float32, or as the GGUF blocks of ``tensor`` with its rows in ``row_order``."""

    name: str
    shape: tuple[int, ...]
    tensor: Any
    row_order: np.ndarray | None


class GgufTensors:
    """An open GGUF file, and ``model``, which is what transformers makes of it, without memory for its weights.

    Whatever transformers or gguf raise comes through: on a file that they do not read, and where a release of
    transformers lacks the parts that are used here. ``NotImplementedError`` when transformers reads the file otherwise
    than tensor by tensor.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
            load_gguf_checkpoint,
        )

        self._reader = GGUFReader(path)
        architecture = str(self._reader.fields["general.architecture"].contents())
        if _has_a_loader_of_its_own(architecture):
            raise NotImplementedError(f"transformers reads architecture {architecture!r} with another loader")
        config = load_gguf_checkpoint(str(path), return_tensors=False)["config"]
        self.model = _empty_model(config)
        self._processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config)
        self._names: dict[str, str] = get_gguf_hf_weights_map(self.model, self._processor)

    def plan(self) -> list[PlannedWeight]:
        """How each weight of the model is stored. Raises ``NotImplementedError`` when the tensors are not exactly the
        weights, one for one."""
        expected = expected_weights(self.model)
        weights = [self._plan_one(tensor) for tensor in self._reader.tensors if tensor.name in self._names]
        shapes = {name: shape for name, shape in expected.shapes.items() if name not in expected.tied}
        if len(weights) != len(shapes) or {weight.name: weight.shape for weight in weights} != shapes:
            differing = {(weight.name, weight.shape) for weight in weights} ^ set(shapes.items())
            raise NotImplementedError(f"its tensors are not one for one the model's weights: {sorted(differing)[:4]}")
        return weights

    def write(self, weights: list[PlannedWeight], file: Path) -> None:
        """Write a safetensors file of ``weights`` (see ``safetensors_file`` for its blocks). Raises ``OSError``."""
        kept = {weight.name: weight.tensor.tensor_type.name for weight in weights if weight.row_order is not None}
        write_safetensors(file, [self._new_tensor(weight) for weight in weights], kept)

    def _plan_one(self, tensor: Any) -> PlannedWeight:
        final = self._process(tensor.name, _widen(tensor))
        order = self._row_order(tensor, final) if tensor.tensor_type.name in BLOCK_FORMATS else None
        return PlannedWeight(self._names[tensor.name], final.shape, tensor, order)

    def _row_order(self, tensor: Any, final: np.ndarray) -> np.ndarray | None:
        """The order in which the rows of ``tensor`` are bit for bit those of ``final``; None when there is none."""
        if final.ndim != 2 or tensor.data.ndim != 2 or len(tensor.data) != len(final):
            return None
        # A matrix that holds the number of each row shows where transformers puts the rows.
        numbers = np.arange(len(final), dtype=np.float64)
        moved = self._process(tensor.name, np.broadcast_to(numbers[:, None], final.shape))
        if moved.shape != final.shape or not np.array_equal(np.sort(moved[:, 0]), numbers):
            return None
        order = moved[:, 0].astype(np.int64)
        step = max(1, _CHUNK_NUMBERS // final.shape[1])
        for first in range(0, len(final), step):
            blocks = torch.from_numpy(tensor.data[order[first : first + step]])
            kept = decode_blocks(tensor.tensor_type.name, blocks).dequantize().numpy()
            # As integers: a NaN must stay the NaN that it is, and a zero keep its sign.
            wanted = np.ascontiguousarray(final[first : first + step], dtype=np.float32)
            if not np.array_equal(kept.view(np.int32), wanted.view(np.int32)):
                return None
        return order

    def _process(self, name: str, numbers: np.ndarray) -> np.ndarray:
        """What transformers makes of tensor ``name`` when it holds ``numbers``."""
        collected: dict[str, Any] = {"tensors": {}}
        result = self._processor.process(
            weights=numbers, name=name, tensor_key_mapping=self._names, parsed_parameters=collected
        )
        if result.name != name or collected["tensors"]:
            raise NotImplementedError(f"tensor {name!r} is not one weight of the model")
        return result.weights

    def _new_tensor(self, weight: PlannedWeight) -> NewTensor:
        if weight.row_order is None:
            return NewTensor(weight.name, "F32", weight.shape, partial(self._widened, weight))
        blocks = weight.tensor.data
        return NewTensor(weight.name, "U8", blocks.shape, partial(_rows_in_order, blocks, weight.row_order))

    def _widened(self, weight: PlannedWeight) -> Iterator[np.ndarray]:
        final = self._process(weight.tensor.name, _widen(weight.tensor))
        yield np.ascontiguousarray(final, dtype=np.float32)


def _rows_in_order(blocks: np.ndarray, order: np.ndarray) -> Iterator[np.ndarray]:
    step = max(1, _CHUNK_BYTES // blocks.shape[1])
    for first in range(0, len(order), step):
        yield blocks[order[first : first + step]]


def _widen(tensor: Any) -> np.ndarray:
    from gguf import dequantize
    from gguf.quants import quant_shape_from_byte_shape

    if tensor.tensor_type.name not in BLOCK_FORMATS:
        return dequantize(tensor.data, tensor.tensor_type)
    # In parts, for gguf needs twice the memory of what it gives.
    wide = np.empty(quant_shape_from_byte_shape(tensor.data.shape, tensor.tensor_type), dtype=np.float32)
    step = max(1, len(wide) * _CHUNK_NUMBERS // max(1, wide.size))
    for first in range(0, len(wide), step):
        wide[first : first + step] = dequantize(tensor.data[first : first + step], tensor.tensor_type)
    return wide


def _empty_model(config: dict[str, Any]) -> PreTrainedModel:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            CONFIG_MAPPING[config["model_type"]].from_dict(config), dtype=torch.float32
        )


def _has_a_loader_of_its_own(architecture: str) -> bool:
    try:
        from transformers.integrations.gguf import is_gguf_arch_supported
    except ImportError:  # releases that read all files in one way
        return False
    return bool(is_gguf_arch_supported(architecture))
