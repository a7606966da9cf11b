"""This project's engine: the loop that ``LLM.generate`` runs, with the time of every token noted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from compiled_engine import EngineConfig, RequestOutput, SamplingParams, __version__
from compiled_engine.compile.ledger import Ledger
from compiled_engine.engine.core import Engine
from task import Completions, Task

BLOCK_TOKENS = 16


class CompiledEngine:
    """Options of the task are settings of ``EngineConfig``; ``dtype`` is float32 where they do not say otherwise.
    ``unpacked`` stands for a model whose weights are plain floats."""

    def __init__(self, task: Task) -> None:
        settings: dict[str, Any] = {
            "dtype": "float32",
            "max_model_len": task.max_model_len,
            "max_num_seqs": max(task.batch_sizes),
            "enable_prefix_caching": False,  # all calls of a batch have the same prompts
            "num_threads": task.threads,
        }
        options = dict(task.options)
        # The weights unpacked to floats, as other engines read them, instead of the GGUF file's blocks.
        gguf_file = None if options.pop("unpacked", False) else task.gguf_file
        settings |= options
        float_bytes = 4 if settings["dtype"] == "float32" else 2
        settings["kv_cache_memory"] = task.cache_bytes(BLOCK_TOKENS, float_bytes)
        config = EngineConfig(model=gguf_file or task.model_folder, block_size=BLOCK_TOKENS, **settings)
        self._engine = Engine.from_config(config, Ledger())

    def generate(self, prompts: Sequence[list[int]], new_tokens: int) -> Completions:
        parameters = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
        ids = [self._engine.add_request(prompt, parameters) for prompt in prompts]
        finished: dict[str, RequestOutput] = {}
        step_times = []
        while self._engine.has_unfinished():
            sampled = self._engine.num_sampled_tokens
            outputs = self._engine.step()
            if self._engine.num_sampled_tokens > sampled:
                step_times.append(time.perf_counter())
            finished.update((output.request_id, output) for output in outputs)
        for output in finished.values():
            if output.outputs[0].finish_reason != "length":
                raise RuntimeError(f"request {output.request_id} ended with {output.outputs[0].finish_reason!r}")
        # First come, first served: the first request is in every step that samples until it is complete.
        return Completions([list(finished[name].outputs[0].token_ids) for name in ids], step_times[:new_tokens])

    def versions(self) -> dict[str, str]:
        import torch

        return {"compiled_engine": __version__, "torch": torch.__version__}

    def close(self) -> None:
        self._engine.close()


def open_engine(task: Task) -> CompiledEngine:
    return CompiledEngine(task)
