"""All detectors, causes before what follows from them."""

from __future__ import annotations

from collections.abc import Iterable

from compiled_engine.errors import ConfigError
from compiled_engine_debug.audit.address_changed import AddressChanged
from compiled_engine_debug.audit.artifact import ArtifactOfAnotherModel
from compiled_engine_debug.audit.cache_alias import CacheAlias
from compiled_engine_debug.audit.capture_boundary import CaptureBoundary
from compiled_engine_debug.audit.compiles import CompileAfterWarmup
from compiled_engine_debug.audit.detector import Detector
from compiled_engine_debug.audit.metadata_mismatch import MetadataMismatch
from compiled_engine_debug.audit.output_kept import OutputKept
from compiled_engine_debug.audit.padding_leak import PaddingLeak
from compiled_engine_debug.audit.slots import SlotOutsideMapping
from compiled_engine_debug.audit.swapped_layers import SwappedLayers
from compiled_engine_debug.audit.unused_graph import UnusedGraph

DETECTORS: tuple[type[Detector], ...] = (
    ArtifactOfAnotherModel,
    CaptureBoundary,
    UnusedGraph,
    AddressChanged,
    CacheAlias,
    SwappedLayers,
    OutputKept,
    CompileAfterWarmup,
    MetadataMismatch,
    SlotOutsideMapping,
    PaddingLeak,
)
"""In the order in which they are asked."""

NAMES = tuple(kind.name for kind in DETECTORS)


def make_detectors(names: Iterable[str] | None = None, *, strict: bool = False) -> tuple[Detector, ...]:
    """New detectors of the kinds ``names`` (None: all). Raises ``ConfigError`` for an unknown one."""
    wanted = NAMES if names is None else tuple(names)
    if unknown := [name for name in wanted if name not in NAMES]:
        raise ConfigError(f"there is no detector {unknown[0]!r}: choose among {', '.join(NAMES)}")
    return tuple(UnusedGraph(strict) if kind is UnusedGraph else kind() for kind in DETECTORS if kind.name in wanted)
