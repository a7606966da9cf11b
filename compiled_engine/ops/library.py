"""The ``compiled_engine`` operator library: schemas are defined in one place, each op's module implements its own.

``torch.library.Library`` and not ``custom_op``: it imports no compiler at its first call and costs less per call.
"""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("compiled_engine", "DEF")
LIBRARY.define("attention(Tensor query, Tensor key, Tensor value, Tensor(a!) out, str layer_name) -> ()")
# act(input @ weight.T + bias) + residual; out_features is the number of columns of the result.
LIBRARY.define(
    "packed_linear(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, int out_features, int activation)"
    " -> Tensor"
)
