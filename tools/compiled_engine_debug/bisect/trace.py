"""What a rung computed: rows of tensors, by request and by place in the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from compiled_engine_debug.bisect.workload import Text


class TensorName(str, Enum):
    """Which tensor of a layer, or of the model's end, in the order in which a step makes them."""

    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    STORED_KEY = "stored key"
    """The key as the layer's cache holds it after the step."""
    STORED_VALUE = "stored value"
    OUT = "out"
    """What attention gives back."""
    HIDDEN = "hidden states"
    LOGITS = "logits"
    TOKEN = "sampled token"


@dataclass(frozen=True)
class Site:
    """One tensor of the model. ``layer``: dotted name of the attention layer; None at the model's end."""

    layer: str | None
    tensor: TensorName

    def __str__(self) -> str:
        return self.tensor.value if self.layer is None else f"{self.tensor.value} of {self.layer}"


@dataclass(frozen=True)
class Rows:
    """Rows [num_positions, ...] of one request's tensor from position ``start`` on, in step ``step``."""

    step: int
    request: str
    site: Site
    start: int
    values: torch.Tensor


class Trace:
    """The tensors of one rung, in host memory. Logits are kept for the positions that sample, others for all."""

    def __init__(self, texts: Sequence[Text]) -> None:
        self._texts = {text.request_id: text for text in texts}
        self._kept: dict[tuple[str, Site], torch.Tensor] = {}

    def write(self, rows: Rows) -> None:
        """Keep a copy of ``rows``."""
        key, first, length = self._where(rows.request, rows.site)
        if key not in self._kept:
            self._kept[key] = torch.zeros(length, *rows.values.shape[1:], dtype=rows.values.dtype)
        begin = rows.start - first
        self._kept[key][begin : begin + len(rows.values)].copy_(rows.values)

    def read(self, like: Rows) -> torch.Tensor | None:
        """The rows of the same request, site and positions as ``like``; None for a site that was never written."""
        key, first, _ = self._where(like.request, like.site)
        begin = like.start - first
        return None if key not in self._kept else self._kept[key][begin : begin + len(like.values)]

    def items(self) -> Iterator[tuple[str, Site, torch.Tensor]]:
        """Every request and site that was written, with all rows."""
        return ((request, site, values) for (request, site), values in self._kept.items())

    def _where(self, request: str, site: Site) -> tuple[tuple[str, Site], int, int]:
        text = self._texts[request]
        if site.tensor is TensorName.LOGITS:
            return (request, site), len(text.prompt) - 1, len(text.continuation)
        return (request, site), 0, text.num_computed
