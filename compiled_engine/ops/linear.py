"""Matrix products with weights that are packed once, when they are loaded.

On CPU the weight reaches the op as an opaque oneDNN tensor: MKL, to which plain ``F.linear`` goes, is slow for few
rows on many CPUs, and oneDNN without packing reorders the weight at every call.
"""

from __future__ import annotations

import torch

from compiled_engine.ops.library import LIBRARY


def can_pack(device: torch.device) -> bool:
    """Whether weights are packed on this device, i.e. whether torch was built with oneDNN and runs on a CPU."""
    return device.type == "cpu" and torch.backends.mkldnn.is_available()


def can_pack_dtype(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs and multiplies ``dtype`` here: 16-bit types need instructions that not all CPUs have."""
    if dtype is torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype is torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return dtype is torch.float32


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` [out_features, in_features] in the layout that ``linear`` reads fastest: a copy of the same shape."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return torch.nn.functional.linear(input, weight, bias)


for _key in ("CPU", "MkldnnCPU", "CUDA"):
    LIBRARY.impl("linear", _linear, _key)
LIBRARY._register_fake("linear", lambda input, weight, bias: input.new_empty(*input.shape[:-1], weight.shape[0]))
