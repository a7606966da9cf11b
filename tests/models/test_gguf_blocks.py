"""Blocks taken apart are the numbers that the gguf package makes of them, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.errors import WeightsError
from compiled_engine.models.gguf_blocks import BLOCK_FORMATS, decode_blocks, in_features

# Only gguf's own names below, so that a wrong size in the table is seen.
TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
QUANTIZABLE = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
# Where the float16 of a block begin. All other bytes may be anything.
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,)} | {
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
EXTREME_HALVES = [0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 1.0, -1.0, 65504.0, -65504.0]


def random_blocks(type_name: str, rows: int, blocks: int, seed: int, halves: list[float] | None) -> np.ndarray:
    """Random bytes [rows, bytes_per_row]; the float16 in them from ``halves``, or any bits at all when None."""
    random = np.random.default_rng(seed)
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    data = random.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    if halves is not None:
        for start in HALVES[type_name]:
            chosen = random.choice(np.array(halves, dtype=np.float16), (rows, blocks, 1))
            data[:, :, start : start + 2] = chosen.view(np.uint8)
    return data.reshape(rows, -1)


def expected_numbers(type_name: str, blocks: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return dequantize(blocks, GGMLQuantizationType[type_name])


def assert_same_bits(ours: torch.Tensor, theirs: np.ndarray) -> None:
    assert ours.dtype == torch.float32
    assert tuple(ours.shape) == theirs.shape
    nan = np.isnan(theirs)
    assert np.array_equal(np.isnan(ours.numpy()), nan)
    assert np.array_equal(ours.numpy().view(np.int32)[~nan], theirs.view(np.int32)[~nan])


@pytest.mark.parametrize("type_name", TYPES)
@given(
    rows=st.integers(1, 5),
    blocks=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    halves=st.none() | st.lists(st.sampled_from(EXTREME_HALVES) | st.floats(width=16), min_size=1, max_size=8),
)
def test_any_blocks_are_the_numbers_of_gguf(
    type_name: str, rows: int, blocks: int, seed: int, halves: list[float] | None
) -> None:
    data = random_blocks(type_name, rows, blocks, seed, halves)
    before = data.copy()
    decoded = decode_blocks(type_name, torch.from_numpy(data))
    assert_same_bits(decoded.dequantize(), expected_numbers(type_name, data))
    assert np.array_equal(data, before)


@pytest.mark.parametrize("type_name", QUANTIZABLE)
@given(
    rows=st.integers(1, 4),
    blocks=st.integers(1, 3),
    seed=st.integers(0, 2**32),
    exponent=st.floats(-12, 4),
)
def test_quantized_numbers_come_back(type_name: str, rows: int, blocks: int, seed: int, exponent: float) -> None:
    numbers = np.random.default_rng(seed).standard_normal((rows, blocks * 32), dtype=np.float32)
    with np.errstate(all="ignore"):
        data = quantize(numbers * np.float32(10**exponent), GGMLQuantizationType[type_name])
    assert_same_bits(decode_blocks(type_name, torch.from_numpy(data)).dequantize(), expected_numbers(type_name, data))


@pytest.mark.parametrize("type_name", TYPES)
def test_parts_have_the_promised_types(type_name: str) -> None:
    """Four-bit types are codes from 0 to 15, the others signed bytes; scales are float16 where the type stores them."""
    data = random_blocks(type_name, 64, 2, 0, [1.0])
    rows = decode_blocks(type_name, torch.from_numpy(data))
    numbers, _ = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    assert rows.shape == (64, 2 * numbers)
    four_bits = type_name in ("Q4_0", "Q4_1", "Q4_K")
    assert (rows.bits, rows.codes.dtype) == ((4, torch.uint8) if four_bits else (8, torch.int8))
    lowest, highest = {
        "Q4_0": (0, 15), "Q4_1": (0, 15), "Q4_K": (0, 15), "Q5_0": (-16, 15), "Q5_1": (0, 31), "Q5_K": (0, 31),
        "Q6_K": (-32, 31), "Q8_0": (-128, 127),
    }[type_name]  # fmt: skip
    assert (int(rows.codes.min()), int(rows.codes.max())) == (lowest, highest)
    assert rows.group_size == (16 if type_name == "Q6_K" else 32)
    assert rows.scales.dtype == (torch.float32 if type_name.endswith("_K") else torch.float16)
    assert (rows.offsets is not None) == (type_name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"))
    if rows.offsets is not None:
        assert (rows.offsets.dtype, rows.offsets.shape) == (rows.scales.dtype, rows.scales.shape)


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("rows", [1, 3])
def test_parts_are_copies(type_name: str, rows: int) -> None:
    blocks = torch.from_numpy(random_blocks(type_name, rows, 1, 1, [0.5]))
    decoded = decode_blocks(type_name, blocks)
    before = decoded.dequantize()
    blocks.fill_(7)
    assert torch.equal(decoded.dequantize(), before)
    for part in (decoded.codes, decoded.scales, decoded.offsets):
        assert part is None or part.is_contiguous()


def test_rows_of_any_stride_are_read() -> None:
    data = torch.from_numpy(random_blocks("Q4_1", 6, 3, 2, [0.25]))
    assert_same_bits(
        decode_blocks("Q4_1", data[1::2, 20:40]).dequantize(), expected_numbers("Q4_1", data[1::2, 20:40].numpy())
    )


@pytest.mark.parametrize("type_name", TYPES)
def test_sizes_are_those_of_ggml(type_name: str) -> None:
    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    assert in_features(type_name, 3 * size) == 3 * numbers
    with pytest.raises(WeightsError, match=rf"{size + 1} bytes is no whole number of {type_name} blocks"):
        in_features(type_name, size + 1)


def test_the_table_has_exactly_these_types() -> None:
    assert sorted(BLOCK_FORMATS) == sorted(TYPES)
    with pytest.raises(WeightsError, match="'Q2_K' are not read: known are Q4_0"):
        decode_blocks("Q2_K", torch.zeros(1, 84, dtype=torch.uint8))
