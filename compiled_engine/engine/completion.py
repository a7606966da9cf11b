"""One completion as it grows, and the prompt whose completions belong together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from compiled_engine.engine.detokenizer import Decoder, TextStream
from compiled_engine.engine.outputs import CompletionOutput, FinishReason, RequestOutput
from compiled_engine.engine.prompts import ParsedPrompt
from compiled_engine.engine.request import Request
from compiled_engine.engine.sampling_params import SamplingParams
from compiled_engine.errors import EngineStateError


class Completion:
    """One completion: its tokens (in ``request``), its text, and the rules by which it ends."""

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        *,
        group: PromptGroup,
        index: int,
        seed: int,
        eos_token_ids: Iterable[int],
        decoder: Decoder | None,
    ) -> None:
        self.request = request
        self.params = params
        self.group = group
        self.index = index
        self.seed = seed
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._stop_ids = frozenset(params.stop_ids)
        self._all_stop_ids = tuple(sorted(self._eos | self._stop_ids))
        self._stream = TextStream(
            decoder,
            request.token_ids,
            stops=params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )
        self._logprobs: list[dict[int, float]] | None = None if params.logprobs is None else []
        self._finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None

    @property
    def forbidden_token_ids(self) -> tuple[int, ...]:
        """Tokens that may not be sampled now: every stop token until ``min_tokens`` tokens have been made."""
        return self._all_stop_ids if self.request.num_output_tokens < self.params.min_tokens else ()

    def accept(self, token_id: int, logprobs: dict[int, float] | None) -> bool:
        """Add a sampled token; True if it ends the completion."""
        self.request.append(token_id)
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.append(logprobs)
        if token_id in self._eos or token_id in self._stop_ids:
            self._finish_reason = "stop"
            self._stop_reason = None if token_id in self._eos else token_id
            if self.params.include_stop_str_in_output:
                self._stream.append(token_id)
        elif self._stream.append(token_id):
            self._finish_reason = "stop"
        elif self.request.num_output_tokens >= self.request.max_output_tokens:
            self._finish_reason = "length"
        else:
            return False
        if self._stream.finish():  # held-back bytes became text that a stop string ends
            self._finish_reason = "stop"
        if self._stream.stopped_by is not None and self._stop_reason is None and token_id not in self._eos:
            self._stop_reason = self._stream.stopped_by
        return True

    def output(self) -> CompletionOutput:
        """The finished completion. Raises ``EngineStateError`` before ``accept`` has said that it is."""
        if self._finish_reason is None:
            raise EngineStateError(f"completion {self.request.request_id} is not finished")
        token_ids = self.request.output_token_ids
        total = None
        if self._logprobs is not None:
            total = sum(entry[token] for entry, token in zip(self._logprobs, token_ids, strict=True))
        return CompletionOutput(
            index=self.index,
            text=self._stream.text,
            token_ids=token_ids,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            logprobs=self._logprobs,
            cumulative_logprob=total,
        )


@dataclass
class PromptGroup:
    """A prompt and those of its ``num_completions`` completions that are done."""

    request_id: str
    prompt: ParsedPrompt
    num_completions: int
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    done: list[CompletionOutput] = field(default_factory=list)

    def add(self, completion: Completion) -> RequestOutput | None:
        """Take a finished completion; the whole output once all are there."""
        self.done.append(completion.output())
        self.num_preemptions += completion.request.num_preemptions
        self.num_cached_tokens += completion.request.num_cached_tokens
        if len(self.done) < self.num_completions:
            return None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=list(self.prompt.token_ids),
            outputs=sorted(self.done, key=lambda output: output.index),
            num_preemptions=self.num_preemptions,
            num_cached_tokens=self.num_cached_tokens,
        )


def error_output(request_id: str, prompt: ParsedPrompt, num_completions: int, message: str) -> RequestOutput:
    """The output of a request that could not be served."""
    return RequestOutput(
        request_id=request_id,
        prompt=prompt.text,
        prompt_token_ids=list(prompt.token_ids),
        outputs=[CompletionOutput(index, "", [], "error") for index in range(num_completions)],
        error=message,
    )
