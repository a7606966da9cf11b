"""vLLM: the loop that its ``LLM.generate`` runs, with the time of every token noted."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import torch
import vllm  # type: ignore[import-not-found]
from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

from task import Completions, Task

BLOCK_TOKENS = 128  # its own choice for CPUs


class VLLM:
    """Options of the task are arguments of ``vllm.LLM``; ``dtype`` is among them."""

    def __init__(self, task: Task) -> None:
        self._engine = vllm.LLM(
            model=task.model_folder,
            max_model_len=task.max_model_len,
            max_num_seqs=max(task.batch_sizes),
            enable_prefix_caching=False,  # all calls of a batch have the same prompts
            block_size=BLOCK_TOKENS,
            kv_cache_memory_bytes=task.cache_bytes(BLOCK_TOKENS, 4 if task.options["dtype"] == "float32" else 2),
            **task.options,
        ).llm_engine
        self._names = map(str, itertools.count())

    def generate(self, prompts: Sequence[list[int]], new_tokens: int) -> Completions:
        parameters = vllm.SamplingParams(
            max_tokens=new_tokens, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.CUMULATIVE
        )
        names = list(itertools.islice(self._names, len(prompts)))
        for name, prompt in zip(names, prompts, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
        rows: dict[str, list[int]] = {}
        times: list[float] = []
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter()
            rows.update((output.request_id, list(output.outputs[0].token_ids)) for output in outputs)
            times += [now] * (len(rows.get(names[0], [])) - len(times))
        return Completions([rows[name] for name in names], times)

    def versions(self) -> dict[str, str]:
        return {"vllm": vllm.__version__, "torch": torch.__version__}

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def open_engine(task: Task) -> VLLM:
    return VLLM(task)
