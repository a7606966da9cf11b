"""One engine, measured in a process of its own: start it, time it at every batch size, read its peak memory.

``offline.py`` starts this file with a JSON task as its only argument and reads the JSON report that it leaves.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

WARM_UP_TOKENS = 2


@dataclass(frozen=True)
class Task:
    """What to measure. ``started_at`` is ``time.monotonic()`` of the parent just before it started this process."""

    engine: str
    model_folder: str
    prompts: list[str]
    batch_sizes: list[int]
    new_tokens: int
    threads: int
    max_model_len: int
    kv_cache_bytes: int | None
    report_path: str
    started_at: float


@dataclass(frozen=True)
class Texts:
    """Token ids of a batch's prompts and of what followed each of them."""

    prompt_token_ids: list[list[int]]
    output_token_ids: list[list[int]]


@dataclass(frozen=True)
class BatchReport:
    """Seconds for one new token per prompt (``first_token_s``) and for all of them (``all_tokens_s``)."""

    batch_size: int
    prompt_tokens: int
    output_tokens: int
    first_token_s: float
    all_tokens_s: float
    texts: Texts


@dataclass(frozen=True)
class Report:
    """``startup_s``: from the start of the process until the first prompt can be taken. Memory in bytes."""

    engine: str
    versions: dict[str, str]
    startup_s: float
    peak_rss_at_ready: int
    peak_rss: int
    batches: list[BatchReport]


class Engine(Protocol):
    """The same door for both engines: greedy, exactly ``new_tokens`` new tokens for every prompt, text decoded."""

    def generate(self, prompts: Sequence[str], new_tokens: int) -> Texts: ...

    def versions(self) -> dict[str, str]: ...


class CompiledEngine:
    """This project's engine through its public names."""

    def __init__(self, task: Task) -> None:
        from compiled_engine import LLM

        options: dict[str, Any] = {}
        if task.kv_cache_bytes is not None:
            options["kv_cache_memory"] = task.kv_cache_bytes
        self._llm = LLM(
            model=task.model_folder,
            dtype="float32",
            max_model_len=task.max_model_len,
            max_num_seqs=max(task.batch_sizes),
            enable_prefix_caching=False,  # both runs of a batch have the same prompts
            num_threads=task.threads,
            **options,
        )

    def generate(self, prompts: Sequence[str], new_tokens: int) -> Texts:
        from compiled_engine import SamplingParams

        parameters = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
        outputs = self._llm.generate(list(prompts), parameters, use_tqdm=False)
        for output in outputs:
            if output.outputs[0].finish_reason != "length":
                raise RuntimeError(f"request {output.request_id} ended with {output.outputs[0].finish_reason!r}")
        return Texts(
            [list(output.prompt_token_ids) for output in outputs],
            [list(output.outputs[0].token_ids) for output in outputs],
        )

    def versions(self) -> dict[str, str]:
        import torch

        import compiled_engine

        return {"compiled_engine": compiled_engine.__version__, "torch": torch.__version__}


class Transformers:
    """transformers' own ``generate``: float32, sdpa attention, one batch padded on the left."""

    def __init__(self, task: Task) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(task.threads)
        self._tokenizer = AutoTokenizer.from_pretrained(task.model_folder, padding_side="left")
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token_id = self._tokenizer.eos_token_id
        self._model = AutoModelForCausalLM.from_pretrained(
            task.model_folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        # Without an end token nothing stops early, and unlike with min_new_tokens no logit is changed.
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = self._tokenizer.pad_token_id

    def generate(self, prompts: Sequence[str], new_tokens: int) -> Texts:
        import torch

        batch = self._tokenizer(list(prompts), padding=True, return_tensors="pt")
        inputs, mask = batch["input_ids"], batch["attention_mask"]
        with torch.inference_mode():
            rows = self._model.generate(
                input_ids=inputs, attention_mask=mask, do_sample=False, num_beams=1, max_new_tokens=new_tokens
            )
        new = rows[:, inputs.shape[1] :]
        if new.shape[1] != new_tokens:
            raise RuntimeError(f"transformers made {new.shape[1]} tokens instead of {new_tokens}")
        self._tokenizer.batch_decode(new, skip_special_tokens=True)
        return Texts([row[keep.bool()].tolist() for row, keep in zip(inputs, mask, strict=True)], new.tolist())

    def versions(self) -> dict[str, str]:
        import torch
        import transformers

        return {"transformers": transformers.__version__, "torch": torch.__version__}


ENGINES: dict[str, type[CompiledEngine] | type[Transformers]] = {
    "compiled_engine": CompiledEngine,
    "transformers": Transformers,
}


def peak_rss() -> int:
    """Most memory that this process has held, in bytes.

    VmHWM belongs to the program that runs now. ``ru_maxrss``, the way out elsewhere, also counts what the parent held
    before it started this program.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def measure_batch(engine: Engine, prompts: Sequence[str], new_tokens: int) -> BatchReport:
    """Time one batch twice, with one new token and with all of them; the difference is what decoding takes."""
    engine.generate(prompts, min(WARM_UP_TOKENS, new_tokens))
    start = time.perf_counter()
    engine.generate(prompts, 1)
    middle = time.perf_counter()
    texts = engine.generate(prompts, new_tokens)
    end = time.perf_counter()
    made = [len(row) for row in texts.output_token_ids]
    if made != [new_tokens] * len(prompts):
        raise RuntimeError(f"wanted {new_tokens} tokens for each of {len(prompts)} prompts, got {made}")
    return BatchReport(
        batch_size=len(prompts),
        prompt_tokens=sum(len(row) for row in texts.prompt_token_ids),
        output_tokens=sum(made),
        first_token_s=middle - start,
        all_tokens_s=end - middle,
        texts=texts,
    )


def run(task: Task) -> Report:
    engine: Engine = ENGINES[task.engine](task)
    startup_s = time.monotonic() - task.started_at
    at_ready = peak_rss()
    batches = []
    for size in task.batch_sizes:
        prompts = [task.prompts[index % len(task.prompts)] for index in range(size)]
        batches.append(measure_batch(engine, prompts, task.new_tokens))
    return Report(task.engine, engine.versions(), startup_s, at_ready, peak_rss(), batches)


if __name__ == "__main__":
    the_task = Task(**json.loads(sys.argv[1]))
    Path(the_task.report_path).write_text(json.dumps(asdict(run(the_task))))
