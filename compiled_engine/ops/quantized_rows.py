"""Quantised weights in plain form: one code per number, a scale and perhaps an offset per group of numbers of a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class QuantizedRows:
    """Rows of a weight [num_rows, in_features], cut into groups of ``group_size`` neighbours within a row.

    bits 4: codes uint8 in 0..15; a number is ``code * scale + offset``, or ``(code - 8) * scale`` without offsets.
    bits 8: codes int8; a number is ``code * scale + offset``, or ``code * scale`` without offsets.
    codes: [num_rows, in_features].   scales, offsets: float16 or float32 [num_rows, in_features // group_size].
    A number is the float32 nearest to the exact value of its formula.
    """

    bits: int
    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """(num_rows, in_features)."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def group_size(self) -> int:
        """Numbers that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    def dequantize(self) -> torch.Tensor:
        """The numbers, float32 [num_rows, in_features]."""
        codes = self.codes.view(*self.scales.shape, self.group_size).double()
        if self.offsets is None:
            numbers = (codes - 8 if self.bits == 4 else codes) * self.scales.double()[..., None]
        else:
            numbers = codes * self.scales.double()[..., None] + self.offsets.double()[..., None]
        return numbers.float().view(self.shape)
