"""Recordings for tests of the report, as plain lines: what a small model with captured graphs would leave behind."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from compiled_engine.compile.plan import AttentionStep, GraphPlan, PieceSpec, PieceStep, TensorSpec
from compiled_engine.compile.weights import WeightRecipe
from compiled_engine.ops.attention import AttentionSpec

Line = dict[str, Any]

WINDOW = 16
CACHE_BYTES = 64 * 4 * 2 * 2 * 32 * 4
DECODE_SIZES = (1, 2, 4, 8)
PIECEWISE_SIZES = (16, 32)

_CODE = """def forward(self, {0}):
    linear = torch.ops.compiled_engine.packed_linear({0})
    return (linear,)
"""


def write_lines(path: Path, lines: Iterable[Line]) -> Path:
    """``lines`` as a file of JSON lines."""
    with path.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")
    return path


def layer_names(num_layers: int, prefix: str = "model.layers") -> list[str]:
    return [f"{prefix}.{index}.self_attn" for index in range(num_layers)]


def decode_key(size: int) -> str:
    return f"full decode {size} request{'' if size == 1 else 's'}, seq_len <= 512, 1 KV split"


def piecewise_key(size: int) -> str:
    return f"piecewise {size} tokens"


def make_plan(layers: list[str], code: str = "") -> GraphPlan:
    """Pieces as a decoder has them: embedding, one for all inner layers, the last, and the head."""
    rows = TensorSpec(("s0", 64), (64, 1), torch.float32)
    ids = TensorSpec(("s0",), (1,), torch.int64)
    heads = TensorSpec(("s0", 4, 32), (128, 32, 1), torch.float32)
    pair = TensorSpec(("s0", 2, 32), (64, 32, 1), torch.float32)
    matrix = TensorSpec((64, 256), (256, 1), torch.float32)
    text = code or _CODE
    pieces = (
        PieceSpec("a" * 64, (ids, matrix), (heads, pair, pair, rows), text.replace("{0}", "input_ids")),
        PieceSpec("b" * 64, (heads, rows, matrix), (heads, pair, pair, rows), text.replace("{0}", "attention_out")),
        PieceSpec("c" * 64, (heads, rows, matrix), (rows,), text.replace("{0}", "last_attention")),
        PieceSpec("d" * 64, (rows, matrix, ids), (TensorSpec(("s1", 128), (128, 1), torch.float32),), text),
    )
    weights = [WeightRecipe(("embed.weight",), (128, 64), torch.float32)]
    weights += [
        WeightRecipe((f"{name}.q_proj.weight", f"{name}.k_proj.weight"), (256, 64), torch.float32, True)
        for name in layers
    ]
    weights.append(WeightRecipe(("lm_head.weight",), (128, 64), torch.float32, True))
    steps: list[PieceStep | AttentionStep] = []
    for index, name in enumerate(layers):
        values = tuple(f"{part}{index}" for part in ("q", "k", "v", "x"))
        if index == 0:
            steps.append(PieceStep("a" * 64, ("value:input_ids", f"weight:{weights[0].key}"), values))
        else:
            before = (f"value:o{index - 1}", f"value:x{index - 1}", f"weight:{weights[index].key}")
            steps.append(PieceStep("b" * 64, before, values))
        steps.append(AttentionStep(name, values[0], values[1], values[2], f"o{index}", (values[0],)))
    last = len(layers) - 1
    steps.append(PieceStep("c" * 64, (f"value:o{last}", f"value:x{last}", f"weight:{weights[-2].key}"), ("hidden",)))
    head = PieceStep("d" * 64, ("value:hidden", f"weight:{weights[-1].key}", "value:logits_indices"), ("logits",))
    specs = tuple(
        AttentionSpec(name, 4, 2, 32, 0.125, WINDOW if index % 2 == 0 else None) for index, name in enumerate(layers)
    )
    return GraphPlan(specs, tuple(weights), pieces, tuple(steps), head, "hidden", 128, {"merge_linears": 4})


def header(model: str = "tiny-model", architecture: str = "LlamaForCausalLM", num_layers: int = 4) -> Line:
    return {
        "kind": "header",
        "version": 1,
        "engine": "0.1.0",
        "created": "2026-03-01T12:00:00Z",
        "versions": {"python": "3.11.7", "torch": "2.13.0", "transformers": None},
        "device": "cpu",
        "config": {"model": model, "block_size": 4, "graph_mode": "full_and_piecewise"},
        "model": {"architecture": architecture, "dtype": "float32", "vocab_size": 128, "num_layers": num_layers},
    }


def phase(
    name: str, start: float, seconds: float, depth: int = 0, note: str | None = None, size: int | None = None
) -> Line:
    return {
        "kind": "phase",
        "name": name,
        "start": start,
        "seconds": seconds,
        "num_bytes": size,
        "note": note,
        "depth": depth,
    }


def phases(compiling: float = 9.5) -> list[Line]:
    """A start that spends ``compiling`` seconds on graphs."""
    hit = compiling < 1
    graphs = 2.0 + compiling
    lines = [
        phase("imports", 0.3, 1.2),
        phase("load graphs", 1.5, 0.4 + compiling, note="hit" if hit else "miss"),
    ]
    if not hit:
        lines += [
            phase("trace", 1.6, compiling * 0.4, depth=1),
            phase("compile pieces", 1.7 + compiling * 0.4, compiling * 0.55, depth=1, note="4 of 9 pieces"),
            phase("piece aaaaaaaa", 1.7 + compiling * 0.4, compiling * 0.2, depth=2),
            phase("piece bbbbbbbb", 1.7 + compiling * 0.6, compiling * 0.25, depth=2),
        ]
    return [
        *lines,
        phase("weights", graphs, 0.35, size=81264640),
        phase("bind caches", graphs + 0.36, 0.01, size=4 * CACHE_BYTES),
        phase("capture graphs", graphs + 0.4, 0.8, note="14 graphs"),
        phase("warm-up", graphs + 1.2, 0.15),
    ]


def caches(layers: list[str], moved: int = 0) -> list[Line]:
    return [
        {
            "kind": "cache",
            "layer": name,
            "group": index % 2,
            "address": 0x7F0000000000 + index * CACHE_BYTES + moved,
            "shape": [64, 4, 2, 2, 32],
            "dtype": "float32",
            "num_bytes": CACHE_BYTES,
            "shares_with": None,
        }
        for index, name in enumerate(layers)
    ]


def weights(plan: GraphPlan) -> list[Line]:
    return [
        {
            "kind": "weight",
            "name": recipe.key,
            "num_bytes": 4 * recipe.shape[0] * recipe.shape[1] + place,
            "dtype": "float32",
            "shape": list(recipe.shape),
            "address": 0x7E0000000000 + place * 65536,
        }
        for place, recipe in enumerate(plan.weights)
    ]


def binding(role: str, name: str, address: int, shape: list[int]) -> Line:
    stride = [1] * len(shape)
    return {
        "role": role,
        "name": name,
        "address": address,
        "num_bytes": 4096,
        "shape": shape,
        "stride": stride,
        "dtype": "float32",
        "epoch": 1,
    }


def graphs(layers: list[str], weight_lines: list[Line], stale_layer: str | None = None) -> list[Line]:
    """Full graphs with every cache, and piecewise ones in parts without; one may have an old address of a layer."""
    lines = []
    addresses = {line["layer"]: line["address"] for line in caches(layers)}
    common = [binding("weight", line["name"], line["address"], line["shape"]) for line in weight_lines]
    common.append(binding("input", "input_ids", 0x7D0000000000, [32]))
    for size in DECODE_SIZES:
        bound = dict(addresses)
        if stale_layer is not None and size == DECODE_SIZES[-1]:
            bound[stale_layer] += 0x10000
        own = [binding("KV cache of layer", name, address, [64, 4, 2, 2, 32]) for name, address in bound.items()]
        lines.append(_graph(decode_key(size), 0, [*common, *own], size))
    for size in PIECEWISE_SIZES:
        lines += [_graph(piecewise_key(size), part, common, size) for part in range(len(layers) + 1)]
    return lines


def _graph(key: str, part: int, bindings: list[Line], size: int) -> Line:
    return {
        "kind": "graph",
        "key": key,
        "part": part,
        "bindings": bindings,
        "launches": ["a" * 12, "b" * 12],
        "num_bytes": 4096 * size,
        "seconds": 0.01 * size,
    }


def keys() -> Line:
    full = [
        {"key": decode_key(size), "num_padded_tokens": size, "num_padded_requests": size, "kind": "full"}
        for size in DECODE_SIZES
    ]
    piecewise = [
        {"key": piecewise_key(size), "num_padded_tokens": size, "num_padded_requests": 0, "kind": "piecewise"}
        for size in PIECEWISE_SIZES
    ]
    return {"kind": "keys", "keys": [*full, *piecewise]}


MEMORY: Line = {
    "kind": "memory",
    "weights": 81_264_640,
    "kv_cache": 4 * CACHE_BYTES,
    "graphs": 409_600,
    "workspaces": 1_048_576,
    "estimated_working": 2_097_152,
    "resident": 612_368_384,
    "device_allocated": None,
}


def compiles(late: bool) -> list[Line]:
    lines = [
        {
            "kind": "compile",
            "what": "Dynamo: forward",
            "reason": None,
            "inputs": None,
            "start": 1.6,
            "seconds": 3.8,
            "after_warmup": False,
        }
    ]
    if late:
        reason = "tensor 'L_x_' size mismatch at index 0. expected 8, actual 5"
        lines.append(
            {
                "kind": "compile",
                "what": "Dynamo: sample_rows",
                "reason": reason,
                "inputs": "x: float32[5, 128]",
                "start": 21.5,
                "seconds": 0.7,
                "after_warmup": True,
            }
        )
    return lines


def steps(count: int, seed: int = 1, most_requests: int = 6) -> Iterator[Line]:
    """Waves of requests: a prefill, then decode steps while requests end one after the other."""
    draw = random.Random(seed)
    start, index = 14.0, 0
    while True:
        running = [
            [f"request-{index}-{place}", 0, draw.randint(3, 12)] for place in range(draw.randint(1, most_requests))
        ]
        is_prefill = True
        while running:
            if index == count:
                return
            shares = [[name, done, length if is_prefill else 1, True] for name, done, length in running]
            num_tokens = sum(share[2] for share in shares)
            seconds = 0.004 + 0.0004 * num_tokens + draw.random() * 0.002
            yield {
                "kind": "step",
                "index": index,
                "start": round(start, 6),
                "seconds": seconds,
                **_sizes(num_tokens, shares),
                "epoch": 1,
            }
            for state in running:
                state[1] += state[2] if is_prefill else 1
            running = [state for state in running if draw.random() < 0.93]
            start, index, is_prefill = start + seconds + 0.0005, index + 1, False


def _sizes(num_tokens: int, shares: list[list[Any]]) -> Line:
    is_decode = all(share[2] == 1 for share in shares)
    fitting = [size for size in (DECODE_SIZES if is_decode else PIECEWISE_SIZES) if size >= num_tokens]
    size = fitting[0] if fitting else num_tokens
    mode = "eager" if not fitting else "full" if is_decode else "piecewise"
    return {
        "num_tokens": num_tokens,
        "num_padded_tokens": size,
        "num_requests": len(shares),
        "num_padded_requests": size if mode == "full" else len(shares),
        "num_sampled": len(shares),
        "mode": mode,
        "key": None if not fitting else decode_key(size) if is_decode else piecewise_key(size),
        "reason": None
        if fitting
        else f"{num_tokens} tokens are above the largest captured size, {PIECEWISE_SIZES[-1]}",
        "requests": shares,
    }


def recording_lines(
    num_steps: int = 120,
    *,
    num_layers: int = 4,
    model: str = "tiny-model",
    prefix: str = "model.layers",
    code: str = "",
    with_faults: bool = False,
    with_plan: bool = True,
    compiling: float = 9.5,
) -> list[Line]:
    """A whole recording. ``with_faults``: one stale address and one late compile."""
    layers = layer_names(num_layers, prefix)
    plan = make_plan(layers, code)
    weight_lines = weights(plan)
    return [
        header(model, num_layers=num_layers),
        *phases(compiling),
        *([{"kind": "plan", "plan": json.loads(plan.to_json())}] if with_plan else []),
        *caches(layers),
        *weight_lines,
        *graphs(layers, weight_lines, layers[1] if with_faults else None),
        keys(),
        MEMORY,
        *compiles(with_faults),
        *steps(num_steps),
        {"kind": "end", "num_steps": num_steps},
    ]
