"""What is wrong with the tensors that someone wants to bind. Each function returns the faults it found, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from .spec import KVCacheSpec

# Tensors on other devices have no address that stays theirs (XLA), or no memory (meta).
_ADDRESSED_DEVICES = ("cpu", "cuda")

SpecAndCache = tuple[KVCacheSpec, torch.Tensor]


def has_address(cache: torch.Tensor) -> bool:
    """Whether ``cache.data_ptr()`` is where the tensor stays."""
    return cache.device.type in _ADDRESSED_DEVICES


def tensor_faults(name: str, spec: KVCacheSpec, cache: object) -> list[str]:
    """Type, device, shape, layout and dtype of one layer's cache against its spec."""
    if not isinstance(cache, torch.Tensor):
        return [f"layer {name!r}: the cache is a {type(cache).__name__}, not a tensor"]
    faults = []
    if cache.is_meta:
        faults.append(f"layer {name!r}: the cache is on device 'meta', which has no memory")
    expected = spec.shape(cache.shape[0] if cache.dim() else 0)
    if tuple(cache.shape) != expected or cache.shape[0] < 1:
        faults.append(f"layer {name!r}: shape {tuple(cache.shape)}, expected {('num_blocks', *expected[1:])}")
    elif cache.layout != torch.strided or not _has_strides(cache, spec):
        faults.append(
            f"layer {name!r}: strides {cache.stride() if cache.layout == torch.strided else cache.layout}, expected "
            f"{spec.stride()}: pages of {spec.padded_page_bytes} bytes, each contiguous"
        )
    if cache.dtype != spec.dtype:
        faults.append(f"layer {name!r}: dtype {cache.dtype}, expected {spec.dtype}")
    return faults


def device_faults(caches: Mapping[str, torch.Tensor]) -> list[str]:
    """One engine has its caches on one device."""
    by_device: dict[str, list[str]] = {}
    for name, cache in caches.items():
        by_device.setdefault(str(cache.device), []).append(name)
    if len(by_device) < 2:
        return []
    where = "; ".join(f"{device}: {', '.join(map(repr, names))}" for device, names in sorted(by_device.items()))
    return [f"caches lie on several devices, one engine uses one ({where})"]


def block_count_faults(caches: Mapping[str, torch.Tensor], groups: Mapping[str, int]) -> list[str]:
    """Layers of one cache group use the same block tables, so they need the same number of blocks."""
    counts: dict[int, dict[int, list[str]]] = {}
    for name, cache in caches.items():
        counts.setdefault(groups[name], {}).setdefault(cache.shape[0], []).append(name)
    faults = []
    for group, by_count in sorted(counts.items()):
        if len(by_count) > 1:
            what = "; ".join(f"{count}: {', '.join(map(repr, names))}" for count, names in sorted(by_count.items()))
            faults.append(f"layers of cache group {group} have unlike numbers of blocks ({what})")
    return faults


@dataclass(frozen=True)
class Pages:
    """Where a cache lies: ``num_blocks`` pages of ``page_bytes`` from ``start`` on, one every ``page_step`` bytes."""

    name: str
    start: int
    page_bytes: int
    page_step: int
    num_blocks: int
    storage: int
    is_new: bool

    @property
    def end(self) -> int:
        return self.start + (self.num_blocks - 1) * self.page_step + self.page_bytes

    def overlaps(self, other: Pages) -> bool:
        """Exact for pages at equal steps; for others, whether the whole ranges overlap."""
        if self.page_step != other.page_step:
            return self.start < other.end and other.start < self.end
        # Page k of self meets page j of other when -other.page_bytes < distance + (j - k) * step < self.page_bytes.
        step, distance = self.page_step, other.start - self.start
        lowest = max((-other.page_bytes - distance) // step + 1, -(self.num_blocks - 1))
        highest = min(-((distance - self.page_bytes) // step) - 1, other.num_blocks - 1)
        return lowest <= highest


def memory_faults(caches: Mapping[str, SpecAndCache], elsewhere: Mapping[str, SpecAndCache]) -> list[str]:
    """No two owners may overlap in memory, and views of one storage must have pages of one size (vllm#41657).

    ``caches`` are those to be bound, one per owner and with the layout of their specs; ``elsewhere`` are bound in
    other namespaces already.
    """
    faults = []
    pages = [_pages(name, *entry, is_new=True) for name, entry in caches.items() if has_address(entry[1])]
    pages += [_pages(name, *entry, is_new=False) for name, entry in elsewhere.items() if has_address(entry[1])]
    for first, second in _neighbours(pages):
        if not first.is_new and not second.is_new:
            continue
        if first.storage == second.storage and first.page_step != second.page_step:
            faults.append(
                f"layers {first.name!r} and {second.name!r} view one storage with unlike pages, of {first.page_step} "
                f"and {second.page_step} bytes"
            )
        if first.overlaps(second):
            faults.append(f"layers {first.name!r} and {second.name!r} overlap in memory without shares_with")
    owners = {id(cache): name for name, (_, cache) in elsewhere.items()}
    for name, (_, cache) in caches.items():
        if not has_address(cache) and (owner := owners.setdefault(id(cache), name)) != name:
            faults.append(f"layers {owner!r} and {name!r} get the same tensor without shares_with")
    return faults


def _pages(name: str, spec: KVCacheSpec, cache: torch.Tensor, *, is_new: bool) -> Pages:
    return Pages(
        name=name,
        start=cache.data_ptr(),
        page_bytes=spec.page_bytes,
        page_step=spec.padded_page_bytes,
        num_blocks=cache.shape[0],
        storage=cache.untyped_storage().data_ptr(),
        is_new=is_new,
    )


def _neighbours(pages: list[Pages]) -> Iterator[tuple[Pages, Pages]]:
    """Every pair that is in one storage or whose ranges overlap, each once."""
    ordered = sorted(pages, key=lambda entry: (entry.storage, entry.start, entry.name))
    reaching: list[Pages] = []
    for second in ordered:
        # A storage may begin inside another tensor: two storages can be made over one buffer.
        reaching = [first for first in reaching if first.storage == second.storage or first.end > second.storage]
        yield from ((first, second) for first in reaching)
        reaching.append(second)


def _has_strides(cache: torch.Tensor, spec: KVCacheSpec) -> bool:
    """A dimension of one element is never stepped along, so its stride means nothing."""
    return all(
        size == 1 or actual == expected
        for size, actual, expected in zip(cache.shape, cache.stride(), spec.stride(), strict=True)
    )
