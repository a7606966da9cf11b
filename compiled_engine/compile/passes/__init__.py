"""Rewrites of a captured graph, one file each.

A pass takes a ``CapturedGraph``, changes it in place and returns how often it fired; that number is the pass's counter.
Passes keep what the graph computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import Interpreter, Node

from compiled_engine.compile.capture import CapturedGraph
from compiled_engine.compile.passes.fuse_epilogues import fuse_activations, fuse_gated_activations, fuse_residuals
from compiled_engine.compile.passes.merge_linears import merge_linears
from compiled_engine.compile.passes.packed_linear import use_packed_linear
from compiled_engine.errors import CaptureError
from compiled_engine.ops.linear import can_pack

Pass = Callable[[CapturedGraph], int]


def passes_for(device: torch.device) -> tuple[Pass, ...]:
    """The passes of a backend, in order."""
    packed = (use_packed_linear, fuse_gated_activations, fuse_activations, fuse_residuals)
    return (merge_linears, *packed) if can_pack(device) else (merge_linears,)


def run_passes(captured: CapturedGraph, passes: tuple[Pass, ...]) -> dict[str, int]:
    """Run ``passes`` in order; how often each fired, by name."""
    counts = {}
    for rewrite in passes:
        counts[rewrite.__name__] = rewrite(captured)
        captured.graph_module.graph.lint()
    captured.graph_module.recompile()
    _refresh_example_values(captured)
    return counts


def _refresh_example_values(captured: CapturedGraph) -> None:
    """Propagate shapes anew: a rewrite may change the strides of everything after it."""

    class Propagate(Interpreter):
        def run_node(self, n: Node) -> Any:
            value = n.meta["example_value"] if n.op == "placeholder" else super().run_node(n)
            if n.op != "output":
                n.meta["example_value"] = value
            return value

    placeholders = captured.graph_module.graph.find_nodes(op="placeholder")
    fake_mode = detect_fake_mode([node.meta.get("example_value") for node in placeholders])
    if fake_mode is None:
        raise CaptureError("the captured graph has no symbolic example values")
    with fake_mode, torch.no_grad():
        Propagate(captured.graph_module).run(*placeholders)


__all__ = [
    "Pass",
    "fuse_activations",
    "fuse_gated_activations",
    "fuse_residuals",
    "merge_linears",
    "passes_for",
    "run_passes",
    "use_packed_linear",
]
