"""Packed weights hold exactly the numbers that went in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.ops.cpu.packing import (
    ALIGNMENT,
    WeightPart,
    can_gate,
    pack_into,
    packed_num_bytes,
    packed_shape,
    unpack,
)
from compiled_engine.ops.quantized_rows import QuantizedRows
from packed_weights import PATHS, STORAGES, aligned_bytes, library, numbers, pack, random_part


@st.composite
def part_lists(draw: st.DrawFn) -> list[WeightPart]:
    """One to three parts of any storage with the same number of inputs."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    group_size = draw(st.sampled_from([None, 16, 32, 48]))
    in_features = draw(st.integers(1, 300)) if group_size is None else group_size * draw(st.integers(1, 7))
    return [
        random_part(
            draw(st.integers(1, 70)),
            in_features,
            draw(st.sampled_from(STORAGES)),
            group_size,
            draw(st.sampled_from([torch.float16, torch.float32])),
        )
        for _ in range(draw(st.integers(1, 3)))
    ]


@pytest.mark.parametrize("path", PATHS)
@given(parts=part_lists())
def test_unpacking_gives_exactly_the_numbers_that_were_packed(path: str, parts: list[WeightPart]) -> None:
    kernels = library(path)
    packed = pack(parts, kernels)
    expected = numbers(parts)
    assert packed_shape(packed) == tuple(expected.shape)
    assert torch.equal(unpack(packed, kernels), expected)


@given(parts=part_lists())
def test_packing_writes_its_bytes_and_no_others(parts: list[WeightPart]) -> None:
    num_bytes, guard = packed_num_bytes(parts), 256
    buffer = aligned_bytes(num_bytes + guard)
    pack_into(parts, buffer[:num_bytes], library(PATHS[0]))
    again = torch.full_like(aligned_bytes(num_bytes), 0x5A)
    packed = aligned_bytes(num_bytes).copy_(again)
    pack_into(parts, packed, library(PATHS[0]))
    assert (buffer[num_bytes:] == 0xA5).all()
    assert torch.equal(buffer[:num_bytes], packed), "every byte, padding too, is decided by the parts"


@pytest.mark.parametrize("storage", STORAGES)
def test_all_paths_pack_the_same_bytes(storage: str) -> None:
    parts = [random_part(37, 96, storage, 32)]
    first, *others = [pack(parts, library(path)) for path in PATHS]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("storage", STORAGES)
def test_rows_may_lie_apart(storage: str) -> None:
    whole = random_part(80, 64, storage, 16)
    if isinstance(whole, QuantizedRows):
        offsets = None if whole.offsets is None else whole.offsets[::2]
        every_other: WeightPart = QuantizedRows(whole.bits, whole.codes[::2], whole.scales[::2], offsets)
    else:
        every_other = whole[::2]
    kernels = library(PATHS[0])
    assert torch.equal(unpack(pack([every_other], kernels), kernels), numbers([whole])[::2])


def test_a_transposed_weight_is_packed_by_its_shape() -> None:
    weight, kernels = torch.randn(40, 50), library(PATHS[0])
    assert torch.equal(unpack(pack([weight.T], kernels), kernels), weight.T)


@pytest.mark.parametrize("path", PATHS)
def test_numbers_are_rounded_once(path: str) -> None:
    codes = torch.randint(-128, 128, (32, 64), dtype=torch.int8)
    scales, offsets = torch.rand(32, 1) + 0.1, -(torch.rand(32, 1) * 100 + 1)
    part = QuantizedRows(8, codes, scales, offsets)
    kernels = library(path)
    assert torch.equal(unpack(pack([part], kernels), kernels), part.dequantize())


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ((64,), True),
        ((40, 40), True),
        ((32, 64, 32, 64), True),
        ((80,), False),
        ((40, 41), False),
        ((64, 32, 32), True),
    ],
)
def test_what_can_be_gated(rows: tuple[int, ...], expected: bool) -> None:
    assert can_gate(pack([torch.randn(count, 8) for count in rows], library(PATHS[0]))) is expected


def codes(bits: int = 4, rows: int = 32, columns: int = 64) -> torch.Tensor:
    return torch.zeros(rows, columns, dtype=torch.uint8 if bits == 4 else torch.int8)


SCALES = torch.ones(32, 4)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "at least one part"),
        ([torch.zeros(4, 8, dtype=torch.float64)], "float32, bfloat16 or float16 matrix"),
        ([torch.zeros(8)], "float32, bfloat16 or float16 matrix"),
        ([torch.zeros(0, 8)], "rows and inputs"),
        ([torch.zeros(4, 0)], "rows and inputs"),
        ([torch.zeros(4, 8), torch.zeros(4, 9)], "one number of inputs"),
        ([QuantizedRows(5, codes(), SCALES, None)], "4 or 8 bits"),
        ([QuantizedRows(8, codes(4), SCALES, None)], "torch.int8 matrix"),
        ([QuantizedRows(4, codes(), SCALES[:31], None)], "scales have shape"),
        ([QuantizedRows(4, codes(), torch.ones(32, 8), None)], "cannot be cut into 8 groups"),
        ([QuantizedRows(4, codes(), torch.ones(32, 3), None)], "cannot be cut into 3 groups"),
        ([QuantizedRows(4, codes(), SCALES.double(), None)], "float32 or float16"),
        ([QuantizedRows(4, codes(), SCALES, SCALES.half())], "like the scales"),
        ([QuantizedRows(4, codes(), SCALES, SCALES[:, :2])], "like the scales"),
    ],
)
def test_parts_that_cannot_be_packed_are_refused(parts: list[WeightPart], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packed_num_bytes(parts)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (aligned_bytes(10), "10 bytes, and the packed weight"),
        (torch.zeros(1000), "contiguous uint8 vector"),
        (aligned_bytes(2000)[::2], "contiguous uint8 vector"),
    ],
)
def test_buffers_that_do_not_fit_are_refused(out: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_into([torch.zeros(32, 8)], out, library(PATHS[0]))


def test_a_buffer_must_be_aligned() -> None:
    parts = [torch.zeros(32, 8)]
    out = aligned_bytes(packed_num_bytes(parts) + ALIGNMENT)[1 : packed_num_bytes(parts) + 1]
    with pytest.raises(ValueError, match="no multiple of 64"):
        pack_into(parts, out, library(PATHS[0]))


def test_other_bytes_are_no_packed_weight() -> None:
    with pytest.raises(ValueError, match="no packed weight"):
        packed_shape(aligned_bytes(1024))
    packed = pack([torch.zeros(32, 8)], library(PATHS[0]))
    assert packed_shape(packed[:64]) == (32, 8), "a view of the head is enough"
    # aligned_bytes() leaves less than ALIGNMENT bytes behind its view.
    cut_off = aligned_bytes(packed.numel() - 2 * ALIGNMENT).copy_(packed[: -2 * ALIGNMENT])
    with pytest.raises(ValueError, match="no packed weight"):
        packed_shape(cut_off)
    with pytest.raises(ValueError, match="at least 64 bytes"):
        packed_shape(aligned_bytes(32))
    with pytest.raises(ValueError, match="contiguous uint8"):
        packed_shape(torch.zeros(100))
