"""llama.cpp through llama-cpp-python's low-level calls: several sequences in one ``llama_decode``.

The high-level class of llama-cpp-python runs one sequence at a time, so it has no batches to measure.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import llama_cpp  # type: ignore[import-not-found]
import numpy as np
from llama_cpp._logger import set_verbose  # type: ignore[import-not-found]

from task import Completions, Task

STEP_TOKENS = 2048


class LlamaCpp:
    """Options of the task are fields of ``llama_context_params``."""

    def __init__(self, task: Task) -> None:
        if task.gguf_file is None:
            raise ValueError("llama.cpp reads GGUF files, and this model is none")
        self._task = task
        set_verbose(False)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            task.gguf_file.encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp could not load {task.gguf_file}")
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self._batch = llama_cpp.llama_batch_init(STEP_TOKENS, 0, 1)
        self._sequences = 1
        self._context = self._new_context(1)

    def generate(self, prompts: Sequence[list[int]], new_tokens: int) -> Completions:
        if len(prompts) != self._sequences:
            # A context divides its cache evenly among its sequences, so each batch size gets one that fits it.
            llama_cpp.llama_free(self._context)
            self._sequences, self._context = len(prompts), self._new_context(len(prompts))
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        newest = self._prefill(prompts)
        rows = [[token] for token in newest]
        times = [time.perf_counter()]
        for made in range(1, new_tokens):
            step = ((row[-1], len(prompt) + made - 1, index, True) for index, (prompt, row) in _rows(prompts, rows))
            for index, token in self._decode(step):
                rows[index].append(token)
            times.append(time.perf_counter())
        for row in rows:
            self._text(row)
        return Completions(rows, times)

    def _new_context(self, sequences: int) -> llama_cpp.llama_context_p:
        parameters = llama_cpp.llama_context_default_params()
        each = self._task.max_model_len if sequences == 1 else self._task.row_tokens
        parameters.n_ctx = sequences * -(-each // 256) * 256
        parameters.n_seq_max = sequences
        parameters.n_batch = STEP_TOKENS
        parameters.n_threads = parameters.n_threads_batch = self._task.threads
        for name, value in self._task.options.items():
            setattr(parameters, name, value)
        context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not context:
            raise RuntimeError(f"llama.cpp could not make a context for {sequences} sequences")
        return context

    def _prefill(self, prompts: Sequence[list[int]]) -> list[int]:
        """The first new token of each prompt; the prompts are computed together, STEP_TOKENS at a time."""
        tokens = (
            (token, place, index, place == len(prompt) - 1)
            for index, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        )
        first: dict[int, int] = {}
        while step := list(islice(tokens, STEP_TOKENS)):
            first.update(self._decode(step))
        return [first[index] for index in range(len(prompts))]

    def _decode(self, step: Iterable[tuple[int, int, int, bool]]) -> Iterator[tuple[int, int]]:
        """Compute (token, position, sequence, wanted) entries; gives (sequence, next token) where wanted."""
        batch = self._batch
        wanted = []
        size = 0
        for token, place, sequence, is_wanted in step:
            batch.token[size], batch.pos[size] = token, place
            batch.n_seq_id[size], batch.seq_id[size][0] = 1, sequence
            batch.logits[size] = is_wanted
            if is_wanted:
                wanted.append(sequence)
            size += 1
        batch.n_tokens = size
        status = llama_cpp.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), (len(wanted), self._vocab_size))
        return zip(wanted, logits.argmax(axis=1).tolist(), strict=True)

    def _text(self, tokens: Iterable[int]) -> str:
        buffer = bytes(256)
        parts = []
        for token in tokens:
            size = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, False)
            parts.append(buffer[:size])
        return b"".join(parts).decode(errors="replace")

    def versions(self) -> dict[str, str]:
        system = llama_cpp.llama_print_system_info().decode().strip()
        return {"llama-cpp-python": llama_cpp.__version__, "system": system}

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)


def _rows(prompts: Sequence[list[int]], rows: Sequence[list[int]]) -> Iterable[tuple[int, tuple[list[int], list[int]]]]:
    return enumerate(zip(prompts, rows, strict=True))


def open_engine(task: Task) -> LlamaCpp:
    return LlamaCpp(task)
