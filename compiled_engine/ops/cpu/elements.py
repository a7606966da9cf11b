"""The number types that kernels read and write, by their names and numbers in the C ABI."""

from __future__ import annotations

import torch

ELEMENT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""``ElementType`` of ``packed_weight.h``."""

ELEMENT_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
"""The ends of the names of functions that exist once for each type."""
