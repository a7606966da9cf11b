"""The CPU's matrix product against float64, and that a row's bits depend on that row and the weight's numbers alone.

With one exception: see ``multiplied_in_pairs``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.ops.cpu.linear import Activation, PackedLinear
from compiled_engine.ops.cpu.packing import WeightPart
from compiled_engine.ops.quantized_rows import QuantizedRows
from packed_weights import DENSE, PATHS, STORAGES, library, magnitudes, numbers, pack, random_part

Function = Callable[[torch.Tensor], torch.Tensor]

FUNCTIONS: dict[Activation, Function] = {
    Activation.NONE: lambda y: y,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: lambda y: F.gelu(y, approximate="tanh"),
    Activation.SILU: F.silu,
    Activation.SILU_AND_MULTIPLY: F.silu,
    Activation.GELU_TANH_AND_MULTIPLY: lambda y: F.gelu(y, approximate="tanh"),
    Activation.GELU_AND_MULTIPLY: F.gelu,
}
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# Rows on both sides of every boundary between kernels: one, a panel, two panels, a group of panels, two of those.
ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 24, 25, 40, 193, 200)


def multiplied_in_pairs(path: str, dtype: torch.dtype, storage: str) -> bool:
    """Whether there is an instruction for this input and storage that sums in an order of its own."""
    return path == "avx512_bf16" and dtype is torch.bfloat16 and storage not in ("float32", "float16")


def product(
    x: torch.Tensor, parts: Sequence[WeightPart], bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x W^T + bias in float64, and a bound on the error of any order of float32 sums."""
    x = x.double()
    y, size = x @ numbers(parts).double().T, x.abs() @ magnitudes(parts).double().T
    if bias is not None:
        y, size = y + bias.double(), size + bias.double().abs()
    return y, size * (x.shape[1] + 3) * 2.0**-24


def expected_and_bound(
    x: torch.Tensor,
    parts: Sequence[WeightPart],
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: Activation,
) -> tuple[torch.Tensor, torch.Tensor]:
    y, bound = product(x, parts, bias)
    if activation is Activation.NONE:
        result = y
    elif activation.gated:
        gate, up = y.chunk(2, dim=-1)
        gate_bound, up_bound = bound.chunk(2, dim=-1)
        activated, activated_bound = activate(activation, gate, gate_bound)
        result, bound = activated * up, activated_bound * up.abs() + (activated.abs() + activated_bound) * up_bound
    else:
        result, bound = activate(activation, y, bound)
    if residual is not None:
        result = result + residual.double()
    return result, bound + result.abs() * ROUNDING[x.dtype] * 2


def activate(activation: Activation, y: torch.Tensor, bound: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """No slope of these functions is over 1.13; their own error is a few units in the last place of the value."""
    result = FUNCTIONS[activation](y)
    return result, 1.2 * bound + result.abs() * 5e-7 + 1e-30


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, list[WeightPart], torch.Tensor | None]:
    """Input, parts of any storage, bias."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    group_size = draw(st.sampled_from([None, None, 16, 32, 48]))
    in_features = draw(st.integers(1, 600)) if group_size is None else group_size * draw(st.integers(1, 12))
    parts = [
        random_part(draw(st.integers(1, 70)), in_features, draw(st.sampled_from(STORAGES)), group_size)
        for _ in range(draw(st.integers(1, 3)))
    ]
    dtype = draw(st.sampled_from(list(ROUNDING)))
    rows, extra_columns = draw(st.integers(1, 40)), draw(st.sampled_from([0, 3]))
    x = torch.randn(rows, in_features + extra_columns).to(dtype)[:, :in_features]
    columns = sum(part.shape[0] for part in parts)
    return x, parts, torch.randn(columns).to(dtype) if draw(st.booleans()) else None


@pytest.mark.parametrize("path", PATHS)
@given(case=cases(), with_residual=st.booleans())
def test_product_of_any_shape_and_storage(
    path: str, case: tuple[torch.Tensor, list[WeightPart], torch.Tensor | None], with_residual: bool
) -> None:
    x, parts, bias = case
    kernels, columns = library(path), sum(part.shape[0] for part in parts)
    residual = torch.randn(x.shape[0], columns + 5).to(x.dtype)[:, 2:-3] if with_residual else None
    out = PackedLinear(kernels)(x, pack(parts, kernels), bias, residual)
    expected, bound = expected_and_bound(x, parts, bias, residual, Activation.NONE)
    assert out.dtype is x.dtype
    assert ((out.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("rows", [3, 30])
def test_activations(activation: Activation, path: str, dtype: torch.dtype, rows: int) -> None:
    kernels = library(path)
    parts = [random_part(40, 320, "float32"), random_part(40, 320, "int4 with offsets", 32)]
    x, bias = torch.randn(rows, 320).to(dtype), torch.randn(80).to(dtype)
    out = PackedLinear(kernels)(x / 8, pack(parts, kernels), bias, activation=activation)
    expected, bound = expected_and_bound(x / 8, parts, bias, None, activation)
    assert out.shape == expected.shape
    assert ((out.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("activation", [Activation.GELU, Activation.GELU_TANH, Activation.SILU])
def test_activations_are_right_to_the_last_bits(path: str, activation: Activation) -> None:
    """The product is the input itself here, so nothing but the function's own error is left."""
    kernels = library(path)
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 60.0, -60.0])])[:, None]
    out = PackedLinear(kernels)(x, pack([torch.ones(1, 1)], kernels), activation=activation).double()
    expected = FUNCTIONS[activation](x.double())
    # The exponent of GELU's falling side is of the size of x squared, and rounded. Where the machine has a fused
    # multiply-add, what rounding takes off x squared itself is made good.
    rounded = activation is Activation.GELU_TANH or (activation is Activation.GELU and path == "portable")
    relative = 4e-7 + (1.5e-7 * x.double() ** 2 if rounded else 0)
    # Far on the left torch's own float64 formula cancels, and below exp(-87) there is nothing.
    allowed = relative * expected.abs() + x.double().abs() * 2.0**-52
    assert ((out - expected).abs() <= allowed).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("storage", "group_size"),
    # Groups of 112 end on both sides of the chunks that sums are made of.
    [(storage, size) for storage in STORAGES for size in ([None] if storage in DENSE else [16, 112, None])],
)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_row_has_the_same_bits_among_any_others(
    path: str, storage: str, group_size: int | None, dtype: torch.dtype
) -> None:
    kernels = library(path)
    linear, packed = PackedLinear(kernels), pack([random_part(70, 560, storage, group_size)], kernels)
    x = torch.randn(max(ROW_COUNTS), 560).to(dtype)
    alone = torch.cat([linear(row, packed) for row in x.split(1)])
    for count in ROW_COUNTS:
        assert torch.equal(linear(x[-count:], packed), alone[-count:])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("storage", ["int8", "int4", "int8 with offsets", "int4 with offsets", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("rows", [1, 3, 12, 40])
def test_equal_numbers_give_equal_bits_however_they_are_stored(
    path: str, storage: str, dtype: torch.dtype, rows: int
) -> None:
    kernels = library(path)
    linear, part = PackedLinear(kernels), random_part(64, 576, storage, 48)
    x = torch.randn(rows, 576).to(dtype)
    out, out_of_floats = linear(x, pack([part], kernels)), linear(x, pack([numbers([part])], kernels))
    if multiplied_in_pairs(path, dtype, storage):
        _, bound = expected_and_bound(x, [part], None, None, Activation.NONE)
        assert ((out.double() - out_of_floats.double()).abs() <= 2 * bound).all()
    else:
        assert torch.equal(out, out_of_floats)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", ROUNDING)
@given(seed=st.integers(0, 2**31), in_features=st.integers(1, 600), rows=st.integers(1, 40))
def test_sums_of_few_bits_are_exact(path: str, dtype: torch.dtype, seed: int, in_features: int, rows: int) -> None:
    kernels, generator = library(path), torch.Generator().manual_seed(seed)
    x = torch.randint(-1, 2, (rows, in_features), generator=generator).to(dtype)
    parts = [torch.randint(-1, 2, (40, in_features), generator=generator).to(dense) for dense in DENSE.values()]
    out = PackedLinear(kernels)(x, pack(parts, kernels))
    assert torch.equal(out.double(), x.double() @ numbers(parts).double().T)


@st.composite
def cases_of_few_bits(draw: st.DrawFn) -> tuple[torch.Tensor, list[WeightPart]]:
    """Input and quantised parts, with groups of their own, whose products and sums have no more bits than a float32."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=generator)

    in_features = draw(st.one_of(st.integers(1, 600), st.sampled_from([96, 288, 336, 448, 560, 576])))
    group_sizes = [in_features, *(size for size in (16, 32, 48, 112, 288) if in_features % size == 0)]
    parts: list[WeightPart] = []
    for _ in range(draw(st.integers(1, 3))):
        rows, scale_dtype = draw(st.integers(1, 70)), draw(st.sampled_from([torch.float16, torch.float32]))
        num_groups = in_features // draw(st.sampled_from(group_sizes))
        scales = 2.0 ** whole(-1, 2, rows, num_groups) * (2 * whole(0, 1, rows, num_groups) - 1)
        offsets = whole(-64, 64, rows, num_groups).to(scale_dtype) if draw(st.booleans()) else None
        bits = draw(st.sampled_from([4, 8]))
        codes = (
            whole(0, 15, rows, in_features).to(torch.uint8)
            if bits == 4
            else whole(-128, 127, rows, in_features).to(torch.int8)
        )
        parts.append(QuantizedRows(bits, codes, scales.to(scale_dtype), offsets))
    num_rows = draw(st.integers(1, 40))
    x = torch.full((num_rows, in_features + draw(st.sampled_from([0, 1, 5]))), float("nan"))
    x[:, :in_features] = whole(-1, 1, num_rows, in_features).float()
    return x[:, :in_features], parts


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", ROUNDING)
@given(case=cases_of_few_bits())
def test_sums_of_codes_of_few_bits_are_exact(
    path: str, dtype: torch.dtype, case: tuple[torch.Tensor, list[WeightPart]]
) -> None:
    """The output's rounding is the only one. Beside the input's rows lies NaN."""
    x, parts = case
    rows, in_features = x.shape
    x = torch.as_strided(x, (rows, x.stride(0)), (x.stride(0), 1)).to(dtype)[:, :in_features]
    kernels = library(path)
    out = PackedLinear(kernels)(x, pack(parts, kernels))
    exact = x.double() @ numbers(parts).double().T
    assert torch.equal(out, exact.to(dtype))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rows", [1, 30])
def test_subnormal_numbers_count_or_are_zero(path: str, rows: int) -> None:
    kernels = library(path)
    x = (torch.randn(rows, 300) * 2.0 ** torch.randint(-134, -118, (rows, 300))).bfloat16()
    weight = torch.randn(40, 300).bfloat16()
    out = PackedLinear(kernels)(x, pack([weight], kernels))
    expected, bound = expected_and_bound(x, [weight], None, None, Activation.NONE)
    # Of each product and each sum no more than the smallest normal number may be missing.
    lost = 2.0**-126 * (1 + weight.double().abs()).sum(dim=1)
    assert ((out.double() - expected).abs() <= bound + lost).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("rows", [1, 30])
def test_the_instruction_for_pairs_is_used(path: str, storage: str, rows: int) -> None:
    """It can be told by its zeros for subnormal numbers."""
    kernels = library(path)
    x, weight = torch.full((rows, 1), 2.0**-130).bfloat16(), torch.full((32, 1), 2.0**100)
    part: WeightPart = (
        weight.to(DENSE[storage])
        if storage in DENSE
        # Codes that mean one.
        else QuantizedRows(8, torch.ones(32, 1, dtype=torch.int8), weight, None)
        if storage == "int8"
        else QuantizedRows(4, torch.full((32, 1), 9, dtype=torch.uint8), weight, None)
    )
    out = PackedLinear(kernels)(x, pack([part], kernels))
    expected = 0 if multiplied_in_pairs(path, x.dtype, storage) else 2.0**-30
    assert (out == expected).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rows", [1, 8, 50])
@pytest.mark.parametrize("activation", [Activation.NONE, Activation.SILU_AND_MULTIPLY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("storage", ["int8", "int4 with offsets"])
def test_threads_do_not_change_bits(
    path: str, rows: int, activation: Activation, dtype: torch.dtype, storage: str
) -> None:
    kernels = library(path)
    kernels.set_num_threads.argtypes = [ctypes.c_int64]
    parts = [random_part(320, 304, storage, 16), random_part(320, 304, "bfloat16")]
    linear, packed = PackedLinear(kernels), pack(parts, kernels)
    x, results = torch.randn(rows, 304).to(dtype), []
    try:
        for count in (1, 2, 3, 7):
            kernels.set_num_threads(count)
            results.append(linear(x, packed, activation=activation))
    finally:
        kernels.set_num_threads(0)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("rows", [5, 29])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_stays_in_its_row(path: str, activation: Activation, rows: int, dtype: torch.dtype) -> None:
    kernels = library(path)
    storages = ("int4", "bfloat16", "int8 with offsets", "int4 with offsets")
    parts = [random_part(40, 70, storage) for storage in storages]
    linear, packed = PackedLinear(kernels), pack(parts, kernels)
    x = torch.randn(rows, 70).to(dtype)
    clean = linear(x, packed, activation=activation)
    x[2, 69] = float("nan")
    dirty = linear(x, packed, activation=activation)
    assert dirty[2].isnan().all()
    others = torch.arange(rows) != 2
    assert torch.equal(dirty[others], clean[others])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("activation", [Activation.NONE, Activation.GELU_AND_MULTIPLY])
@given(rows=st.integers(1, 40), columns=st.integers(1, 70))
def test_nothing_is_written_beside_the_output(path: str, activation: Activation, rows: int, columns: int) -> None:
    kernels = library(path)
    packed = pack([random_part(columns, 20, "float32"), random_part(columns, 20, "float16")], kernels)
    PackedLinear(kernels)
    size, guard = rows * columns * (1 if activation.gated else 2), 64
    out = torch.full((size + 2 * guard,), -7.0)
    x = torch.randn(rows, 20)
    inside = out[guard : guard + size]
    kernels.packed_linear(
        x.data_ptr(), 20, rows, 0, packed.data_ptr(), None, None, 0, inside.data_ptr(), int(activation)
    )
    assert (out[:guard] == -7).all()
    assert (out[guard + size :] == -7).all()
    assert (inside != -7).all()


def test_leading_dimensions_and_no_rows() -> None:
    kernels = library(PATHS[0])
    linear, packed = PackedLinear(kernels), pack([torch.eye(4)], kernels)
    x = torch.randn(2, 3, 4)
    assert torch.equal(linear(x, packed), x)
    assert torch.equal(linear(x.transpose(0, 1), packed, residual=x.transpose(0, 1)), 2 * x.transpose(0, 1))
    assert torch.equal(linear(x[0, 0], packed), x[0, 0])
    assert linear(x[:, :0], packed).shape == (2, 0, 4)


def test_a_gate_that_is_not_packed_like_the_other_half() -> None:
    kernels = library(PATHS[0])
    linear, packed = PackedLinear(kernels), pack([torch.randn(80, 8)], kernels)
    with pytest.raises(ValueError, match="SILU_AND_MULTIPLY needs gate and up"):
        linear(torch.randn(3, 8), packed, activation=Activation.SILU_AND_MULTIPLY)
    out = torch.zeros(3, 40)
    kernels.packed_linear(torch.randn(3, 8).data_ptr(), 8, 3, 0, packed.data_ptr(), None, None, 0, out.data_ptr(), 4)
    assert out.isnan().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input": torch.zeros(2, 9)}, "with 8 columns"),
        ({"input": torch.zeros(2, 8, dtype=torch.float64)}, "with 8 columns"),
        ({"bias": torch.zeros(5)}, "the bias must be"),
        ({"bias": torch.zeros(4, dtype=torch.float16)}, "the bias must be"),
        ({"residual": torch.zeros(3, 4)}, "the residual must be"),
        ({"packed": torch.zeros(4, 8)}, "contiguous uint8"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(arguments: dict[str, torch.Tensor], message: str) -> None:
    kernels = library(PATHS[0])
    fitting = {"input": torch.zeros(2, 8), "packed": pack([torch.zeros(4, 8)], kernels)}
    with pytest.raises(ValueError, match=message):
        PackedLinear(kernels)(**{**fitting, **arguments})
