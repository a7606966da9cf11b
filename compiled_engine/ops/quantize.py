"""Weights of floating point numbers become 4- or 8-bit codes, row by row, with the error kept small."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from compiled_engine.errors import ConfigError, WeightsError
from compiled_engine.ops.quantized_rows import QuantizedRows

GROUP_SIZES = (32, 16)
"""Group sizes of 4-bit weights, the preferred one first."""

# Numbers worked on at a time: enough for all threads, and a peak of memory that no one sees.
_CHUNK_NUMBERS = 1 << 19
_MAX_CODE_4, _MAX_CODE_8 = 15, 127
# Between these largest magnitudes of a weight, float16 scales neither overflow nor are all subnormal, i.e. coarse.
_FLOAT16_RANGE = (2.0**-9, 2.0**15)
# The search starts from a group's whole range, and from this share of it, which leaves the outermost numbers out. For
# normally distributed weights the root mean square error falls from 7.8 to 7.2 % of their deviation; seven starts and
# six fits reach 7.0 %.
_NARROW_SHARE = 0.9
_FITS_PER_START = 3
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def quantize_rows(weight: torch.Tensor, bits: Literal[4, 8]) -> QuantizedRows:
    """Quantise ``weight`` [num_rows, in_features], float32, bfloat16 or float16, to ``bits`` bits.

    8 bits: one float32 scale for a row, the largest magnitude over 127; codes -127..127, no offsets. A scale serves a
    whole row, so that float16 would save next to nothing.

    4 bits: groups of 32, or of 16 where only that divides ``in_features``; where neither does, the result has 8 bits
    (``bits`` of the result says so). Each group has a scale >= 0 and an offset, float16, or float32 where the weight's
    largest magnitude is too large or too small for float16. The search begins with the group's range, for which no
    number is off by more than half a step; then grid and codes are fitted to each other by least squares, in turns
    (Lloyd, "Least squares quantization in PCM", 1982), from that range and from a narrower one. What has the smallest
    squared error is kept, so it is never worse than the range. Codes and errors are those of the rounded scale and
    offset.

    Works in chunks of rows; besides the result it needs some tens of MB. Raises ``ConfigError`` for other bits and
    ``WeightsError`` for a weight that is no matrix, has another dtype, is empty, or holds NaN or infinity.
    """
    if bits not in (4, 8):
        raise ConfigError(f"bits is {bits!r}: choose 4 or 8")
    _check_matrix(weight)
    smallest, largest = torch.aminmax(weight)
    magnitude = max(-smallest.item(), largest.item())
    if not magnitude < float("inf"):
        raise WeightsError(_describe_not_finite(weight))
    group_size = next((size for size in GROUP_SIZES if weight.shape[1] % size == 0), None)
    if bits == 8 or group_size is None:
        return _quantize_8(weight)
    return _quantize_4(weight, group_size, _scale_dtype(magnitude))


def _check_matrix(weight: torch.Tensor) -> None:
    if weight.dim() != 2 or weight.numel() == 0 or weight.dtype not in _DTYPES:
        raise WeightsError(
            f"a weight of shape {list(weight.shape)} and {weight.dtype} cannot be quantised: it must be a matrix, not "
            "empty, of float32, bfloat16 or float16"
        )


def _describe_not_finite(weight: torch.Tensor) -> str:
    row, column = torch.nonzero(~torch.isfinite(weight))[0].tolist()
    return f"a weight cannot be quantised: row {row}, column {column} is {weight[row, column].item()}"


def _scale_dtype(magnitude: float) -> torch.dtype:
    low, high = _FLOAT16_RANGE
    return torch.float16 if magnitude == 0 or low <= magnitude <= high else torch.float32


def _chunks(weight: torch.Tensor) -> list[slice]:
    rows = max(1, _CHUNK_NUMBERS // weight.shape[1])
    return [slice(first, first + rows) for first in range(0, weight.shape[0], rows)]


def _quantize_8(weight: torch.Tensor) -> QuantizedRows:
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0], 1, dtype=torch.float32)
    for rows in _chunks(weight):
        numbers = weight[rows].double()
        scales[rows] = (numbers.abs().amax(1, keepdim=True) / _MAX_CODE_8).float()
        steps = scales[rows].double()
        codes[rows] = (numbers * _inverse(steps)).round_().clamp_(-_MAX_CODE_8, _MAX_CODE_8).to(torch.int8)
    return QuantizedRows(8, codes, scales, None)


def _quantize_4(weight: torch.Tensor, group_size: int, scale_dtype: torch.dtype) -> QuantizedRows:
    num_rows, in_features = weight.shape
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    scales = torch.empty(num_rows, in_features // group_size, dtype=scale_dtype)
    offsets = torch.empty_like(scales)
    # Products of a code and a float16 scale are exact in float32, those of a float32 scale in float64.
    arithmetic = torch.float32 if scale_dtype is torch.float16 else torch.float64
    for rows in _chunks(weight):
        groups = weight[rows].to(arithmetic).reshape(-1, group_size)
        grid = _fit(groups, scale_dtype)
        codes[rows] = grid.codes(groups).to(torch.uint8).view(-1, in_features)
        scales[rows] = grid.scales.to(scale_dtype).view(-1, scales.shape[1])
        offsets[rows] = grid.offsets.to(scale_dtype).view(-1, scales.shape[1])
    return QuantizedRows(4, codes, scales, offsets)


@dataclass(frozen=True)
class _Grid:
    """The 16 numbers ``code * scale + offset`` of each group; scales and offsets [num_groups, 1] hold float16 or
    float32 values in a dtype to compute with."""

    scales: torch.Tensor
    offsets: torch.Tensor

    def codes(self, groups: torch.Tensor) -> torch.Tensor:
        """Code of the nearest number of the grid for all ``groups`` [num_groups, group_size], same dtype."""
        return groups.sub(self.offsets).mul_(_inverse(self.scales)).round_().clamp_(0, _MAX_CODE_4)

    def squared_errors(self, groups: torch.Tensor) -> torch.Tensor:
        """[num_groups, 1]."""
        return self.codes(groups).mul_(self.scales).add_(self.offsets).sub_(groups).square_().sum(1, keepdim=True)


def _fit(groups: torch.Tensor, dtype: torch.dtype) -> _Grid:
    """A grid of ``dtype`` values with a small squared error for each group."""
    best = whole = _range_grid(groups, dtype)
    errors = best.squared_errors(groups)
    for grid in (whole, _narrower(groups, _NARROW_SHARE, dtype)):
        for _ in range(_FITS_PER_START):
            grid = _least_squares(groups, grid, dtype)
        best, errors = _better(best, errors, grid, grid.squared_errors(groups))
    return best


def _range_grid(groups: torch.Tensor, dtype: torch.dtype) -> _Grid:
    """The offset rounded down and the scale rounded up, so that every number lies between code 0 and code 15."""
    smallest, largest = torch.aminmax(groups, dim=1, keepdim=True)
    offsets = _rounded(smallest, dtype, down=True)
    return _Grid(_rounded((largest - offsets) / _MAX_CODE_4, dtype, down=False), offsets)


def _narrower(groups: torch.Tensor, share: float, dtype: torch.dtype) -> _Grid:
    smallest, largest = torch.aminmax(groups, dim=1, keepdim=True)
    cut = (largest - smallest) * ((1 - share) / 2)
    offsets = (smallest + cut).to(dtype).to(groups.dtype)
    return _Grid(((largest - cut - offsets) / _MAX_CODE_4).to(dtype).to(groups.dtype).clamp_(min=0), offsets)


def _least_squares(groups: torch.Tensor, grid: _Grid, dtype: torch.dtype) -> _Grid:
    """The best grid for the codes that ``grid`` gives: the offset by linear regression, then the scale for the rounded
    offset. Where all codes of a group are alike, its scale stays."""
    codes = grid.codes(groups)
    # From the present offset, so that a large part that a group's numbers have in common cancels no digits.
    rest = groups - grid.offsets
    size = groups.shape[1]
    sum_rest, sum_codes = rest.sum(1, keepdim=True), codes.sum(1, keepdim=True)
    products = rest.mul_(codes).sum(1, keepdim=True)
    squares = codes.square_().sum(1, keepdim=True)
    spread = squares - sum_codes.square() / size
    slopes = torch.where(spread > 0, (products - sum_codes * sum_rest / size) / spread, grid.scales)
    offsets = (grid.offsets + (sum_rest - slopes * sum_codes) / size).to(dtype).to(groups.dtype)
    scales = (products - (offsets - grid.offsets) * sum_codes) / squares
    scales = torch.where(spread > 0, scales, grid.scales).clamp_(min=0)
    return _Grid(scales.to(dtype).to(groups.dtype), offsets)


def _better(best: _Grid, errors: torch.Tensor, grid: _Grid, new_errors: torch.Tensor) -> tuple[_Grid, torch.Tensor]:
    """Group by group the grid with the smaller error, and that error."""
    wins = new_errors < errors
    chosen = _Grid(
        torch.where(wins, grid.scales, best.scales),
        torch.where(wins, grid.offsets, best.offsets),
    )
    return chosen, torch.where(wins, new_errors, errors)


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    """1 / scale; 0 for a scale of zero, whose numbers are all alike."""
    return torch.where(scales > 0, 1 / scales, 0)


def _rounded(values: torch.Tensor, dtype: torch.dtype, *, down: bool) -> torch.Tensor:
    """``values`` rounded to ``dtype``, down or up, in the dtype that they came in."""
    nearest = values.to(dtype)
    back = nearest.to(values.dtype)
    wrong = back > values if down else back < values
    beyond = torch.nextafter(nearest, torch.full_like(nearest, -torch.inf if down else torch.inf))
    return torch.where(wrong, beyond.to(values.dtype), back)
