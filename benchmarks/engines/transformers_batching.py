"""transformers' continuous batching: float32, sdpa attention over a paged cache.

This is what ``model.generate_batch`` runs. That method makes a new manager, with a new cache, in every call; here one
manager stays, so that the time of a call is the time of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers

from task import Completions, Task

PAGE_TOKENS = 32
MAX_STEP_TOKENS = 512


class ContinuousBatching:
    def __init__(self, task: Task) -> None:
        torch.set_num_threads(task.threads)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(task.model_folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            task.model_folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self._manager = model.init_continuous_batching(
            transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            transformers.ContinuousBatchingConfig(
                page_size=PAGE_TOKENS,
                num_blocks=task.cache_blocks(PAGE_TOKENS),
                max_batch_tokens=MAX_STEP_TOKENS,
                allow_block_sharing=False,  # all calls of a batch have the same prompts
            ),
        )
        with torch.inference_mode():  # the manager's thread takes over this mode
            self._manager.start()

    def generate(self, prompts: Sequence[list[int]], new_tokens: int) -> Completions:
        ids = self._manager.add_requests(list(prompts), max_new_tokens=new_tokens, record_timestamps=True)
        outputs: dict[str, Any] = {}
        while len(outputs) < len(ids):
            output = self._manager.get_result(timeout=1)
            if output is None:
                if not self._manager.is_running():
                    raise RuntimeError("the thread of continuous batching ended")
            elif output.error is not None:
                raise RuntimeError(f"continuous batching failed: {output.error}")
            elif output.is_finished():
                outputs[output.request_id] = output
        rows = [list(outputs[name].generated_tokens) for name in ids]
        self._tokenizer.batch_decode(rows, skip_special_tokens=True)
        return Completions(rows, list(outputs[ids[0]].timestamps))

    def versions(self) -> dict[str, str]:
        return {"transformers": transformers.__version__, "torch": torch.__version__}

    def close(self) -> None:
        self._manager.stop(block=True, timeout=10)
        self._manager.destroy()


def open_engine(task: Task) -> ContinuousBatching:
    return ContinuousBatching(task)
