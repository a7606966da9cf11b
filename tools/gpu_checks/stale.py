"""Graphs that were captured on other caches than those that are bound now must refuse to replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from compiled_engine.context import bind_kv_cache, unbind_kv_cache
from compiled_engine.engine.core import Engine
from compiled_engine.errors import StaleGraph
from compiled_engine.runners.gpu import GpuRunner
from gpu_checks.lab import Lab, make_prompts, write
from gpu_checks.report import Outcome, passed_if

_MODES = ("full_decode_only", "full", "full_and_piecewise")
"""Those with graphs that have caches in them."""


def check(lab: Lab) -> Outcome:
    """Bind clones of the caches after the capture: the next step must raise ``StaleGraph`` and name a layer."""
    folder = lab.model or lab.random_llama(min(lab.sizes.layers, 2), torch.float32)
    rows, faults = [], []
    for mode in _MODES:
        settings: dict[str, Any] = {"graph_mode": mode, "dtype": "float32", "max_model_len": 64}
        with lab.runner(folder, max_num_seqs=2, max_num_batched_tokens=16, **settings) as runner:
            engine = Engine(runner, enable_prefix_caching=False)
            prompts = make_prompts(2, 3, 5, runner.limits.vocab_size)
            write(engine, prompts, 3)
            _bind_clones(runner)
            message = _refusal(engine, prompts)
            layers = [name for name in runner.static_context if message is not None and f"'{name}'" in message]
        if not layers:
            faults.append(f"{mode}: " + ("no StaleGraph was raised" if message is None else f"no layer in: {message}"))
        rows.append({"mode": mode, "named_layer": layers[0] if layers else "-", "message": message or "-"})
    return passed_if(faults, f"rebinding was refused by {len(rows)} modes, with the layer's name", rows=rows)


def _bind_clones(runner: GpuRunner) -> None:
    clones = {name: layer.kv_cache.clone() for name, layer in runner.static_context.items()}
    unbind_kv_cache(runner.static_context)
    bind_kv_cache(clones, runner.static_context)


def _refusal(engine: Engine, prompts: Sequence[Sequence[int]]) -> str | None:
    """What ``StaleGraph`` says; None where the step ran."""
    try:
        write(engine, prompts, 3)
    except StaleGraph as error:
        return str(error)
    return None
