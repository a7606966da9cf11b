"""``cache-alias``: a cache that overlaps another tensor in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from compiled_engine.compile.graphs.bindings import Role
from compiled_engine.context import declared_specs, resolve_shared
from compiled_engine_debug.audit.detector import Detector
from compiled_engine_debug.audit.step import Step
from compiled_engine_debug.audit.subject import Subject
from compiled_engine_debug.findings import Finding


class CacheAlias(Detector):
    """Compares the memory of all caches with that of each other and of everything else that graphs use.

    At the start, and again whenever bindings have changed. Layers that share a cache by ``shares_with`` may overlap.
    """

    name = "cache-alias"
    about = "caches that overlap another cache, a weight or a buffer in memory"

    def __init__(self) -> None:
        super().__init__()
        self._epoch = -1

    def refusal(self, subject: Subject) -> str | None:
        return "tensors of XLA have no lasting address" if subject.model is None else None

    def start(self, subject: Subject) -> Iterable[Finding]:
        return self._look(subject, None)

    def before_step(self, subject: Subject, step: Step) -> Iterable[Finding]:
        return self._look(subject, step.index) if subject.context.epoch != self._epoch else ()

    def _look(self, subject: Subject, step: int | None) -> list[Finding]:
        self._epoch = subject.context.epoch
        specs = declared_specs(subject.context)
        extents = [_extent(role, name, tensor) for (role, name), tensor in subject.tensors(1).items()]
        pairs = _overlapping(sorted((item for item in extents if item.end > item.begin), key=lambda item: item.begin))
        self.looks += sum(item.role is Role.CACHE for item in extents)
        found = []
        for one, other in pairs:
            cache, second = (one, other) if one.role is Role.CACHE else (other, one)
            if cache.role is not Role.CACHE:
                continue
            if second.role is Role.CACHE:
                if resolve_shared(cache.name, specs) == resolve_shared(second.name, specs):
                    continue
                cache, second = sorted((cache, second), key=lambda item: list(subject.context).index(item.name))
            found.append(self._finding(cache, second, step))
        return found

    def _finding(self, cache: _Extent, second: _Extent, step: int | None) -> Finding:
        shared = min(cache.end, second.end) - max(cache.begin, second.begin)
        why = ", and neither declares to share it" if second.role is Role.CACHE else ""
        return self.found(
            f"the KV cache of layer {cache.name!r} ({cache.begin:#x} to {cache.end:#x}) shares {shared} bytes with the "
            f"{second.role.value} {second.name!r} ({second.begin:#x} to {second.end:#x}){why}",
            step=step,
            layer=cache.name,
            node=second.name,
        )


@dataclass(frozen=True)
class _Extent:
    role: Role
    name: str
    begin: int
    end: int


def _extent(role: Role, name: str, tensor: torch.Tensor) -> _Extent:
    size = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return _Extent(role, name, begin, begin + (size * tensor.element_size() if tensor.numel() else 0))


def _overlapping(extents: list[_Extent]) -> Iterable[tuple[_Extent, _Extent]]:
    """All pairs that overlap, of extents in order of their beginning."""
    alive: list[_Extent] = []
    pairs: list[tuple[_Extent, _Extent]] = []
    for extent in extents:
        alive = [item for item in alive if item.end > extent.begin]
        pairs += [(item, extent) for item in alive]
        alive.append(extent)
    return pairs
