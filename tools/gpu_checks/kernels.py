"""The Triton kernels against what they must compute: attention against the dense reference, sampling against torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from compiled_engine.context import key_cache, token_slots, value_cache
from compiled_engine.ops.attention import AttentionLaunch, AttentionSpec
from compiled_engine.ops.reference import paged_attention
from compiled_engine.ops.sampling import SamplingBatch, sample
from gpu_checks.lab import Lab, name_of
from gpu_checks.report import Outcome, passed_if, skipped

_BLOCK_SIZE = 16
_TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Of results near 1, whose queries, keys and values are given in that type."""
_MIXED = ((0, 70), (200, 1), (90, 33), (0, 1), (31, 1))
_DECODES = ((300, 1), (0, 1), (63, 1), (17, 1))
"""Requests: tokens in the cache, new tokens."""
_SPLITS = 4
_DIFFERENT_TOKENS = 0.005
"""Share of random tokens that rounding may change: those whose random number lies at an edge."""


@dataclass(frozen=True)
class Case:
    """One layer's attention. ``window``, ``soft_cap``: see ``AttentionSpec``."""

    dtype: torch.dtype
    head_dim: int
    num_heads: int = 8
    num_kv_heads: int = 2
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False

    def __str__(self) -> str:
        extras = [f"window {self.window}"] if self.window else []
        extras += [f"soft cap {self.soft_cap}"] if self.soft_cap else []
        extras += [name for name in ("sinks", "alibi") if getattr(self, name)]
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}"
        return ", ".join([name_of(self.dtype), heads, *extras])


CASES = (
    Case(torch.float32, 64, num_heads=9, num_kv_heads=3),
    Case(torch.float32, 80, window=40, sinks=True),
    Case(torch.bfloat16, 64),
    Case(torch.bfloat16, 128, sinks=True),
    Case(torch.bfloat16, 256, num_heads=4, num_kv_heads=1, window=70, soft_cap=20.0),
    Case(torch.float16, 96, num_heads=4, num_kv_heads=4, soft_cap=30.0),
    Case(torch.float16, 128, alibi=True),
)


def check(lab: Lab) -> Outcome:
    """Cache write, both attention kernels and the sampler on small shapes."""
    missing = lab.why_no_triton()
    if missing:
        return skipped(missing)
    rows, faults = [], []
    for row in [*_attention_rows(lab.device), *_sampling_rows(lab)]:
        rows.append(row)
        if not row["ok"]:
            faults.append(f"{row['kernel']} ({row['case']}): off by {row['worst']:.3g}, {row['limit']:.3g} is allowed")
    return passed_if(faults, f"{len(rows)} cases agree with the reference", rows=rows)


def _attention_rows(device: torch.device) -> Iterator[dict[str, Any]]:
    for case in CASES:
        limit = _TOLERANCE[case.dtype]
        for kernel, requests, splits in (("2D", _MIXED, 1), ("2D, decode", _DECODES, 1), ("3D", _DECODES, _SPLITS)):
            step = _Step(case, requests)
            written, attended = step.run(device, splits)
            yield _row(f"attention {kernel}", str(case), attended, limit)
            yield _row(f"cache write before {kernel}", str(case), written, 0.0)


def _row(kernel: str, case: str, worst: float, limit: float) -> dict[str, Any]:
    # NaN is not within any limit.
    return {"kernel": kernel, "case": case, "worst": worst, "limit": limit, "ok": worst <= limit}


class _Step:
    """One layer's step. Slots that no query may see, and block 0, hold NaN."""

    def __init__(self, case: Case, requests: tuple[tuple[int, int], ...]) -> None:
        self.case = case
        self.spec = AttentionSpec(
            "layer", case.num_heads, case.num_kv_heads, case.head_dim, case.head_dim**-0.5, case.window, case.soft_cap
        )
        generator = torch.Generator().manual_seed(case.head_dim)
        lengths = [cached + new for cached, new in requests]
        counts = [-(-length // _BLOCK_SIZE) for length in lengths]
        # In random order: block ids say nothing about positions.
        blocks = (1 + torch.randperm(sum(counts), generator=generator)).tolist()
        self.block_table = np.zeros((len(requests), max(counts)), np.int32)
        for row, count in enumerate(counts):
            self.block_table[row, :count] = [blocks.pop() for _ in range(count)]
        self.query_start_loc = np.cumsum([0] + [new for _, new in requests]).astype(np.int32)
        self.seq_lens = np.array(lengths, np.int32)
        shape = (1 + sum(counts), _BLOCK_SIZE, 2, case.num_kv_heads, case.head_dim)
        self.cache = torch.full(shape, float("nan"), dtype=case.dtype)
        num_tokens = int(self.query_start_loc[-1])
        self.slots = torch.tensor(self._slots([range(cached, cached + new) for cached, new in requests]))
        history = torch.tensor(self._slots([range(cached) for cached, _ in requests]))
        row_shape = (case.num_kv_heads, case.head_dim)
        token_slots(self.cache)[history] = torch.randn(len(history), 2, *row_shape, generator=generator).to(case.dtype)
        self.query, self.key, self.value = (
            torch.randn(num_tokens, heads, case.head_dim, generator=generator).to(case.dtype)
            for heads in (case.num_heads, case.num_kv_heads, case.num_kv_heads)
        )
        self.sinks = torch.randn(case.num_heads, generator=generator) if case.sinks else None
        self.alibi = torch.linspace(0.02, 0.5, case.num_heads) if case.alibi else None

    def run(self, device: torch.device, splits: int) -> tuple[float, float]:
        """How far the cache is from what it must hold, and the results from the reference, at worst."""
        from compiled_engine.ops.triton.attention import TritonAttention

        # So many multiprocessors that the workspace has room for any number of splits.
        backend = TritonAttention([self.spec], self.case.dtype, device, num_multiprocessors=1024)
        starts, ends, table = (
            torch.from_numpy(array).to(device) for array in (self.query_start_loc, self.seq_lens, self.block_table)
        )
        longest = int(np.diff(self.query_start_loc).max())
        launch = AttentionLaunch(longest, int(self.seq_lens.max()), splits)
        metadata = backend.metadata_over(starts, ends, table, launch)
        query, key, value, cache, slots = (
            tensor.clone().to(device) for tensor in (self.query, self.key, self.value, self.cache, self.slots)
        )
        out = torch.full_like(query, float("nan"))
        sinks, alibi = (None if tensor is None else tensor.to(device) for tensor in (self.sinks, self.alibi))
        layer = backend.for_layer(self.spec, alibi)
        layer.write_and_attend(query, key, value, out, cache, slots, metadata, sinks)
        expected_cache = self.cache.clone()
        token_slots(expected_cache)[self.slots] = torch.stack([self.key, self.value], 1)
        return _worst(cache.cpu(), expected_cache), _worst(out.cpu(), self._reference(expected_cache))

    def _reference(self, cache: torch.Tensor) -> torch.Tensor:
        return paged_attention(
            self.query,
            key_cache(cache),
            value_cache(cache),
            torch.from_numpy(self.block_table),
            torch.from_numpy(self.seq_lens),
            torch.from_numpy(self.query_start_loc),
            self.spec.scale,
            self.spec.sliding_window,
            self.spec.soft_cap,
            self.sinks,
            self.alibi,
        )

    def _slots(self, positions: Sequence[range]) -> list[int]:
        return [
            int(self.block_table[row, position // _BLOCK_SIZE]) * _BLOCK_SIZE + position % _BLOCK_SIZE
            for row, of_request in enumerate(positions)
            for position in of_request
        ]


def _worst(values: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error, relative where more than 1 is expected; infinity where only one of the two is NaN."""
    values, expected = values.double(), expected.double()
    both_nan = values.isnan() & expected.isnan()
    errors = (values - expected).abs() / expected.abs().clamp(min=1)
    return float(errors.masked_fill(both_nan, 0.0).nan_to_num(nan=float("inf")).max())


def _sampling_rows(lab: Lab) -> Iterator[dict[str, Any]]:
    num_rows, vocab_size = lab.sizes.sampled_rows, lab.sizes.sampled_vocab
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(3)
        logits = (3 * torch.randn(num_rows, vocab_size, generator=generator)).to(dtype)
        batch = _sampling_batch(num_rows)
        expected = torch.tensor(sample(logits, batch).token_ids)
        wrong = _sampled(logits, batch, lab.device) != expected
        is_random = batch.temperature > 0
        name = name_of(dtype)
        yield _row("sampler, greedy", f"{name}, share of wrong tokens", float(wrong[~is_random].float().mean()), 0.0)
        share = float(wrong[is_random].float().mean())
        yield _row("sampler, random", f"{name}, share of other tokens", share, _DIFFERENT_TOKENS)


def _sampling_batch(num_rows: int) -> SamplingBatch:
    """Every combination of some settings, in turn; the first of five rows is greedy."""
    rows = torch.arange(num_rows)
    return SamplingBatch(
        temperature=torch.tensor([0.0, 0.5, 1.0, 1.5, 0.8])[rows % 5],
        top_k=torch.tensor([0, 40, 1, 500])[rows % 4],
        top_p=torch.tensor([1.0, 0.9, 0.5])[rows % 3],
        min_p=torch.tensor([0.0, 0.0, 0.05, 0.0, 0.001, 0.0, 0.0])[rows % 7],
        seeds=rows * 7919 + 1,
        positions=rows * 3,
        forbidden_token_ids=((),) * num_rows,
        num_logprobs=(-1,) * num_rows,
    )


def _sampled(logits: torch.Tensor, batch: SamplingBatch, device: torch.device) -> torch.Tensor:
    from compiled_engine.ops.triton.sampling import SamplingBuffers, TritonSampler

    num_rows, vocab_size = logits.shape
    names = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
    parameters = SamplingBuffers(**{name: getattr(batch, name).to(device) for name in names})
    token_ids = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
    maxima = torch.zeros(num_rows, dtype=torch.float32, device=device)
    TritonSampler(vocab_size, num_rows, device).launch(logits.to(device), parameters, token_ids, maxima)
    return token_ids.cpu()
