"""The engine: requests in, steps, finished outputs out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from compiled_engine.engine.completion import Completion, PromptGroup, error_output
from compiled_engine.engine.kv_cache_manager import KVCacheManager
from compiled_engine.engine.outputs import RequestOutput
from compiled_engine.engine.prompts import ParsedPrompt, Prompt, given_text, parse_chat, parse_prompt
from compiled_engine.engine.recording import execute_recorded
from compiled_engine.engine.request import Request, derive_seed
from compiled_engine.engine.sampling_params import SamplingParams
from compiled_engine.engine.scheduler import ScheduledTokens, Scheduler
from compiled_engine.engine.tokenizer import Message, Tokenizer, read_eos_token_ids
from compiled_engine.errors import EngineStateError, RequestError
from compiled_engine.ops.sampling import SamplingBatch
from compiled_engine.runners.batch import ScheduledBatch

if TYPE_CHECKING:
    from compiled_engine.compile.ledger import Ledger
    from compiled_engine.compile.recorder import Recorder
    from compiled_engine.config import EngineConfig
    from compiled_engine.runners.base import Runner


class Engine:
    """Serves requests on one runner. Single-threaded; ``LLM`` is the door for most callers.

    Add requests, then call ``step()`` while ``has_unfinished()``; each step returns the requests that it finished. A
    bad request is returned by the next step with ``finish_reason="error"``; it disturbs no other.

    Randomness: each completion has a seed, and a token depends on (seed, position) and its logits only. Without
    ``SamplingParams.seed`` the seed is derived from the engine's seed, the request's number and the completion's index.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Iterable[int] = (),
        seed: int = 0,
        enable_prefix_caching: bool = True,
        recorder: Recorder | None = None,
    ) -> None:
        """recorder: is given every step; who made it closes it."""
        self.runner = runner
        self.recorder = recorder
        self.limits = runner.limits
        self.tokenizer = tokenizer
        self.eos_token_ids = tuple(token for token in eos_token_ids if 0 <= token < self.limits.vocab_size)
        self.num_computed_tokens = 0
        self.num_sampled_tokens = 0
        self._seed = seed
        self._scheduler = Scheduler(
            KVCacheManager(
                self.limits.cache_groups, self.limits.block_size, enable_prefix_caching=enable_prefix_caching
            ),
            max_num_seqs=self.limits.max_num_seqs,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
        )
        self._completions: dict[str, Completion] = {}
        self._rejected: list[RequestOutput] = []
        self._num_requests = 0
        self._num_arrivals = 0
        self._closed = False

    @classmethod
    def from_config(cls, config: EngineConfig, ledger: Ledger, recorder: Recorder | None = None) -> Engine:
        """Find, load and compile the model that ``config`` names. Raises ``ModelError`` or ``ConfigError``.

        ledger: where the phases of the start are noted.   recorder: is told when the engine is ready, and every step.
        """
        with ledger.phase("config and files"):
            from compiled_engine.models import find_model
            from compiled_engine.runners import create_runner

            files = find_model(config.model)
            # The cheap files first: what is wrong with them shows before minutes are spent on compiling.
            tokenizer = Tokenizer.from_folder(files.folder) if (files.folder / "tokenizer.json").is_file() else None
            eos_token_ids = read_eos_token_ids(files.folder)
        runner = create_runner(config, files, ledger)
        try:
            engine = cls(
                runner,
                tokenizer=tokenizer,
                eos_token_ids=eos_token_ids,
                seed=config.seed,
                enable_prefix_caching=config.enable_prefix_caching,
                recorder=recorder,
            )
            if recorder is not None:
                recorder.start(runner.describe())
        except BaseException:
            runner.close()
            raise
        # What has been made so far stays: Python's garbage collector need not look through it between steps.
        gc.freeze()
        return engine

    def add_request(self, prompt: Prompt, params: SamplingParams) -> str:
        """Queue a prompt; returns the id under which ``step()`` will return its output."""
        return self._enter(params, lambda: parse_prompt(prompt, self.tokenizer), shown=given_text(prompt))

    def add_chat(
        self, messages: Sequence[Message], params: SamplingParams, *, add_generation_prompt: bool = True
    ) -> str:
        """Queue a conversation, rendered by the model's chat template; raises ``ModelError`` if it has none."""
        return self._enter(params, lambda: parse_chat(messages, self.tokenizer, add_generation_prompt))

    def has_unfinished(self) -> bool:
        """Whether ``step()`` has something to run or to return."""
        return bool(self._rejected) or self._scheduler.has_unfinished()

    def step(self) -> list[RequestOutput]:
        """Run one step and return the outputs that are complete now.

        Raises what the runner raises. The requests are unchanged then; ``abort_all()`` drops them.
        """
        self._check_open()
        finished: list[RequestOutput] = []
        if self._scheduler.has_unfinished():
            scheduled = self._scheduler.schedule()
            if not scheduled:
                raise EngineStateError(
                    "the scheduler found nothing to run although requests are waiting; please report this"
                )
            finished = self._run(scheduled)
        if self.recorder is not None and not self._scheduler.has_unfinished():
            self.recorder.flush()
        rejected, self._rejected = self._rejected, []
        return rejected + finished

    def reset_prefix_cache(self) -> None:
        """Let no later request take K/V that has been computed so far. Running requests go on undisturbed."""
        self._check_open()
        self._scheduler.cache.forget_contents()

    def abort_all(self) -> None:
        """Drop every unfinished request, free its blocks and empty the prefix cache. Safe after any exception in
        ``step()``."""
        self._scheduler.abort_all()
        self._completions.clear()
        self._rejected.clear()

    def close(self) -> None:
        """Drop all requests and close the runner. Idempotent."""
        if not self._closed:
            self._closed = True
            self.abort_all()
            self.runner.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineStateError("the engine is closed: make a new LLM")

    def _enter(self, params: SamplingParams, parse: Callable[[], ParsedPrompt], shown: str | None = None) -> str:
        self._check_open()
        number = self._num_requests
        self._num_requests += 1
        request_id = str(number)
        prompt = ParsedPrompt(shown, ())
        try:
            prompt = parse()
            self._check_request(prompt, params)
            requests = [self._make_request(request_id, prompt, params, index) for index in range(params.n)]
            for request in requests:
                self._scheduler.check_fits(request)
        except RequestError as error:
            self._rejected.append(error_output(request_id, prompt, params.n, str(error)))
            return request_id
        group = PromptGroup(request_id, prompt, params.n)
        for index, request in enumerate(requests):
            self._completions[request.request_id] = Completion(
                request,
                params,
                group=group,
                index=index,
                seed=self._completion_seed(params, number, index),
                eos_token_ids=self.eos_token_ids,
                decoder=self.tokenizer,
            )
            self._scheduler.add(request)
        return request_id

    def _check_request(self, prompt: ParsedPrompt, params: SamplingParams) -> None:
        vocab_size, max_model_len = self.limits.vocab_size, self.limits.max_model_len
        if not prompt.token_ids:
            raise RequestError("the prompt is empty: it has no tokens")
        if len(prompt.token_ids) >= max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt.token_ids)} tokens, and max_model_len is {max_model_len} with at "
                "least one new "
                "token: shorten the prompt or raise max_model_len"
            )
        for name, ids in (("prompt", prompt.token_ids), ("stop_token_ids", params.stop_ids)):
            wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
            if wrong is not None:
                raise RequestError(f"{name}: token id {wrong} is outside the vocabulary, 0 to {vocab_size - 1}")
        if params.logprobs is not None and params.logprobs > vocab_size:
            raise RequestError(
                f"logprobs is {params.logprobs}, above the {vocab_size} tokens of the vocabulary: lower it"
            )
        if params.stop_strings and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and the model has no tokenizer.json: use stop_token_ids")
        stop_ids = set(params.stop_ids) | (set() if params.ignore_eos else set(self.eos_token_ids))
        if params.min_tokens and len(stop_ids) >= vocab_size:
            raise RequestError("min_tokens forbids every token of the vocabulary: name fewer stop_token_ids")

    def _make_request(self, request_id: str, prompt: ParsedPrompt, params: SamplingParams, index: int) -> Request:
        room = self.limits.max_model_len - len(prompt.token_ids)
        arrival = self._num_arrivals
        self._num_arrivals += 1
        return Request(
            request_id if params.n == 1 else f"{request_id}.{index}",
            prompt.token_ids,
            arrival=arrival,
            max_output_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            num_cache_groups=len(self.limits.cache_groups),
        )

    def _completion_seed(self, params: SamplingParams, number: int, index: int) -> int:
        if params.seed is None:
            return derive_seed(self._seed, number, index)
        return params.seed if index == 0 else derive_seed(params.seed, index)

    def _run(self, scheduled: Sequence[ScheduledTokens]) -> list[RequestOutput]:
        sampling = [self._completions[item.request.request_id] for item in scheduled if item.samples]
        batch = _make_batch(scheduled, sampling, self.limits.block_size)
        if self.recorder is None:
            sampled = self.runner.execute(batch).sampled
        else:
            sampled = execute_recorded(self.runner, batch, self.recorder).sampled
        if len(sampled.token_ids) != len(sampling):
            raise EngineStateError(f"the runner returned {len(sampled.token_ids)} tokens for {len(sampling)} rows")
        self._scheduler.update(scheduled)
        self.num_computed_tokens += sum(item.num_tokens for item in scheduled)
        self.num_sampled_tokens += len(sampling)
        finished = []
        for completion, token_id, logprobs in zip(sampling, sampled.token_ids, sampled.logprobs, strict=True):
            if completion.accept(token_id, logprobs):
                self._scheduler.finish(completion.request)
                del self._completions[completion.request.request_id]
                output = completion.group.add(completion)
                if output is not None:
                    finished.append(output)
        return finished


def _make_batch(
    scheduled: Sequence[ScheduledTokens], sampling: Sequence[Completion], block_size: int
) -> ScheduledBatch:
    """One step in the runner's terms; ``sampling`` are the completions that get a new token, in the order of
    ``scheduled``."""
    return ScheduledBatch(tuple(item.as_row(block_size) for item in scheduled), make_sampling_batch(sampling))


def make_sampling_batch(completions: Sequence[Completion]) -> SamplingBatch:
    """The sampling parameters of ``completions``, one row each."""
    params = [completion.params for completion in completions]
    return SamplingBatch(
        temperature=torch.tensor([item.temperature for item in params], dtype=torch.float32),
        top_k=torch.tensor([item.top_k for item in params], dtype=torch.int64),
        top_p=torch.tensor([item.top_p for item in params], dtype=torch.float32),
        min_p=torch.tensor([item.min_p for item in params], dtype=torch.float32),
        seeds=torch.tensor([completion.seed for completion in completions], dtype=torch.int64),
        positions=torch.tensor([completion.request.num_tokens for completion in completions], dtype=torch.int64),
        forbidden_token_ids=tuple(completion.forbidden_token_ids for completion in completions),
        num_logprobs=tuple(-1 if item.logprobs is None else item.logprobs for item in params),
    )
