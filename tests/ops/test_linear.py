"""The linear op: packed and plain weights against ``F.linear``, and what the op tells compilers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.ops.linear import can_pack, can_pack_dtype, pack_weight

needs_packing = pytest.mark.skipif(not can_pack(torch.device("cpu")), reason="torch was built without oneDNN")


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.compiled_engine.linear(input, weight, bias)


leading = st.lists(st.integers(0, 5), min_size=0, max_size=3)


@needs_packing
@given(leading=leading, in_features=st.integers(1, 70), out_features=st.integers(1, 70), with_bias=st.booleans())
def test_a_packed_weight_gives_what_the_plain_one_gives(
    leading: list[int], in_features: int, out_features: int, with_bias: bool
) -> None:
    input = torch.randn(*leading, in_features)
    weight = torch.randn(out_features, in_features)
    bias = torch.randn(out_features) if with_bias else None
    packed = pack_weight(weight)
    result = linear(input, packed, bias)
    expected = F.linear(input.double(), weight.double(), bias.double() if bias is not None else None)
    assert packed.is_mkldnn
    assert packed.shape == weight.shape
    assert not result.is_mkldnn
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(linear(input, weight, bias), F.linear(input, weight, bias), rtol=0, atol=0)


@needs_packing
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 257])
def test_sizes_of_a_real_layer(rows: int) -> None:
    input, weight = torch.randn(1, rows, 576), torch.randn(960, 576)
    expected = F.linear(input.double(), weight.double())
    torch.testing.assert_close(linear(input, pack_weight(weight), None).double(), expected, rtol=1e-4, atol=1e-3)


@needs_packing
@pytest.mark.parametrize(
    "layout",
    [
        lambda: torch.randn(16, 6).T,
        lambda: torch.randn(6, 32)[:, ::2],
        lambda: torch.randn(6, 40)[:, 3:19],
        lambda: torch.randn(2, 3, 16).transpose(0, 1),
        lambda: torch.randn(1, 16).expand(6, 16),
    ],
    ids=["transposed", "strided", "narrowed", "swapped", "expanded"],
)
def test_any_layout_of_the_input(layout: object) -> None:
    input = layout()  # type: ignore[operator]
    weight, bias = torch.randn(8, 16), torch.randn(8)
    packed, plain = linear(input, pack_weight(weight), bias), F.linear(input, weight, bias)
    torch.testing.assert_close(packed, plain, rtol=1e-5, atol=1e-5)
    assert packed.is_contiguous(), "the fake says so, and compiled pieces trust it"


@needs_packing
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_weights_are_packed_where_the_cpu_can(dtype: torch.dtype) -> None:
    weight, input = torch.randn(8, 16).to(dtype), torch.randn(3, 16).to(dtype)
    if can_pack_dtype(dtype):
        torch.testing.assert_close(linear(input, pack_weight(weight), None), F.linear(input, weight))
    else:
        with pytest.raises(RuntimeError):
            pack_weight(weight)


def test_only_float_types_are_packed() -> None:
    assert can_pack_dtype(torch.float32)
    assert not can_pack_dtype(torch.float64)
    assert not can_pack_dtype(torch.int8)
    assert not can_pack(torch.device("cuda"))


def test_the_op_tells_compilers_the_truth() -> None:
    """Schema (nothing is mutated, no aliases) and the fake's shapes, strides, dtypes, checked by torch itself."""
    op = torch.ops.compiled_engine.linear.default
    for shape in [(4,), (3, 4), (2, 3, 4), (0, 4)]:
        for bias in (None, torch.randn(5)):
            torch.library.opcheck(
                op, (torch.randn(shape), torch.randn(5, 4), bias), test_utils=("test_schema", "test_faketensor")
            )
    schema = op._schema
    assert not schema.is_mutable
    assert str(schema) == "compiled_engine::linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor"


def test_a_wrong_width_is_an_error_for_packed_weights_too() -> None:
    packed = pack_weight(torch.randn(8, 16)) if can_pack(torch.device("cpu")) else torch.randn(8, 16)
    with pytest.raises(RuntimeError):
        linear(torch.randn(3, 15), packed, None)
