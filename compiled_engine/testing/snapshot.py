"""Looking at a context and at memory before and after, to see that nothing has changed but what should."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from compiled_engine.context import CacheGroup, ContextState, KVCacheSpec, StaticForwardContext


@dataclass(frozen=True)
class ContextSnapshot:
    """All that binding may change, compared with ``==``. ``layers``: name, spec, group, identity of the cache."""

    state: ContextState
    epoch: int
    groups: tuple[CacheGroup, ...]
    layers: tuple[tuple[str, KVCacheSpec | None, int, int | None], ...]

    @classmethod
    def of(cls, context: StaticForwardContext) -> ContextSnapshot:
        """The present state of ``context``."""
        return cls(
            state=context.state,
            epoch=context.epoch,
            groups=context.groups,
            layers=tuple(
                (name, layer.spec, layer.group, id(layer.kv_cache) if layer.is_bound else None)
                for name, layer in context.items()
            ),
        )


class StorageContents:
    """A copy of every byte behind some tensors: their whole storages, padding included."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        self._copies = {address: _as_bytes(storage).clone() for address, storage in self._storages.items()}

    def changed_bytes(self) -> set[int]:
        """Addresses of the bytes that are not as they were."""
        changed: set[int] = set()
        for address, storage in self._storages.items():
            places = torch.nonzero(_as_bytes(storage) != self._copies[address]).flatten()
            changed.update(address + place for place in places.tolist())
        return changed


def token_bytes(cache: torch.Tensor, block: int, offset: int) -> range:
    """Addresses of the bytes of one token's K and V in ``cache``, which are side by side."""
    token = cache[block, offset]
    return range(token.data_ptr(), token.data_ptr() + token.nbytes)


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
