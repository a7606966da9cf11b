"""What the driver asks of a worker and what it gets back, as JSON files.

Standard library only: workers run in environments of their own, which hold one engine and little else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Task:
    """One measurement of one engine in one process.

    module: the module that opens the engine, such as ``vllm_steps``; ``options`` are its own.
    model_folder: config, tokenizer and float32 safetensors, for engines that read such a folder.
    gguf_file: the GGUF file that the folder was made from; None if the model is no GGUF file.
    prompts: token ids. A batch of n takes the first n, and begins again when they run out.
    long_prompt: token ids of the prompt whose first token is timed.
    row_tokens: most tokens of one request in a batch, prompt and new ones; ``max_model_len`` also fits ``long_prompt``.
    token_floats: numbers that one token adds to the KV cache; None where the config does not tell.
    started_at: ``time.monotonic()`` of the driver just before it started the process.
    """

    module: str
    options: dict[str, Any]
    model_folder: str
    gguf_file: str | None
    prompts: list[list[int]]
    long_prompt: list[int]
    batch_sizes: list[int]
    new_tokens: int
    threads: int
    row_tokens: int
    max_model_len: int
    token_floats: int | None
    started_at: float

    def for_engine(self, module: str, options: dict[str, Any], started_at: float) -> Task:
        return replace(self, module=module, options=options, started_at=started_at)

    def cache_bytes(self, block_tokens: int, float_bytes: int) -> int | None:
        """Bytes of a paged cache that just holds the largest batch, and one block to spare; None if it is unknown."""
        if self.token_floats is None:
            return None
        return self.cache_blocks(block_tokens) * block_tokens * self.token_floats * float_bytes

    def cache_blocks(self, block_tokens: int) -> int:
        rows = max(self.batch_sizes) * -(-self.row_tokens // block_tokens)
        return max(rows, -(-self.max_model_len // block_tokens)) + 1


@dataclass(frozen=True)
class Completions:
    """New token ids of every prompt, and ``time.perf_counter()`` at each new token of the first prompt."""

    token_ids: list[list[int]]
    times: list[float]


class Engine(Protocol):
    """The same door for all engines.

    Greedy, end tokens ignored, no prefix cache: exactly ``new_tokens`` for each prompt, every prompt computed in full.
    Prompts come as token ids, so that all engines read the same; the answers' texts are made, inside the call.
    """

    def generate(self, prompts: Sequence[list[int]], new_tokens: int) -> Completions: ...

    def versions(self) -> dict[str, str]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class BatchReport:
    """Seconds for one new token per prompt (``first_token_s``) and for all of them (``all_tokens_s``)."""

    batch_size: int
    prompt_tokens: int
    output_tokens: int
    first_token_s: float
    all_tokens_s: float
    token_gaps_s: list[float]
    token_ids: list[list[int]] = field(repr=False)


@dataclass(frozen=True)
class Report:
    """``startup_s``: from the start of the process until the first prompt can be taken. Memory in bytes.

    long_prompt_s: seconds to the first token of the long prompt, the median of a few calls.
    """

    versions: dict[str, str]
    startup_s: float
    peak_memory_at_ready: int
    peak_memory: int
    long_prompt_s: float
    batches: list[BatchReport]


def write_json(path: Path, value: Task | Report) -> None:
    path.write_text(json.dumps(asdict(value)))


def read_task(path: Path) -> Task:
    return Task(**json.loads(path.read_text()))


def read_report(path: Path) -> Report:
    data = json.loads(path.read_text())
    return Report(**(data | {"batches": [BatchReport(**entry) for entry in data["batches"]]}))
