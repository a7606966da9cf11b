"""What the caller gets back for one prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt.

    text: the decoded new tokens, cut before the stop string that ended them. Empty if the model has no tokenizer.
    token_ids: all new tokens, the stop token and the tokens of a stop string included.
    finish_reason: "stop" (an end-of-sequence token, a stop token or a stop string), "length" (``max_tokens`` or
        ``max_model_len``) or "error" (see ``RequestOutput.error``).
    stop_reason: the stop string or stop token id that ended the text; None for an end-of-sequence token.
    logprobs: None, or per new token ``{token_id: log-probability}``, the sampled token first.
    cumulative_logprob: sum of the sampled tokens' log-probabilities; None unless ``logprobs`` was asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    logprobs: list[dict[int, float]] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """All completions of one prompt, in order of ``CompletionOutput.index``.

    prompt: the text that was given or rendered; None if the caller gave token ids.
    error: why this request could not be served; None if it was. The other requests of the call are not affected.
    num_preemptions: how often the request was set back for want of cache blocks. Costs time, changes nothing.
    num_cached_tokens: prompt tokens whose K/V was in the cache already when the request was first admitted, so that
        they were not computed again. Like ``num_preemptions``, over all completions of the prompt together.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True
    error: str | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
