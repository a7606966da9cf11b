"""What one layer wants of its KV cache: sizes, type and kind, and the layout that follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from compiled_engine.errors import ConfigError


class CacheKind(str, Enum):
    """Which tokens a layer may look back at; layers of one kind (and window) can share block tables."""

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
    Raises ``ConfigError`` for sizes that cannot work.
    """

    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kind: CacheKind = CacheKind.FULL
    sliding_window: int | None = None
    shares_with: str | None = None

    def __post_init__(self) -> None:
        for name in ("block_size", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"KVCacheSpec.{name} is {value!r}: give a whole number of at least 1")
        if (self.kind is CacheKind.SLIDING_WINDOW) != (self.sliding_window is not None):
            raise ConfigError(
                f"KVCacheSpec of kind {self.kind.value!r} with sliding_window {self.sliding_window!r}: "
                "a window belongs to kind 'sliding_window' and to no other"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"KVCacheSpec.sliding_window is {self.sliding_window}: give at least 1")

    @property
    def page_bytes(self) -> int:
        """Bytes of one block, K and V together."""
        return self.block_size * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def shape(self, num_blocks: int) -> tuple[int, int, int, int, int]:
        """Shape of a cache of ``num_blocks`` blocks."""
        return (num_blocks, self.block_size, 2, self.num_kv_heads, self.head_dim)


def key_cache(kv_cache: torch.Tensor) -> torch.Tensor:
    """View of the keys, ``[num_blocks, block_size, num_kv_heads, head_dim]``."""
    return kv_cache[:, :, 0]


def value_cache(kv_cache: torch.Tensor) -> torch.Tensor:
    """View of the values, ``[num_blocks, block_size, num_kv_heads, head_dim]``."""
    return kv_cache[:, :, 1]


def token_slots(kv_cache: torch.Tensor) -> torch.Tensor:
    """View with one row per slot, ``[num_blocks * block_size, 2, num_kv_heads, head_dim]``."""
    return kv_cache.view(-1, *kv_cache.shape[2:])
