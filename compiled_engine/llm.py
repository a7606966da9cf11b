"""``LLM``: the front door for Python programs."""

from __future__ import annotations

import dataclasses
import difflib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from types import TracebackType
from typing import TYPE_CHECKING, Any

from compiled_engine.compile.ledger import Ledger
from compiled_engine.config import EngineConfig
from compiled_engine.engine.outputs import RequestOutput
from compiled_engine.engine.sampling_params import SamplingParams
from compiled_engine.errors import ConfigError, EngineStateError, ModelError

if TYPE_CHECKING:
    from compiled_engine.compile.recorder import Recorder
    from compiled_engine.engine.core import Engine
    from compiled_engine.engine.prompts import Prompt
    from compiled_engine.engine.tokenizer import Message, Tokenizer
    from compiled_engine.runners.base import RunnerLimits

_REFRESH_SECONDS = 0.5


class LLM:
    """A language model, loaded and compiled, that answers prompts in batches.

    >>> with LLM() as llm:                                                          # doctest: +SKIP
    ...     outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))
    ...     print(outputs[0].outputs[0].text)

    model: folder, GGUF file or hub id; None for the default model. The other settings are the fields of
    ``EngineConfig`` (``EngineConfig.explain()`` describes them). Raises ``ConfigError`` for a setting that cannot work
    and ``ModelError`` for a model that cannot be used.

    ``recorder`` has what the setting ``record`` asks to keep, else it is None.
    ``ledger`` tells how long each phase took from the start of the process to the first token: ``print(llm.ledger)``.

    One call at a time: a call from a second thread while one is running raises ``EngineStateError``.
    """

    def __init__(self, model: str | None = None, **config: Any) -> None:
        self.ledger = Ledger()
        self.ledger.add("before the engine", self.ledger.now, start=0.0, note="start of the process to LLM()")
        self.config: EngineConfig = _make_config(model, config)
        with self.ledger.phase("imports"):
            from compiled_engine.compile.recorder import recorder_for
            from compiled_engine.engine.core import Engine
        recorder = recorder_for(self.config, self.ledger)
        try:
            self._use(Engine.from_config(self.config, self.ledger, recorder))
        except BaseException:
            if recorder is not None:
                recorder.close()
            raise

    @classmethod
    def from_engine(cls, engine: Engine, config: EngineConfig | None = None, ledger: Ledger | None = None) -> LLM:
        """An LLM around an engine that the caller put together, e.g. on a runner of their own.

        ledger: the one that the engine's start was noted in; None: a new one.
        """
        llm = cls.__new__(cls)
        llm.ledger = Ledger() if ledger is None else ledger
        llm.config = config or EngineConfig()
        llm._use(engine)
        return llm

    def _use(self, engine: Engine) -> None:
        self._engine = engine
        self.recorder: Recorder | None = engine.recorder
        if self.recorder is not None:
            # Completes the file of an LLM that nobody closes.
            weakref.finalize(self, self.recorder.close)
        self._first_token_noted = False
        self._lock = threading.Lock()
        self._closed = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs are in the order of the prompts.

        prompts: one prompt or a list of them, in any mix: text, a list of token ids, ``{"prompt": text}`` or
            ``{"prompt_token_ids": ids}``. A flat list of integers is one prompt.
        sampling_params: one for all prompts, or one for each. None: ``SamplingParams()``.
        use_tqdm: show a progress bar on stderr.

        A prompt that cannot be served (empty, too long, unknown token ids, ...) has ``finish_reason="error"`` and a
        message in ``error``; the others are answered. If the call is interrupted or fails, its requests are dropped and
        the LLM stays usable.
        """
        items = _as_prompts(prompts)
        params = _params_for(len(items), sampling_params)
        return self._answer(
            [partial(self._engine.add_request, prompt, item) for prompt, item in zip(items, params, strict=True)],
            use_tqdm,
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of them, through the model's chat template.

        messages: dicts such as ``{"role": "user", "content": "Hello"}``.
        add_generation_prompt: end the prompt with the words that open the assistant's turn.

        Raises ``ModelError`` if the model has no chat template. Otherwise like ``generate``.
        """
        conversations = _as_conversations(messages)
        params = _params_for(len(conversations), sampling_params)
        adds = [
            partial(self._engine.add_chat, conversation, item, add_generation_prompt=add_generation_prompt)
            for conversation, item in zip(conversations, params, strict=True)
        ]
        return self._answer(adds, use_tqdm)

    @property
    def limits(self) -> RunnerLimits:
        """What fits: the longest request, the most in one step, the cache, the vocabulary."""
        return self._engine.limits

    def reset_prefix_cache(self) -> None:
        """Forget the K/V that earlier calls have left in the cache, e.g. to measure without it."""
        self._check_open()
        with self._exclusively("reset the prefix cache"):
            self._engine.reset_prefix_cache()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ``ModelError`` if it has none."""
        self._check_open()
        if self._engine.tokenizer is None:
            raise ModelError("the model has no tokenizer.json: prompts are token ids, and texts are empty")
        return self._engine.tokenizer

    def close(self) -> None:
        """Free the model and its caches. Idempotent; other calls raise ``EngineStateError`` afterwards."""
        if not self._closed:
            with self._exclusively("close"):
                self._closed = True
                self._engine.close()
                if self.recorder is not None:
                    self.recorder.close()

    def __enter__(self) -> LLM:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineStateError("this LLM is closed: make a new one")

    @contextmanager
    def _exclusively(self, what: str) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise EngineStateError(
                f"cannot {what} now: this LLM is answering another call; wait for it, or make a second LLM"
            )
        try:
            yield
        finally:
            self._lock.release()

    def _answer(self, adds: Sequence[Callable[[], str]], use_tqdm: bool) -> list[RequestOutput]:
        self._check_open()
        outputs: dict[str, RequestOutput] = {}
        with self._exclusively("generate"), _Progress(len(adds), self._engine, use_tqdm) as progress:
            begin = self.ledger.now
            try:
                request_ids = [add() for add in adds]
                while self._engine.has_unfinished():
                    finished = self._engine.step()
                    if not self._first_token_noted and self._engine.num_sampled_tokens:
                        self._first_token_noted = True
                        self.ledger.add("first token", self.ledger.now - begin, start=begin)
                    outputs.update((output.request_id, output) for output in finished)
                    progress.update(len(finished))
            except BaseException:  # KeyboardInterrupt too: what was begun must not leak into the next call
                self._engine.abort_all()
                raise
        return [outputs[request_id] for request_id in request_ids]


class _Progress:
    """A tqdm bar on stderr that counts requests and shows tokens per second; nothing if it is not wanted."""

    def __init__(self, total: int, engine: Engine, wanted: bool) -> None:
        self._engine = engine
        self._bar: Any = None
        if wanted and total:
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc="Generating", unit="request", dynamic_ncols=True, file=sys.stderr)
        self._start = self._refreshed = time.monotonic()
        self._computed, self._sampled = engine.num_computed_tokens, engine.num_sampled_tokens

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(self._rates(time.monotonic()), refresh=False)
            self._bar.close()

    def update(self, num_finished: int) -> None:
        if self._bar is None:
            return
        now = time.monotonic()
        if num_finished or now - self._refreshed >= _REFRESH_SECONDS:
            self._refreshed = now
            self._bar.set_postfix_str(self._rates(now), refresh=False)
            if num_finished:
                self._bar.update(num_finished)
            else:
                self._bar.refresh()

    def _rates(self, now: float) -> str:
        seconds = max(now - self._start, 1e-9)
        computed = (self._engine.num_computed_tokens - self._computed) / seconds
        sampled = (self._engine.num_sampled_tokens - self._sampled) / seconds
        return f"{computed:.4g} tok/s computed, {sampled:.4g} tok/s generated"


def _make_config(model: str | None, settings: Mapping[str, Any]) -> EngineConfig:
    known = [item.name for item in dataclasses.fields(EngineConfig)]
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, 3)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise ConfigError(f"unknown setting {name!r}: {hint}The settings are {', '.join(known)}")
    return EngineConfig(model=model, **settings)


def _as_prompts(prompts: Any) -> list[Any]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise ConfigError(
            f"prompts is {type(prompts).__name__}: give text, token ids, a prompt dict, or a list of these"
        )
    if prompts and all(isinstance(item, Integral) and not isinstance(item, bool) for item in prompts):
        return [prompts]
    return list(prompts)


def _as_conversations(messages: Any) -> list[Any]:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise ConfigError(
            f"messages is {type(messages).__name__}: give a list of dicts with 'role' and 'content', or a list "
            "of such lists"
        )
    return [messages] if messages and isinstance(messages[0], Mapping) else list(messages)


def _params_for(count: int, params: Any) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(item, SamplingParams) for item in params):
        raise ConfigError(f"sampling_params is {params!r}: give one SamplingParams, or a list with one for each prompt")
    if len(params) != count:
        raise ConfigError(f"{len(params)} sampling_params for {count} prompts: give one for all, or one for each")
    return list(params)
