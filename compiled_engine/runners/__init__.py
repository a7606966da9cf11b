"""One step on one backend.

A runner loads and compiles a model, sizes and binds its caches, warms up, and then turns a scheduled batch into
device inputs, runs the plan and samples. Runners know devices, and neither text nor scheduling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compiled_engine.compile.ledger import Ledger
    from compiled_engine.config import EngineConfig
    from compiled_engine.models import ModelFiles
    from compiled_engine.runners.base import Runner


def create_runner(config: EngineConfig, files: ModelFiles, ledger: Ledger) -> Runner:
    """The runner for ``config.device``, ready to execute: loaded, compiled, bound and warmed up.

    ``ledger`` notes the phases of all that.
    """
    if config.device_type == "tpu":
        from compiled_engine.runners.tpu import TpuRunner

        return TpuRunner(config, files, ledger)
    if config.captures_graphs or config.device_type != "cpu":
        from compiled_engine.runners.gpu import GpuRunner

        return GpuRunner(config, files, ledger)
    from compiled_engine.runners.cpu import CpuRunner

    return CpuRunner(config, files, ledger)
