"""What one caller wants from one prompt: how to choose tokens and when to stop."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from compiled_engine.errors import ConfigError

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = 3.4028234e38  # what the rows of a step are computed in


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one prompt; names and defaults as in vLLM. Immutable; the engine never changes it.

    Every field is checked when the object is made; ``ConfigError`` (a ``ValueError``) names the field, its value, the
    limit and the way out.

    n: completions per prompt; each has a seed derived from ``seed`` and its index.
    temperature: 0 is greedy (the most likely token); 1 samples from the model's own distribution.
    top_p: keep the smallest set of most likely tokens whose mass reaches ``top_p``, in (0, 1]; 1 keeps all.
    top_k: keep the ``top_k`` most likely tokens (and those equal to the last of them); 0 or -1 keeps all.
    min_p: keep tokens at least ``min_p`` times as likely as the most likely one, in [0, 1]; 0 keeps all.
    seed: any 64-bit signed integer. The text then depends on the model, the prompt and these parameters only. None: the
        engine derives a seed from its own and from the request's number.
    max_tokens: most new tokens. None: up to the engine's ``max_model_len``.
    min_tokens: neither a stop token nor a stop string ends the text before so many tokens were made.
    stop: text or texts that end the generation where they are first completed. The text is cut before them.
    stop_token_ids: tokens that end the generation, besides the model's own end-of-sequence tokens.
    ignore_eos: go on after the model's end-of-sequence tokens. ``stop_token_ids`` still end it.
    include_stop_str_in_output: leave the stop string (or the stop token's text) in the text.
    skip_special_tokens: leave special tokens out of the text. ``token_ids`` always holds them.
    logprobs: None for none, else so many most likely tokens per position, the sampled one in addition. They are
        log-probabilities of the model itself, before temperature and filters.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | tuple[str, ...] | list[str] | None = ()
    stop_token_ids: tuple[int, ...] | list[int] | None = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self._set("n", _integer("n", self.n, 1))
        self._set("temperature", _number("temperature", self.temperature, 0.0, _FLOAT32_MAX, "0 for greedy"))
        self._set("top_p", _number("top_p", self.top_p, 0.0, 1.0, "1 to keep all tokens", above=True))
        self._set("top_k", max(0, _integer("top_k", self.top_k, -1, _INT32_MAX, "0 or -1 to keep all tokens")))
        self._set("min_p", _number("min_p", self.min_p, 0.0, 1.0, "0 to keep all tokens"))
        if self.seed is not None:
            self._set("seed", _integer("seed", self.seed, _INT64_MIN, _INT64_MAX, "None for a seed of the engine's"))
        if self.max_tokens is not None:
            self._set("max_tokens", _integer("max_tokens", self.max_tokens, 1, way_out="None for no limit of its own"))
        self._set("min_tokens", _integer("min_tokens", self.min_tokens, 0))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens is {self.min_tokens}, above max_tokens ({self.max_tokens}): lower one or raise the other"
            )
        if self.logprobs is not None:
            self._set("logprobs", _integer("logprobs", self.logprobs, 0, way_out="None for no log-probabilities"))
        self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", _stop_token_ids(self.stop_token_ids))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}: give True or False")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple, whatever form it was given in."""
        return tuple(self.stop or ())

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """``stop_token_ids`` as a tuple, whatever form it was given in."""
        return tuple(self.stop_token_ids or ())

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken at every position."""
        return self.temperature == 0.0


def _integer(name: str, value: object, low: int, high: int | None = None, way_out: str = "") -> int:
    # bool is an Integral too, but max_tokens=True is a mistake.
    limit = f"of at least {low}" if high is None else f"from {low} to {high}"
    way_out = f" ({way_out})" if way_out else ""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(f"{name} is {value!r}: give a whole number {limit}{way_out}")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise ConfigError(f"{name} is {number}: give a whole number {limit}{way_out}")
    return number


def _number(name: str, value: object, low: float, high: float, way_out: str, above: bool = False) -> float:
    limit = f"a number in {'(' if above else '['}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name} is {value!r}: give {limit} ({way_out})")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < low or number > high or (above and number == low):
        raise ConfigError(f"{name} is {value!r}: give {limit} ({way_out})")
    return number


def _stop_strings(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, Iterable) or isinstance(stop, (bytes, dict)):
        raise ConfigError(f"stop is {stop!r}: give a text, or a list of texts")
    strings = tuple(stop)
    for item in strings:
        if not isinstance(item, str):
            raise ConfigError(f"stop holds {item!r}: give texts (token ids go into stop_token_ids)")
        if not item:
            raise ConfigError("stop holds an empty text, which would end every answer at once: leave it out")
    return strings


def _stop_token_ids(ids: object) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not isinstance(ids, Iterable) or isinstance(ids, (str, bytes, dict)):
        raise ConfigError(f"stop_token_ids is {ids!r}: give a list of token ids")
    return tuple(_integer("an item of stop_token_ids", item, 0) for item in ids)
