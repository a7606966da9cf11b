"""Quantisation against its definition in float64 numpy: nearest codes, bounded errors, never worse than the range."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from compiled_engine.errors import ConfigError, WeightsError
from compiled_engine.ops import quantize
from compiled_engine.ops.quantize import quantize_rows
from compiled_engine.ops.quantized_rows import QuantizedRows

FLOAT32_ROUNDING = 2.0**-23
KINDS = ("normal", "uniform", "outliers", "sparse", "constant groups", "zeros", "far from zero")


def make_weight(kind: str, rows: int, columns: int, magnitude: float, dtype: torch.dtype, seed: int) -> torch.Tensor:
    random = np.random.default_rng(seed)
    values = random.normal(size=(rows, columns))
    if kind == "uniform":
        values = random.uniform(-1, 1, size=(rows, columns))
    elif kind == "outliers":
        values[random.random(values.shape) < 0.03] *= 50
    elif kind == "sparse":
        values[random.random(values.shape) < 0.9] = 0
    elif kind == "constant groups":
        values = np.repeat(random.normal(size=(rows, -(-columns // 16))), 16, axis=1)[:, :columns]
    elif kind == "zeros":
        values[:] = 0
    elif kind == "far from zero":
        values = 1 + values / 1000
    return torch.from_numpy(values * magnitude).to(dtype)


def in_groups(rows: QuantizedRows, weight: torch.Tensor) -> tuple[np.ndarray, ...]:
    """Numbers, codes, scales and offsets as float64, [groups, size] and [groups, 1]."""
    size = rows.group_size
    offsets = torch.zeros_like(rows.scales) if rows.offsets is None else rows.offsets
    parts = [(weight, size), (rows.codes, size), (rows.scales, 1), (offsets, 1)]
    return tuple(part.double().numpy().reshape(-1, width) for part, width in parts)


def errors_of(rows: QuantizedRows, weight: torch.Tensor) -> np.ndarray:
    numbers, codes, scales, offsets = in_groups(rows, weight)
    return np.abs(codes * scales + offsets - numbers)


def squared_error_of_range(numbers: np.ndarray, dtype: type) -> np.ndarray:
    """Per group: the offset is the minimum rounded down to ``dtype``, the scale reaches the maximum, rounded up."""
    low, high = numbers.min(1, keepdims=True), numbers.max(1, keepdims=True)
    offset = low.astype(dtype)
    offset = np.where(offset > low, np.nextafter(offset, dtype(-np.inf)), offset).astype(np.float64)
    exact = (high - offset) / 15
    scale = exact.astype(dtype)
    scale = np.where(scale < exact, np.nextafter(scale, dtype(np.inf)), scale).astype(np.float64)
    codes = np.where(scale > 0, np.round((numbers - offset) / np.where(scale > 0, scale, 1)), 0).clip(0, 15)
    return np.square(codes * scale + offset - numbers).sum(1)


weights = st.builds(
    make_weight,
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 5),
    columns=st.sampled_from((1, 7, 16, 32, 48, 64, 96, 100, 256)),
    magnitude=st.sampled_from((1e-30, 1e-6, 1e-3, 0.02, 1.0, 300.0, 1e5, 1e30)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    seed=st.integers(0, 2**32 - 1),
)


@given(weights)
def test_eight_bits_are_off_by_half_a_step_at_most(weight: torch.Tensor) -> None:
    rows = quantize_rows(weight, 8)
    numbers, codes, scales, _ = in_groups(rows, weight)
    assert rows.bits == 8
    assert rows.codes.dtype == torch.int8
    assert rows.scales.dtype == torch.float32
    assert rows.offsets is None
    assert rows.shape == tuple(weight.shape)
    assert rows.group_size == weight.shape[1]
    assert np.abs(codes).max() <= 127
    assert np.all(np.abs(codes).max(1) == np.where(np.abs(numbers).max(1) > 0, 127, 0))
    assert np.all(errors_of(rows, weight) <= scales * (0.5 + 127 * FLOAT32_ROUNDING))


@given(weights)
def test_four_bit_codes_are_the_nearest_of_their_grid(weight: torch.Tensor) -> None:
    rows = quantize_rows(weight, 4)
    if rows.bits == 8:
        assert weight.shape[1] % 16
        return
    numbers, codes, scales, offsets = in_groups(rows, weight)
    assert rows.codes.dtype == torch.uint8
    assert rows.shape == tuple(weight.shape)
    assert codes.min() >= 0
    assert codes.max() <= 15
    assert scales.min() >= 0
    grid = np.arange(16) * scales + offsets
    best = np.abs(grid[:, None, :] - numbers[:, :, None]).min(2)
    # The division by the scale and the difference from the offset are rounded, to float32 at worst.
    assert np.all(errors_of(rows, weight) <= best + 32 * FLOAT32_ROUNDING * (scales + np.abs(offsets - numbers)))


@given(weights)
@example(make_weight("far from zero", 5, 96, 1.0, torch.float32, 1))
def test_four_bits_are_never_worse_than_the_range_of_each_group(weight: torch.Tensor) -> None:
    rows = quantize_rows(weight, 4)
    if rows.bits == 8:
        return
    numbers = in_groups(rows, weight)[0]
    dtype = np.float16 if rows.scales.dtype == torch.float16 else np.float32
    ours, plain = np.square(errors_of(rows, weight)).sum(1), squared_error_of_range(numbers, dtype)
    rounding = numbers.shape[1] * np.square(FLOAT32_ROUNDING * np.abs(numbers).max(1))
    assert np.all(ours <= plain * (1 + 1e-4) + rounding)


@pytest.mark.parametrize("kind", ["normal", "uniform", "outliers"])
@pytest.mark.parametrize("magnitude", [1e-30, 0.02, 1e30])
def test_least_squares_gains_on_the_range(kind: str, magnitude: float) -> None:
    weight = make_weight(kind, 64, 512, magnitude, torch.float32, 5)
    rows = quantize_rows(weight, 4)
    dtype = np.float16 if rows.scales.dtype == torch.float16 else np.float32
    plain = squared_error_of_range(in_groups(rows, weight)[0], dtype).sum()
    ours = np.square(errors_of(rows, weight)).sum()
    gain = {"normal": 0.86, "uniform": 0.95, "outliers": 0.80}[kind]
    assert ours < gain * plain


def test_four_bits_come_near_the_best_grid_of_an_exhaustive_search() -> None:
    numbers = make_weight("normal", 24, 32, 1.0, torch.float32, 9)
    ours = np.square(errors_of(quantize_rows(numbers, 4), numbers)).sum(1)
    values = numbers.double().numpy()
    low, high = values.min(1), values.max(1)
    best = np.full(len(values), np.inf)
    for bottom in np.linspace(-0.1, 0.3, 81):
        for top in np.linspace(-0.1, 0.3, 81):
            offset = low + bottom * (high - low)
            scale = (high - top * (high - low) - offset) / 15
            codes = np.round((values - offset[:, None]) / scale[:, None]).clip(0, 15)
            best = np.minimum(best, np.square(codes * scale[:, None] + offset[:, None] - values).sum(1))
    assert ours.sum() < 1.15 * best.sum()


@given(
    st.sampled_from((torch.float16, torch.float32)),
    st.sampled_from((16, 32, 48, 64)),
    st.integers(0, 2**32 - 1),
)
def test_what_four_bits_can_represent_stays_as_it_is(dtype: torch.dtype, columns: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    size = 32 if columns % 32 == 0 else 16
    codes = torch.from_numpy(random.integers(0, 16, size=(6, columns // size, size)).astype(np.uint8))
    codes[:, :, 0], codes[:, :, -1] = 15, 0  # a group that uses less than its grid could have been made by another one
    shape, magnitude = (6, columns // size), 1.0 if dtype == torch.float16 else 1e5
    scales = torch.from_numpy(magnitude * random.uniform(0.01, 1, size=shape)).to(dtype)
    offsets = torch.from_numpy(magnitude * random.normal(size=shape) * 4).to(dtype)
    weight = QuantizedRows(4, codes.view(6, columns), scales, offsets).dequantize()
    again = quantize_rows(weight, 4)
    assert again.scales.dtype == dtype
    torch.testing.assert_close(again.codes, codes.view(6, columns), rtol=0, atol=0)
    if dtype == torch.float16:
        torch.testing.assert_close(again.dequantize(), weight, rtol=0, atol=0)
    else:
        torch.testing.assert_close(again.dequantize(), weight, rtol=1e-6, atol=magnitude * 1e-6)


@given(weights)
def test_eight_bits_of_eight_bits_are_the_same_codes(weight: torch.Tensor) -> None:
    once = quantize_rows(weight, 8)
    twice = quantize_rows(once.dequantize(), 8)
    assert torch.equal(once.codes, twice.codes)
    torch.testing.assert_close(twice.scales, once.scales, rtol=2 * FLOAT32_ROUNDING, atol=1e-44)


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_stay_zeros(bits: int) -> None:
    weight = torch.zeros(3, 64)
    weight[1, :32] = torch.linspace(-1, 1, 32)
    numbers = quantize_rows(weight, bits).dequantize()
    assert quantize_rows(weight[::2], 4).scales.dtype == torch.float16
    assert torch.all(quantize_rows(weight[::2], bits).dequantize() == 0)
    assert torch.all(numbers[[0, 2]] == 0)
    assert torch.all(numbers[1, 32:] == 0)
    assert torch.all(torch.isfinite(numbers))


@pytest.mark.parametrize("value", [1.0003, -7.77, 1e-4, -300.123, 31000.7])
def test_constant_groups_keep_more_digits_than_float16_has(value: float) -> None:
    weight = torch.full((2, 64), value)
    numbers = quantize_rows(weight, 4).dequantize()
    # The scale carries what the float16 offset cannot; it is a multiple of float16's smallest number.
    assert torch.all((numbers - weight).abs() <= abs(value) * 2.0**-19 + 15 * 2.0**-25)


def test_scales_are_float32_where_float16_overflows_or_is_coarse() -> None:
    weight = make_weight("normal", 4, 64, 1.0, torch.float32, 3)
    exact = quantize_rows(weight, 4)
    assert exact.scales.dtype == exact.offsets.dtype == torch.float16
    for factor in (2.0**20, 2.0**-20, 2.0**100, 2.0**-100):
        rows = quantize_rows(weight * factor, 4)
        assert rows.scales.dtype == rows.offsets.dtype == torch.float32
        assert errors_of(rows, weight * factor).max() < 0.2 * factor
    one_outlier = weight.clone()
    one_outlier[0, 0] = 1e6
    assert quantize_rows(one_outlier, 4).scales.dtype == torch.float32


@pytest.mark.parametrize(("columns", "bits", "group_size"), [(96, 4, 32), (48, 4, 16), (16, 4, 16), (40, 8, 40)])
def test_rows_that_no_group_divides_get_eight_bits(columns: int, bits: int, group_size: int) -> None:
    rows = quantize_rows(torch.randn(3, columns), 4)
    assert (rows.bits, rows.group_size) == (bits, group_size)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused_by_place(bits: int, value: float) -> None:
    weight = torch.randn(5, 32)
    weight[3, 7] = value
    with pytest.raises(WeightsError, match=f"row 3, column 7 is {value}"):
        quantize_rows(weight, bits)


def test_what_is_no_weight_matrix_is_refused() -> None:
    for weight in (torch.zeros(32), torch.zeros(0, 32), torch.zeros(3, 0), torch.zeros(2, 32, dtype=torch.int8)):
        with pytest.raises(WeightsError, match="must be a matrix"):
            quantize_rows(weight, 4)
    with pytest.raises(ConfigError, match="choose 4 or 8"):
        quantize_rows(torch.zeros(2, 32), 5)


@pytest.mark.parametrize("bits", [4, 8])
def test_chunks_strides_and_gradients_do_not_show(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = make_weight("outliers", 37, 64, 0.1, torch.float32, 2)
    whole = quantize_rows(weight, bits)
    monkeypatch.setattr(quantize, "_CHUNK_NUMBERS", 300)
    for form in (weight.clone().requires_grad_(), weight.t().contiguous().t(), torch.cat([weight, weight], 1)[:, :64]):
        parts = quantize_rows(form, bits)
        assert torch.equal(parts.codes, whole.codes)
        assert torch.equal(parts.scales, whole.scales)
        assert not parts.scales.requires_grad
        assert bits == 8 or torch.equal(parts.offsets, whole.offsets)
