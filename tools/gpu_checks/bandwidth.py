"""How near decode attention comes to the memory's bandwidth, and how fast prompts are computed."""

from __future__ import annotations

from typing import Any

import torch

from compiled_engine.engine.core import Engine
from compiled_engine.ops.attention import AttentionLaunch, AttentionSpec
from gpu_checks.lab import Lab, TimedRunner, make_prompts, name_of, seconds_per_call, write
from gpu_checks.report import Outcome, Verdict

_BLOCK_SIZE = 16
_BATCHES = (1, 8, 32)
_TINY_BATCHES = (1, 2)
_PREFILL_ROUNDS = 4


def check(lab: Lab) -> Outcome:
    """Attention of one layer of the measured model's shape against a copy on the device; prompts on the whole model."""
    peak = copy_bandwidth(lab)
    figures: dict[str, Any] = {"copy_gb_per_s": peak / 1e9, **_prefill(lab)}
    missing = lab.why_no_triton()
    rows = (
        [] if missing else [_attention_row(lab, batch, peak) for batch in (_BATCHES if lab.on_gpu else _TINY_BATCHES)]
    )
    if rows:
        last = rows[-1]
        figures["attention_share_of_copy"] = last["share_of_copy"]
        attention = (
            f"attention at batch {last['batch']} and {last['context']} tokens reads {last['gb_per_s']:,.0f} GB/s, "
            f"{last['share_of_copy']:.0%} of what a copy moves"
        )
    else:
        attention = f"no attention ({missing})"
    summary = f"copy {peak / 1e9:,.0f} GB/s; {attention}; prefill {figures['prefill_tokens_per_s']:,.0f} tokens/s"
    return Outcome(Verdict.PASSED, summary, figures, rows)


def copy_bandwidth(lab: Lab) -> float:
    """Bytes per second that a large copy on the device reads and writes, both counted."""
    source = torch.ones(lab.sizes.copy_mib * 2**20, dtype=torch.uint8, device=lab.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_per_call(lambda: target.copy_(source), lab)


def _attention_row(lab: Lab, batch: int, peak: float) -> dict[str, Any]:
    """Time one layer's attention of ``batch`` requests with one new token each. Their blocks lie in random order."""
    from compiled_engine.ops.triton.attention import TritonAttention

    sizes, device = lab.sizes, lab.device
    dtype = lab.measured_dtype
    head_dim = sizes.hidden // sizes.heads
    spec = AttentionSpec("layer", sizes.heads, sizes.kv_heads, head_dim, head_dim**-0.5)
    if lab.on_gpu:
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        backend = TritonAttention([spec], dtype, device, multiprocessors)
    else:
        backend = TritonAttention([spec], dtype, device)
    per_request = -(-sizes.context // _BLOCK_SIZE)
    generator = torch.Generator().manual_seed(0)
    blocks = (1 + torch.randperm(batch * per_request, generator=generator)).to(torch.int32)
    shape = spec.cache_spec(_BLOCK_SIZE, dtype).shape(1 + batch * per_request)
    cache = torch.randn(shape, dtype=dtype, device=device)
    query = torch.randn(batch, sizes.heads, head_dim, dtype=dtype, device=device)
    out = torch.empty_like(query)
    splits = backend.num_kv_splits(batch, sizes.context)
    metadata = backend.metadata_over(
        torch.arange(batch + 1, dtype=torch.int32, device=device),
        torch.full((batch,), sizes.context, dtype=torch.int32, device=device),
        blocks.view(batch, per_request).to(device),
        AttentionLaunch(1, sizes.context, splits, is_uniform=True),
    )
    layer = backend.for_layer(spec)
    slots = torch.zeros(batch, dtype=torch.int64, device=device)
    seconds = seconds_per_call(lambda: layer.write_and_attend(query, None, None, out, cache, slots, metadata), lab)
    num_bytes = batch * sizes.context * 2 * sizes.kv_heads * head_dim * dtype.itemsize
    return {
        "batch": batch,
        "context": sizes.context,
        "kv_splits": splits,
        "microseconds": 1e6 * seconds,
        "gb_per_s": num_bytes / seconds / 1e9,
        "share_of_copy": num_bytes / seconds / peak,
    }


def _prefill(lab: Lab) -> dict[str, float]:
    """Tokens per second of steps that hold nothing but prompts."""
    folder, dtype = lab.measured_llama()
    length = min(1024, lab.sizes.context // 2)
    chunk = 4 * length
    settings: dict[str, Any] = {
        "graph_mode": "none",
        "dtype": name_of(dtype),
        "max_num_seqs": 4,
        "max_model_len": length + 8,
    }
    with lab.runner(folder, max_num_batched_tokens=chunk, **settings) as runner:
        timed = TimedRunner(runner, lab.synchronize)
        engine = Engine(timed, enable_prefix_caching=False)
        for seed in range(_PREFILL_ROUNDS):
            write(engine, make_prompts(4, length, length, lab.sizes.vocab, seed), 1)
    # The first round pays for what happens once.
    full = [step for step in timed.steps if step.num_tokens == chunk][1:]
    quickest = min(step.seconds for step in full)
    return {"prefill_step_tokens": chunk, "prefill_step_ms": 1e3 * quickest, "prefill_tokens_per_s": chunk / quickest}
