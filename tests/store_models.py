"""Small things to put into a graph store: a plan written by hand, packages of any bytes, and keys."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Mapping
from pathlib import Path

import torch

from compiled_engine.compile.key import StoreKey
from compiled_engine.compile.plan import AttentionStep, GraphPlan, PieceSpec, PieceStep, TensorSpec
from compiled_engine.compile.store import StoredModel
from compiled_engine.compile.weights import WeightRecipe
from compiled_engine.ops.attention import AttentionSpec

COMPONENTS = {
    "model.config.hidden_size": "64",
    "model.config.model_type": '"llama"',
    "model.weights": "1" * 64,
    "engine.dtype": "float32",
    "torch.version": "2.13.0",
    "cpu.flags": "avx avx2 fma",
}


def make_key(**changes: str | None) -> StoreKey:
    """A key like the others but for ``changes``: dots are written as two underscores, None takes a component away."""
    components = {**COMPONENTS, **{name.replace("__", "."): text for name, text in changes.items()}}
    return StoreKey({name: text for name, text in components.items() if text is not None})


def piece_key(name: str) -> str:
    """A key that a piece could have."""
    return hashlib.sha256(name.encode()).hexdigest()


def make_plan(pieces: tuple[str, ...] = ("first", "middle", "head")) -> GraphPlan:
    """A plan of one piece after the other, the last one the head, with one attention."""
    spec = TensorSpec(("s0", 4), (4, 1), torch.float32)
    steps: list[PieceStep | AttentionStep] = []
    value = "input_ids"
    for name in pieces[:-1]:
        inputs = (f"value:{value}", "weight:embed", "weight:inv_freq")
        steps.append(PieceStep(piece_key(name), inputs, (f"{name}_out",), release=(value,)))
        value = f"{name}_out"
    steps.append(AttentionStep("layers.0.attn", value, value, value, "attended", release=(value,)))
    return GraphPlan(
        layers=(AttentionSpec("layers.0.attn", 4, 2, 16, 0.25, sliding_window=8),),
        weights=(
            WeightRecipe(("embed",), (128, 4), torch.float32),
            WeightRecipe(("inv_freq",), (8,), torch.float32),
        ),
        pieces=tuple(PieceSpec(piece_key(name), (spec,) * 3, (spec,), f"code of {name} \u03b1") for name in pieces),
        steps=tuple(steps),
        head=PieceStep(piece_key(pieces[-1]), ("value:attended", "weight:embed", "value:logits_indices"), ("logits",)),
        hidden="attended",
        vocab_size=128,
        passes={"merge_linears": 2},
    )


def make_model(folder: Path, seed: int = 0, pieces: tuple[str, ...] = ("first", "middle", "head")) -> StoredModel:
    """A model whose packages lie in ``folder``; its constants and packages differ from seed to seed."""
    folder.mkdir(parents=True, exist_ok=True)
    source, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    plan = make_plan(pieces)
    packages = {}
    for piece in plan.pieces:
        packages[piece.key] = folder / f"{piece.key}.pt2"
        packages[piece.key].write_bytes(source.randbytes(200))
    constants = {
        "inv_freq": torch.rand(8, generator=generator),
        "scalar": torch.tensor(seed),
        "half": torch.rand(2, 3, generator=generator).to(torch.bfloat16).t(),
        "empty": torch.zeros(0, 4),
    }
    names = {"embed.weight": "model.embed.weight", "schl\u00fcssel": "key"}
    return StoredModel(plan, packages, constants, names, 512, "TinyForCausalLM")


def contents(packages: Mapping[str, Path]) -> dict[str, bytes]:
    """The packages' bytes."""
    return {piece: path.read_bytes() for piece, path in packages.items()}


def same(one: StoredModel, other: StoredModel) -> bool:
    """Whether both hold the same, packages by content."""
    return (
        one.plan == other.plan
        and contents(one.packages) == contents(other.packages)
        and set(one.constants) == set(other.constants)
        and all(_same_tensor(tensor, other.constants[name]) for name, tensor in one.constants.items())
        and (dict(one.weight_names), one.max_position, one.class_name)
        == (dict(other.weight_names), other.max_position, other.class_name)
    )


def _same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def all_files(root: Path) -> list[Path]:
    """Files of a store that readers read, in order. Folders may go away meanwhile, which rglob does not take."""
    walks = (step for folder in ("plans", "pieces") for step in os.walk(root / folder))
    return sorted(path for parent, _, names in walks for name in names if (path := Path(parent, name)).is_file())
