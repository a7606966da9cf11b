"""Blocks of GGUF files: the quantised layouts of ggml, taken apart into codes, scales and offsets.

A row of a weight is a sequence of blocks, each 32 or 256 neighbouring numbers with their scales. The layouts are those
of ggml (``ggml-common.h``, ``dequantize_row_*`` in ``ggml-quants.c``). In all of them a float32 is what
``code * scale + offset`` rounds to, with one rounding, so nothing is lost by keeping the three apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from compiled_engine.errors import WeightsError
from compiled_engine.ops.quantized_rows import QuantizedRows

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Codes [num_blocks, numbers], scales and offsets [num_blocks, groups] of a list of blocks."""


@dataclass(frozen=True)
class BlockFormat:
    """One ggml type: ``block_numbers`` numbers in ``block_bytes`` bytes.

    ``bits`` is that of the ``QuantizedRows``. ``take_apart`` makes the parts, as copies, of blocks uint8
    [num_blocks, block_bytes].
    """

    block_numbers: int
    block_bytes: int
    bits: int
    take_apart: Callable[[torch.Tensor], Parts]


def decode_blocks(type_name: str, blocks: torch.Tensor) -> QuantizedRows:
    """The rows whose blocks are ``blocks``, uint8 [num_rows, bytes_per_row], of ggml type ``type_name``.

    The result shares no memory with ``blocks``. Scales and offsets are float16 where the type stores them so, else
    float32. Raises ``WeightsError`` for an unknown type or a row that is not a whole number of blocks.
    """
    num_rows, row_bytes = blocks.shape
    shape = num_rows, in_features(type_name, row_bytes)
    kind = BLOCK_FORMATS[type_name]
    codes, scales, offsets = kind.take_apart(blocks.reshape(-1, kind.block_bytes))
    groups = num_rows, shape[1] // kind.block_numbers * scales.shape[1]
    return QuantizedRows(
        kind.bits, codes.view(shape), scales.view(groups), None if offsets is None else offsets.view(groups)
    )


def in_features(type_name: str, row_bytes: int) -> int:
    """Numbers in a row of ``row_bytes`` bytes of ggml type ``type_name``.

    Raises ``WeightsError`` for an unknown type or a row that is not a whole number of blocks.
    """
    kind = BLOCK_FORMATS.get(type_name)
    if kind is None:
        raise WeightsError(f"GGUF blocks of type {type_name!r} are not read: known are {', '.join(BLOCK_FORMATS)}")
    if row_bytes % kind.block_bytes:
        raise WeightsError(f"a row of {row_bytes} bytes is no whole number of {type_name} blocks ({kind.block_bytes})")
    return row_bytes // kind.block_bytes * kind.block_numbers


def _q4_0(blocks: torch.Tensor) -> Parts:
    return _nibbles(blocks[:, 2:]), _halves(blocks[:, :2]), None


def _q4_1(blocks: torch.Tensor) -> Parts:
    return _nibbles(blocks[:, 4:]), _halves(blocks[:, :2]), _halves(blocks[:, 2:4])


def _q5_0(blocks: torch.Tensor) -> Parts:
    codes = _nibbles(blocks[:, 6:]).bitwise_or_(_fifth_bits(blocks[:, 2:6]))
    return codes.view(torch.int8).sub_(16), _halves(blocks[:, :2]), None


def _q5_1(blocks: torch.Tensor) -> Parts:
    codes = _nibbles(blocks[:, 8:]).bitwise_or_(_fifth_bits(blocks[:, 4:8]))
    return codes.view(torch.int8), _halves(blocks[:, :2]), _halves(blocks[:, 2:4])


def _q8_0(blocks: torch.Tensor) -> Parts:
    return _copy(blocks[:, 2:].view(torch.int8)), _halves(blocks[:, :2]), None


def _q4_k(blocks: torch.Tensor) -> Parts:
    return _nibbles(blocks[:, 16:].unflatten(1, (4, 32))).flatten(1), *_scales_and_minima(blocks[:, :16])


def _q5_k(blocks: torch.Tensor) -> Parts:
    codes = _nibbles(blocks[:, 48:].unflatten(1, (4, 32))).view(-1, 8, 32)
    # Bit j of byte i is the fifth bit of number i in group j.
    fifth = blocks[:, None, 16:48].bitwise_right_shift(_shifts(range(8))).bitwise_and_(1)
    codes.bitwise_or_(fifth.bitwise_left_shift_(4))
    return codes.view(torch.int8).flatten(1), *_scales_and_minima(blocks[:, :16])


def _q6_k(blocks: torch.Tensor) -> Parts:
    codes = _nibbles(blocks[:, :128].unflatten(1, (2, 64))).view(-1, 2, 4, 32)
    # Each half of a block has 32 bytes of upper bits: two bits for each of its four runs of 32 numbers.
    upper = blocks[:, 128:192].unflatten(1, (2, 1, 32)).bitwise_right_shift(_shifts((0, 2, 4, 6))).bitwise_and_(3)
    codes.bitwise_or_(upper.bitwise_left_shift_(4))
    scales = blocks[:, 192:208].view(torch.int8) * blocks[:, 208:].view(torch.float16).float()
    return codes.view(torch.int8).sub_(32).flatten(1), scales, None


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n] to uint8 [..., 2 * n]: all lower halves, then all upper ones."""
    codes = torch.empty(*packed.shape[:-1], 2, packed.shape[-1], dtype=torch.uint8)
    torch.bitwise_and(packed, 15, out=codes[..., 0, :])
    torch.bitwise_right_shift(packed, 4, out=codes[..., 1, :])
    return codes.flatten(-2)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [num_blocks, 4] to uint8 [num_blocks, 32]: each bit, lowest first, as 0 or 16."""
    bits = packed[..., None].bitwise_right_shift(torch.arange(8, dtype=torch.uint8)).bitwise_and_(1)
    return bits.bitwise_left_shift_(4).flatten(1)


def _scales_and_minima(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The head of a Q4_K or Q5_K block, uint8 [num_blocks, 16]: two float16, then eight scales and minima of 6 bits.

    Both are float32 [num_blocks, 8]: 17 bits, so exact.
    """
    factors = packed[:, :4].view(torch.float16).float()
    scale, minimum, upper = packed[:, 4:].unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat((scale & 63, (upper & 15) | ((scale >> 2) & 48)), dim=1)
    minima = torch.cat((minimum & 63, (upper >> 4) | ((minimum >> 2) & 48)), dim=1)
    return factors[:, :1] * scales, (factors[:, 1:] * minima).neg_()


def _halves(packed: torch.Tensor) -> torch.Tensor:
    return _copy(packed.view(torch.float16))


def _shifts(bits: Sequence[int]) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.uint8)[:, None]


def _copy(view: torch.Tensor) -> torch.Tensor:
    # Not contiguous(): a single block is contiguous already, and the result would be the caller's memory.
    return view.clone(memory_format=torch.contiguous_format)


BLOCK_FORMATS: Mapping[str, BlockFormat] = MappingProxyType(
    {
        "Q4_0": BlockFormat(32, 18, 4, _q4_0),
        "Q4_1": BlockFormat(32, 20, 4, _q4_1),
        "Q5_0": BlockFormat(32, 22, 8, _q5_0),
        "Q5_1": BlockFormat(32, 24, 8, _q5_1),
        "Q8_0": BlockFormat(32, 34, 8, _q8_0),
        "Q4_K": BlockFormat(256, 144, 4, _q4_k),
        "Q5_K": BlockFormat(256, 176, 8, _q5_k),
        "Q6_K": BlockFormat(256, 210, 8, _q6_k),
    }
)
"""The ggml types that stay blocks, by name."""
