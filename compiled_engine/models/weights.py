"""Which tensor of the checkpoint is which weight of the model. Strict both ways."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from compiled_engine.errors import UnsupportedModelError, WeightsError
from compiled_engine.models.safetensors_file import TensorInfo

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LISTED = 20


@dataclass(frozen=True)
class ExpectedWeights:
    """What a model wants to be filled with.

    ``shapes`` and ``dtypes`` cover every parameter and persistent buffer under its ``state_dict`` name, tied aliases
    included. ``tied`` maps an alias to the name it shares a tensor with. ``buffers`` holds the non-persistent buffers
    (such as ``inv_freq``), which are in no checkpoint: their values were computed when the model was built.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    base_prefix: str = ""
    ignored: tuple[str, ...] = ()
    rename: Callable[[str], str] = str


def expected_weights(model: PreTrainedModel) -> ExpectedWeights:
    """Names, shapes and dtypes of all that ``model`` loads, its tied names, and its computed buffers."""
    state = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    tied = {}
    for name, tensor in state.items():
        owner = first.setdefault(id(tensor), name)
        if owner != name:
            tied[name] = owner
    computed = {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name in module._non_persistent_buffers_set
    }
    ignored = [str(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    # Older checkpoints hold tables that are computed today; transformers passes over these two for every model.
    ignored += [r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]
    return ExpectedWeights(
        shapes={name: tuple(tensor.shape) for name, tensor in state.items()},
        dtypes={name: tensor.dtype for name, tensor in state.items()},
        tied=tied,
        buffers=computed,
        base_prefix=model.base_model_prefix,
        ignored=tuple(ignored),
        rename=_renaming(model),
    )


def _renaming(model: PreTrainedModel) -> Callable[[str], str]:
    """transformers' own renames of checkpoint keys for this model; a key that needs more than a rename is refused."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter
    except ImportError:  # releases without a conversion table
        return str
    transforms = get_model_conversion_mapping(model)
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    renames = [transform for transform in transforms if not isinstance(transform, WeightConverter)]

    def rename(key: str) -> str:
        for transform in renames:
            key, _ = transform.rename_source_key(key)
        for converter in converters:
            if converter.rename_source_key(key)[1] is not None:
                operations = ", ".join(type(operation).__name__ for operation in converter.operations)
                raise UnsupportedModelError(
                    f"weight {key!r} of {type(model).__name__} must be converted ({operations}) when it is loaded, "
                    "which this engine does not do. Load the model with transformers and save it with "
                    "save_original_format=False"
                )
        return key

    return rename


def resolve_names(checkpoint: Mapping[str, TensorInfo], expected: ExpectedWeights) -> dict[str, str]:
    """The checkpoint's name of every weight in ``expected.shapes``; tied names share one.

    A checkpoint of the bare model (names without the base prefix, or with it where the model has none) is understood,
    and so are transformers' renames. Raises one ``WeightsError`` that lists missing, left-over and misshapen weights.
    """
    found: dict[str, str] = {}
    left_over: list[str] = []
    for key in checkpoint:
        name = model_name(key, expected)
        if name is None:
            left_over.append(key)
        elif name in found:
            raise WeightsError(f"weights {found[name]!r} and {key!r} of the checkpoint are both {name!r}")
        else:
            found[name] = key
    # Symmetric: some checkpoints hold a tied weight under the head's name only.
    for alias, owner in expected.tied.items():
        if alias not in found and owner in found:
            found[alias] = found[owner]
    for alias, owner in expected.tied.items():
        if owner not in found and alias in found:
            found[owner] = found[alias]
    left_over = [key for key in left_over if not any(re.search(pattern, key) for pattern in expected.ignored)]
    missing = [name for name in expected.shapes if name not in found]
    misshapen = [
        f"{name} (model {shape}, checkpoint {checkpoint[found[name]].shape})"
        for name, shape in expected.shapes.items()
        if name in found and checkpoint[found[name]].shape != shape
    ]
    faults = [
        f"{len(names)} {what}: {_some(names)}"
        for what, names in (("missing", missing), ("left over", left_over), ("of another shape", misshapen))
        if names
    ]
    if faults:
        raise WeightsError(
            "checkpoint and model definition disagree about the weights:\n  " + "\n  ".join(faults) + "\n"
            "Check that config.json belongs to these weights and that all files were copied"
        )
    return {name: found[name] for name in expected.shapes}


def model_name(key: str, expected: ExpectedWeights) -> str | None:
    """The model's name of checkpoint key ``key``; None when the model has no such weight."""
    name = _with_or_without_prefix(key, expected)
    return name if name is not None else _with_or_without_prefix(expected.rename(key), expected)


def _with_or_without_prefix(key: str, expected: ExpectedWeights) -> str | None:
    prefix = f"{expected.base_prefix}."
    for name in (key, prefix + key, key.removeprefix(prefix)):
        if name in expected.shapes:
            return name
    return None


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
