"""Sampling parameters of a step, row by row, for the tests of every sampler."""

from __future__ import annotations

import torch

from compiled_engine.ops.sampling import SamplingBatch

DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "forbidden": (), "logprobs": -1}


def make_batch(rows: list[dict]) -> SamplingBatch:
    """One row per dict of parameters; ``DEFAULTS``, and seed and position by place, for what one does not name."""
    rows = [{"seed": place, "position": 7 * place} | DEFAULTS | row for place, row in enumerate(rows)]

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([row[name] for row in rows], dtype=dtype)

    return SamplingBatch(
        temperature=column("temperature", torch.float32),
        top_k=column("top_k", torch.int64),
        top_p=column("top_p", torch.float32),
        min_p=column("min_p", torch.float32),
        seeds=column("seed", torch.int64),
        positions=column("position", torch.int64),
        forbidden_token_ids=tuple(tuple(row["forbidden"]) for row in rows),
        num_logprobs=tuple(row["logprobs"] for row in rows),
    )
