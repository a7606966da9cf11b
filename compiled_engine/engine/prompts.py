"""The door: what a caller may hand in as a prompt, and the token ids it stands for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeAlias

from compiled_engine.engine.tokenizer import Message, Tokenizer
from compiled_engine.errors import ModelError, RequestError

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text; token ids; ``{"prompt": text}``; or ``{"prompt_token_ids": ids}``, which may carry its text as ``"prompt"``
too."""

_KEYS = ("prompt", "prompt_token_ids")


@dataclass(frozen=True)
class ParsedPrompt:
    """A prompt as token ids, and its text if there was one."""

    text: str | None
    token_ids: tuple[int, ...]


def parse_prompt(prompt: object, tokenizer: Tokenizer | None) -> ParsedPrompt:
    """Token ids of one prompt in any of the accepted forms; raises ``RequestError`` for everything else."""
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt, tokenizer)
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, _encode(prompt, tokenizer))
    return ParsedPrompt(None, _token_ids(prompt))


def given_text(prompt: object) -> str | None:
    """The text in ``prompt``, good or bad, by which its sender will know it again; None if there is none."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def parse_chat(messages: Sequence[Message], tokenizer: Tokenizer | None, add_generation_prompt: bool) -> ParsedPrompt:
    """Token ids of a conversation; raises ``RequestError`` if it is malformed, ``ModelError`` if the model cannot
    chat."""
    if tokenizer is None:
        raise ModelError(
            "chat needs a tokenizer, and the model folder has no tokenizer.json: add one, or give token ids"
        )
    text = tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt)
    return ParsedPrompt(text, tuple(tokenizer.encode(text, add_special_tokens=False)))


def _parse_mapping(prompt: Mapping[str, Any], tokenizer: Tokenizer | None) -> ParsedPrompt:
    for key in prompt:
        if key not in _KEYS:
            near = difflib.get_close_matches(str(key), _KEYS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"give {' or '.join(map(repr, _KEYS))}"
            raise RequestError(f"a prompt dict has the unknown key {key!r}: {hint}")
    text = prompt.get("prompt")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"'prompt' is {type(text).__name__}: give text (token ids go into 'prompt_token_ids')")
    if prompt.get("prompt_token_ids") is not None:
        return ParsedPrompt(text, _token_ids(prompt["prompt_token_ids"]))
    if text is None:
        raise RequestError(f"a prompt dict holds neither {' nor '.join(map(repr, _KEYS))}")
    return ParsedPrompt(text, _encode(text, tokenizer))


def _encode(text: str, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if not text:
        raise RequestError("the prompt is empty: give at least one character")
    if tokenizer is None:
        raise RequestError(
            "a text prompt needs a tokenizer, and the model folder has no tokenizer.json: give token ids"
        )
    return tuple(tokenizer.encode(text))


def _token_ids(prompt: object) -> tuple[int, ...]:
    if hasattr(prompt, "tolist"):  # numpy arrays and tensors
        prompt = prompt.tolist()
    if not isinstance(prompt, Iterable) or isinstance(prompt, (str, bytes, bytearray, Mapping)):
        raise RequestError(
            f"a prompt is {type(prompt).__name__}: give text, a list of token ids, or a dict with one of them"
        )
    ids = tuple(prompt)
    for item in ids:
        if isinstance(item, bool) or not isinstance(item, Integral):
            raise RequestError(f"a list of token ids holds {item!r}: give whole numbers")
    return tuple(int(item) for item in ids)
