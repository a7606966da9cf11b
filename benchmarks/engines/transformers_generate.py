"""transformers' own ``generate``: float32, sdpa attention, one batch padded on the left."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import transformers

from task import Completions, Task


class StepClock(transformers.StoppingCriteria):
    """Never stops anything: notes when it is asked, which is once for each new token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Generate:
    def __init__(self, task: Task) -> None:
        torch.set_num_threads(task.threads)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(task.model_folder)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            task.model_folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        # Without an end token nothing stops early, and unlike with min_new_tokens no logit is changed.
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    def generate(self, prompts: Sequence[list[int]], new_tokens: int) -> Completions:
        width = max(map(len, prompts))
        inputs = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        clock = StepClock()
        with torch.inference_mode():
            rows = self._model.generate(
                input_ids=inputs,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=new_tokens,
                stopping_criteria=transformers.StoppingCriteriaList([clock]),
            )
        new = rows[:, width:]
        self._tokenizer.batch_decode(new, skip_special_tokens=True)
        return Completions(new.tolist(), clock.times)

    def versions(self) -> dict[str, str]:
        return {"transformers": transformers.__version__, "torch": torch.__version__}

    def close(self) -> None:
        del self._model


def open_engine(task: Task) -> Generate:
    return Generate(task)
