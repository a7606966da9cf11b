"""The op over packed weights: what it computes, what it tells compilers, and its shim in pieces compiled ahead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.ops.cpu.build import load_kernels
from compiled_engine.ops.cpu.linear import Activation
from compiled_engine.ops.cpu.packing import PACKED_HEAD_BYTES, packed_num_bytes
from compiled_engine.ops.linear import C_SHIM, can_pack, pack_weight
from kernel_folder import KERNELS

OP = torch.ops.compiled_engine.packed_linear.default
leading = st.lists(st.integers(1, 5), min_size=0, max_size=3)


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    load_kernels(KERNELS)


def buffer_for(*parts: torch.Tensor) -> torch.Tensor:
    num_bytes = packed_num_bytes(parts)
    memory = torch.empty(num_bytes + 64, dtype=torch.uint8)
    start = -memory.data_ptr() % 64
    return memory[start : start + num_bytes]


def packed(*parts: torch.Tensor) -> torch.Tensor:
    return pack_weight(parts, buffer_for(*parts))


def test_a_graph_sees_the_head_alone() -> None:
    assert packed(torch.randn(8, 16)).shape == (PACKED_HEAD_BYTES,)


@given(leading=leading, in_features=st.integers(1, 70), out_features=st.integers(1, 70), extras=st.sets(st.booleans()))
def test_the_product_with_bias_and_residual(
    leading: list[int], in_features: int, out_features: int, extras: set[bool]
) -> None:
    input, weight = torch.randn(*leading, in_features), torch.randn(out_features, in_features)
    bias = torch.randn(out_features) if True in extras else None
    residual = torch.randn(*leading, out_features) if False in extras else None
    result = OP(input, packed(weight), bias, residual, out_features, 0)
    expected = F.linear(input.double(), weight.double(), bias.double() if bias is not None else None)
    expected = expected if residual is None else expected + residual.double()
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-4)
    assert result.shape == expected.shape


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
def test_any_layout_of_the_input(layout: Callable[[], torch.Tensor]) -> None:
    input, weight, bias = layout(), torch.randn(8, 16), torch.randn(8)
    result = OP(input, packed(weight), bias, None, 8, 0)
    torch.testing.assert_close(result, F.linear(input, weight, bias), rtol=1e-5, atol=1e-5)
    assert result.is_contiguous(), "the fake says so, and compiled pieces trust it"


def test_which_types_are_packed() -> None:
    cpu = torch.device("cpu")
    assert can_pack(cpu)
    assert can_pack(cpu, torch.bfloat16)
    assert not can_pack(cpu, torch.float64)
    assert not can_pack(torch.device("cuda"))


def test_the_op_tells_compilers_the_truth() -> None:
    """Schema (nothing is mutated, no aliases) and the fake's shapes, strides, dtypes, checked by torch itself."""
    # The whole buffer, because torch copies what it checks with, and a copied head has lost its numbers.
    rows = torch.randn(6, 4)
    weight = buffer_for(rows)
    pack_weight([rows], weight)
    for shape in [(4,), (3, 4), (2, 3, 4)]:
        for bias in (None, torch.randn(6)):
            arguments = (torch.randn(shape), weight, bias, torch.randn(*shape[:-1], 6), 6, 0)
            torch.library.opcheck(OP, arguments, test_utils=("test_schema", "test_faketensor"))
    halves = [torch.randn(3, 4), torch.randn(3, 4)]
    gated = buffer_for(*halves)
    pack_weight(halves, gated)
    arguments = (torch.randn(2, 4), gated, None, None, 3, int(Activation.SILU_AND_MULTIPLY))
    torch.library.opcheck(OP, arguments, test_utils=("test_schema", "test_faketensor"))
    assert not OP._schema.is_mutable


def test_a_wrong_width_is_an_error() -> None:
    with pytest.raises(ValueError, match="16 columns"):
        OP(torch.randn(3, 15), packed(torch.randn(8, 16)), None, None, 8, 0)


class Chain(torch.nn.Module):
    """Two products with every kind of operand, as a piece has them."""

    def forward(
        self,
        input: torch.Tensor,
        first: torch.Tensor,
        bias: torch.Tensor,
        second: torch.Tensor,
        residual: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inner = OP(input, first, bias, None, 24, int(Activation.SILU_AND_MULTIPLY))
        # A view with gaps between its rows, as q, k and v are.
        return inner, OP(inner[..., 4:20] * 2, second, None, residual, 10, 0)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``Chain`` compiled by AOTInductor for float32 rows [1, n, 16]."""
    examples = (
        torch.randn(1, 4, 16),
        torch.zeros(PACKED_HEAD_BYTES, dtype=torch.uint8),
        torch.randn(48),
        torch.zeros(PACKED_HEAD_BYTES, dtype=torch.uint8),
        torch.randn(1, 4, 10),
    )
    rows = {1: torch.export.Dim.DYNAMIC}
    program = torch.export.export(Chain(), examples, dynamic_shapes=(rows, None, None, None, rows))
    path = tmp_path_factory.mktemp("package") / "chain.pt2"
    with torch._inductor.config.patch("aot_inductor.custom_ops_to_c_shims", {OP: [C_SHIM]}):
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return path


@pytest.mark.parametrize("rows", [2, 3, 33])
def test_a_compiled_piece_calls_the_kernel_and_gives_the_same_bits(package: Path, rows: int) -> None:
    run = torch._C._aoti.AOTIModelPackageLoader(str(package), "model", False, 1, -1).run
    first, second = packed(torch.randn(24, 16), torch.randn(24, 16)), packed(torch.randn(10, 16))
    arguments = [torch.randn(1, rows, 16), first, torch.randn(48), second, torch.randn(1, rows, 10)]
    for ours, expected in zip(run(arguments), Chain()(*arguments), strict=True):
        assert torch.equal(ours, expected)


def test_a_head_without_its_numbers_is_refused(package: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A copy of the view that graphs see must not be read past its end."""
    lost = packed(torch.randn(24, 16), torch.randn(24, 16)).clone()
    with pytest.raises(ValueError, match="no packed weight"):
        OP(torch.randn(2, 16), lost, None, None, 48, 0)
    run = torch._C._aoti.AOTIModelPackageLoader(str(package), "model", False, 1, -1).run
    with pytest.raises(RuntimeError):
        run([torch.randn(1, 4, 16), lost, torch.randn(48), lost, torch.randn(1, 4, 10)])
    assert "no packed weight" in capfd.readouterr().err


def test_a_compiled_piece_refuses_what_the_kernel_cannot_take(package: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = torch._C._aoti.AOTIModelPackageLoader(str(package), "model", False, 1, -1).run
    weight = packed(torch.randn(24, 16), torch.randn(24, 16))
    with pytest.raises(RuntimeError):
        run([torch.randn(1, 4, 16).double(), weight, torch.randn(48), weight, torch.randn(1, 4, 10)])
    assert "neither float32 nor bfloat16 nor float16" in capfd.readouterr().err
