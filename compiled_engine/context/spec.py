"""What one layer wants of its KV cache: sizes, type and kind, and the layout that follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from compiled_engine.errors import ConfigError


class CacheKind(str, Enum):
    """Which tokens a layer may look back at; layers of one kind (and window) can share block tables.

    FULL: all earlier tokens. SLIDING_WINDOW: the last few. CROSS: the tokens of another sequence, an encoder's.
    """

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    CROSS = "cross"


@dataclass(frozen=True)
class KVCacheSpec:
    """One layer's KV cache.

    A cache is one tensor ``[num_blocks, block_size, 2, num_kv_heads, head_dim]``: K and V of a token lie side by
    side, so a token is written and gathered in one move, and a block is one contiguous page.

    ``sliding_window`` is the number of positions a query sees, its own included; set for that kind alone.
    ``shares_with`` names the layer whose very tensor this layer reads instead of owning a cache.
    ``page_padding`` is the number of unused bytes after each page, which makes pages of unlike layers equally large;
    a whole number of elements. Raises ``ConfigError`` for sizes that cannot work.
    """

    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kind: CacheKind = CacheKind.FULL
    sliding_window: int | None = None
    shares_with: str | None = None
    page_padding: int = 0

    def __post_init__(self) -> None:
        for name, least in (("block_size", 1), ("num_kv_heads", 1), ("head_dim", 1), ("page_padding", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"KVCacheSpec.{name} is {value!r}: give a whole number of at least {least}")
        if (self.kind is CacheKind.SLIDING_WINDOW) != (self.sliding_window is not None):
            raise ConfigError(
                f"KVCacheSpec of kind {self.kind.value!r} with sliding_window {self.sliding_window!r}: "
                "a window belongs to kind 'sliding_window' and to no other"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"KVCacheSpec.sliding_window is {self.sliding_window}: give at least 1")
        if self.page_padding % self.dtype.itemsize:
            raise ConfigError(
                f"KVCacheSpec.page_padding is {self.page_padding} bytes: give a multiple of {self.dtype.itemsize}, "
                f"the size of one {self.dtype}"
            )

    @property
    def page_bytes(self) -> int:
        """Bytes of one block, K and V together, without padding."""
        return self.block_size * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def padded_page_bytes(self) -> int:
        """Bytes from the start of one block to the start of the next: what a block costs in memory."""
        return self.page_bytes + self.page_padding

    def shape(self, num_blocks: int) -> tuple[int, int, int, int, int]:
        """Shape of a cache of ``num_blocks`` blocks."""
        return (num_blocks, self.block_size, 2, self.num_kv_heads, self.head_dim)

    def stride(self) -> tuple[int, int, int, int, int]:
        """Strides of a cache, in elements. Contiguous but for the padding between blocks."""
        head = self.head_dim
        heads = self.num_kv_heads * head
        return (self.padded_page_bytes // self.dtype.itemsize, 2 * heads, heads, head, 1)


def key_cache(kv_cache: torch.Tensor) -> torch.Tensor:
    """View of the keys, ``[num_blocks, block_size, num_kv_heads, head_dim]``."""
    return kv_cache[:, :, 0]


def value_cache(kv_cache: torch.Tensor) -> torch.Tensor:
    """View of the values, ``[num_blocks, block_size, num_kv_heads, head_dim]``."""
    return kv_cache[:, :, 1]


def token_slots(kv_cache: torch.Tensor) -> torch.Tensor:
    """View with one row per slot, ``[num_blocks * block_size, 2, num_kv_heads, head_dim]``.

    Raises ``ConfigError`` for a cache with padded pages: its slots are not evenly spaced, so no such view exists.
    """
    if not kv_cache.is_contiguous():
        raise ConfigError("the pages of this KV cache are padded: index it by block and offset instead of by slot")
    return kv_cache.view(-1, *kv_cache.shape[2:])
