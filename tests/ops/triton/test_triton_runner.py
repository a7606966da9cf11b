"""All of a GPU's step but the GPU: the Triton kernels and the sampler inside captured graphs, emulated on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_engine.compile.graphs.bindings import Role
from compiled_engine.compile.graphs.keys import GraphKind
from compiled_engine.engine.sampling_params import SamplingParams
from compiled_engine.ops.attention import AttentionSpec
from compiled_engine.ops.triton.attention import TritonAttention
from compiled_engine.runners import gpu
from compiled_engine.runners.cpu_device import CpuDevice
from compiled_engine.runners.gpu import GpuRunner
from compiled_engine.runners.graph_sampler import GraphSampler
from graph_runners import eager_runner, engine_of, new_runner, write
from tiny_models import write_tiny_model
from triton_interpreter import mended_interpreter

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 5, 6, 7], [11]]


class InterpretedDevice(CpuDevice):
    """The CPU with what a GPU computes with."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        self._dtype = dtype

    def attention_backend(self, layers: Sequence[AttentionSpec]) -> TritonAttention:  # type: ignore[override]
        # So many multiprocessors that even short sequences are split.
        return TritonAttention(layers, self._dtype, self.torch_device, 132)

    def sampler(self, vocab_size: int, max_rows: int, dtype: torch.dtype) -> GraphSampler:  # type: ignore[override]
        return GraphSampler(vocab_size, max_rows, dtype, self.torch_device)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("triton"), "llama", num_hidden_layers=1, pad_token_id=5, num_attention_heads=4
    )


@pytest.fixture(params=["full", "full_and_piecewise"])
def runner(request: pytest.FixtureRequest, folder: Path) -> Iterator[GpuRunner]:
    settings: dict[str, Any] = {"max_num_seqs": 3, "graph_sizes": (1, 3, 6), "max_graph_size": 6, "max_model_len": 24}
    with pytest.MonkeyPatch.context() as patch, mended_interpreter():
        patch.setattr(gpu, "create_device", InterpretedDevice)
        runner = new_runner(folder, request.param, max_num_batched_tokens=6, **settings)
        yield runner
        runner.close()


@pytest.mark.slow
def test_triton_in_graphs_writes_what_the_cpu_writes(runner: GpuRunner, folder: Path) -> None:
    eager = eager_runner(folder, max_num_seqs=3)
    for layer in runner.static_context.values():
        layer.kv_cache.fill_(float("nan"))
    sampled = SamplingParams(temperature=0.8, top_k=9, top_p=0.9, seed=5, max_tokens=4, ignore_eos=True)
    with_logprobs = SamplingParams(temperature=0, logprobs=2, max_tokens=3, min_tokens=3)
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for params in (greedy, sampled, with_logprobs):
        expected = write(engine_of(eager), PROMPTS, params)
        assert write(engine_of(runner), PROMPTS, params) == expected, params
    eager.close()
    full = next(record for record in runner.graph_records if record.part.key.kind is GraphKind.FULL)
    assert full.launches[-1] == "sampling"
    names = {binding.name for binding in full.bindings if binding.role is Role.WORKSPACE}
    assert {"temperature", "seeds", "sampling_candidates", "results", "maxima", "totals"} <= names


@pytest.mark.slow
def test_what_a_neighbour_asks_for_changes_no_token(runner: GpuRunner) -> None:
    """Log-probabilities and forbidden tokens are computed elsewhere, and only for the rows that ask for them."""
    plain = SamplingParams(temperature=0.8, seed=5, max_tokens=3, ignore_eos=True)
    asking = SamplingParams(temperature=0.8, seed=5, logprobs=2, max_tokens=3, min_tokens=3, stop_token_ids=[9])
    engine = engine_of(runner)
    alone = write(engine, PROMPTS[:1], plain)[0]
    ids = [engine.add_request(PROMPTS[0], plain), engine.add_request(PROMPTS[1], asking)]
    outputs = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output.outputs[0] for output in engine.step()}
    assert tuple(outputs[ids[0]].token_ids) == alone
    assert 9 not in outputs[ids[1]].token_ids
    for token, logprobs in zip(outputs[ids[1]].token_ids, outputs[ids[1]].logprobs, strict=True):
        assert token in logprobs
        assert len(logprobs) in (2, 3)
