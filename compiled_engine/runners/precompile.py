"""Graphs for a model: looked up in the store, or captured and compiled without reading a weight."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from compiled_engine.compile.counters import CompileCounters
from compiled_engine.compile.key import StoreKey, build_store_key
from compiled_engine.compile.ledger import Ledger
from compiled_engine.compile.opening import CompiledPiece, open_packages
from compiled_engine.compile.plan import GraphPlan
from compiled_engine.compile.store import GraphStore
from compiled_engine.compile.store_entry import StoredModel
from compiled_engine.config import EngineConfig, default_store_root
from compiled_engine.errors import NotPrecompiledError, StoreWriteError
from compiled_engine.models import ModelFiles, build_definition, model_components, resolve_dtype
from compiled_engine.ops.cpu.build import load_kernels
from compiled_engine.runners.gpus import check_toolkit, find_gpu

if TYPE_CHECKING:
    from compiled_engine.compile.pipeline import PlannedGraph, Progress
    from compiled_engine.models import ModelDefinition

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunnableGraphs:
    """What a run needs besides weights and caches: a plan, what runs its pieces, and facts as in ``StoredModel``."""

    plan: GraphPlan
    pieces: Mapping[str, CompiledPiece]
    constants: Mapping[str, torch.Tensor]
    weight_names: Mapping[str, str]
    max_position: int | None


def lookup(config: EngineConfig, files: ModelFiles) -> tuple[StoreKey, StoredModel | None]:
    """The key of the graphs that ``config`` needs for the model in ``files``, and what is stored under it.

    Imports neither transformers nor a compiler. Raises ``StoreError`` for a store that must not be used.
    """
    key = _key(config, files)
    return key, store_for(config).load(key)


def store_for(config: EngineConfig) -> GraphStore:
    """Where ``config`` finds its graphs: a bundle, which is only read, or this user's store."""
    if config.graphs is not None:
        return GraphStore(Path(config.graphs), read_only=True)
    return GraphStore(default_store_root())


def _keeps_graphs(config: EngineConfig) -> bool:
    return config.store or config.graphs is not None


def kernel_folder(config: EngineConfig) -> Path | None:
    """Where the C++ kernels are kept: beside the graphs, in the store or bundle; None without a store."""
    return store_for(config).root / "kernels" if _keeps_graphs(config) else None


def precompile(
    config: EngineConfig, files: ModelFiles, store: GraphStore, ledger: Ledger, progress: Progress
) -> StoreKey:
    """Capture and compile the model's graphs and keep them, and the CPU kernels, in ``store``; returns the graphs' key.

    Raises ``CaptureError`` for a model that cannot be captured, ``StoreWriteError`` for a store that cannot be written,
    ``ConfigError`` for a GPU that is not there.
    """
    key = _key(config, files)
    if config.device_type == "cpu":
        with ledger.phase("kernels"):
            load_kernels(store.root / "kernels")
    else:
        find_gpu(config.device)
    with tempfile.TemporaryDirectory(prefix="compiled_engine_") as folder:
        model = _compile(config, files, (store, key), Path(folder), ledger, progress, CompileCounters())
        _save(store, key, model, ledger)
    return key


def graphs_for(
    config: EngineConfig, files: ModelFiles, ledger: Ledger, progress: Progress, counters: CompileCounters
) -> RunnableGraphs:
    """The model's graphs, ready to run: stored ones, which are compiled and stored first where they are missing.

    Pieces that stay in memory (``piece_compiler`` inductor or eager) are compiled at every start.
    Raises ``NotPrecompiledError``, which says what differs, where ``config`` allows no compiling.
    """
    if config.piece_compiler != "aoti":
        return _compile_in_memory(config, files, ledger, progress, counters)
    place: tuple[GraphStore, StoreKey] | None = None
    if _keeps_graphs(config):
        with ledger.phase("graphs") as phase:
            key, stored = lookup(config, files)
            phase.note = "miss" if stored is None else "hit"
        if stored is not None:
            return _open(stored, config, ledger)
        place = store_for(config), key
        if config.require_precompiled or config.graphs is not None:
            raise NotPrecompiledError(explain_miss(*place))
    with tempfile.TemporaryDirectory(prefix="compiled_engine_") as folder:
        model = _compile(config, files, place, Path(folder), ledger, progress, counters)
        if place is not None:
            try:
                _save(*place, model, ledger)
                model = place[0].load(place[1]) or model
            except StoreWriteError as error:
                logger.warning(
                    "%s\nThis run goes on with the graphs it has compiled; the next must compile again.", error
                )
        return _open(model, config, ledger)


def _compile(
    config: EngineConfig,
    files: ModelFiles,
    place: tuple[GraphStore, StoreKey] | None,
    folder: Path,
    ledger: Ledger,
    progress: Progress,
    counters: CompileCounters,
) -> StoredModel:
    """Compile the model's graphs into ``folder``, but for the pieces that another model has brought into the store."""
    from compiled_engine.compile.packages import compile_packages
    from compiled_engine.compile.pipeline import count_compiled

    definition, planned = _capture(config, files, ledger, counters)
    known = {} if place is None else place[0].find_packages(place[1], planned.pieces)
    missing = {name: piece for name, piece in planned.pieces.items() if name not in known}
    with ledger.phase("compile") as phase:
        phase.note = f"{len(missing)} of {len(planned.pieces)} pieces"
        workers = None
        if config.device_type != "cpu":
            check_toolkit()
            workers = 0
        packages = known | compile_packages(missing, folder, progress, ledger, workers)
    count_compiled(missing, planned, counters)
    return StoredModel(
        plan=planned.plan,
        packages=packages,
        constants=dict(definition.expected.buffers),
        weight_names=dict(definition.weight_names),
        max_position=definition.max_position,
        class_name=type(definition.module).__name__,
    )


def _compile_in_memory(
    config: EngineConfig, files: ModelFiles, ledger: Ledger, progress: Progress, counters: CompileCounters
) -> RunnableGraphs:
    from compiled_engine.compile.pieces import create_piece_compiler
    from compiled_engine.compile.pipeline import compile_pieces

    if config.require_precompiled:
        raise NotPrecompiledError(
            f"pieces of piece_compiler {config.piece_compiler!r} are never stored: require_precompiled needs 'aoti'"
        )
    definition, planned = _capture(config, files, ledger, counters)
    with ledger.phase("compile") as phase:
        phase.note = f"{len(planned.pieces)} pieces, {config.piece_compiler}"
        pieces = compile_pieces(planned, create_piece_compiler(config.piece_compiler), counters, progress)
    constants, names = dict(definition.expected.buffers), dict(definition.weight_names)
    return RunnableGraphs(planned.plan, pieces, constants, names, definition.max_position)


def _capture(
    config: EngineConfig, files: ModelFiles, ledger: Ledger, counters: CompileCounters
) -> tuple[ModelDefinition, PlannedGraph]:
    """Build the model's definition and capture it; no page of a weight is touched."""
    from compiled_engine.compile.pipeline import plan_model

    with ledger.phase("definition"):
        definition = build_definition(files, resolve_dtype(config.dtype, files, config.device_type))
    logger.info("capturing %s, %d layers", type(definition.module).__name__, len(definition.layers))
    device = torch.device(config.device)
    if device.type != "cpu":
        _move_untouched(definition.module, device)
    planned = plan_model(definition.module, definition.layers, device, counters, ledger)
    # Never touched, parameters still count as memory when a process is forked to compile.
    for parameter in definition.module.parameters():
        parameter.data = parameter.new_empty(0)
    return definition, planned


def _move_untouched(module: torch.nn.Module, device: torch.device) -> None:
    """Give the module's parameters memory on ``device``, and nothing in it; move its buffers there."""
    for parameter in module.parameters():
        parameter.data = torch.empty_like(parameter, device=device)
    for child in module.modules():
        for name, buffer in child.named_buffers(recurse=False):
            child.register_buffer(name, buffer.to(device), persistent=name not in child._non_persistent_buffers_set)


def _save(store: GraphStore, key: StoreKey, model: StoredModel, ledger: Ledger) -> None:
    with ledger.phase("store graphs") as phase:
        store.save(key, model)
        phase.num_bytes = sum(path.stat().st_size for path in model.packages.values())


def _open(model: StoredModel, config: EngineConfig, ledger: Ledger) -> RunnableGraphs:
    with ledger.phase("open graphs") as phase:
        phase.num_bytes = sum(path.stat().st_size for path in model.packages.values())
        pieces = open_packages(model.packages, torch.device(config.device))
    return RunnableGraphs(model.plan, pieces, model.constants, model.weight_names, model.max_position)


def explain_miss(store: GraphStore, key: StoreKey, limit: int = 8) -> str:
    """Why ``store`` has nothing under ``key``: the components that differ from the nearest entry."""
    message = f"the store {store.root} has no graphs for this model and these settings (key {key.digest[:12]})"
    nearest = store.nearest(key)
    if nearest is None:
        return f"{message}: it is empty. Fill it with: compiled-engine precompile"
    lines = [
        f"  {item.name}: stored {_short(item.stored)}, wanted {_short(item.wanted)}"
        for item in nearest.differences[:limit]
    ]
    more = len(nearest.differences) - len(lines)
    if more > 0:
        lines.append(f"  and {more} more: see compiled-engine graphs explain")
    return "\n".join([f"{message}. The nearest entry {nearest.entry.digest[:12]} differs in:", *lines])


def _key(config: EngineConfig, files: ModelFiles) -> StoreKey:
    return build_store_key(config, resolve_dtype(config.dtype, files, config.device_type), model_components(files))


def _short(text: str | None) -> str:
    if text is None:
        return "nothing"
    return text if len(text) <= 60 else f"{text[:57]}..."
