"""New tokens to text, one at a time, and the place where a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT_TOKENS = 6  # enough for a decoder to see whether a space precedes the first new token
_WINDOW_TOKENS = 12  # decode at most about so many tokens again for each new one


class Decoder(Protocol):
    """What the detokenizer needs of a tokenizer."""

    special_token_ids: frozenset[int]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class IncrementalDetokenizer:
    """Decodes a growing list of tokens so that the pieces add up to the text of decoding them together.

    A character whose UTF-8 bytes are spread over several tokens is returned with the token that completes it. A window
    of recent tokens is decoded for each new one; it starts where the text is known to be whole. The last few prompt
    tokens stand before the first new one, because some decoders drop the space before the first token of a text.
    """

    def __init__(
        self, decoder: Decoder, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._decoder = decoder
        self._skipped = decoder.special_token_ids if skip_special_tokens else frozenset()
        self._window = [token for token in prompt_token_ids[-_CONTEXT_TOKENS:] if token not in self._skipped]
        context = self._decode()
        if context.endswith(_REPLACEMENT):  # the prompt ends inside a character; the output is decoded by itself
            self._window, context = [], ""
        self._num_returned = len(context)  # characters of the window's text that were returned before
        self._whole = [0, len(self._window)]  # the last two lengths of the window whose text was whole

    def append(self, token_id: int) -> str:
        """The text that ``token_id`` completes; may be empty."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode()
        stable = text.rstrip(_REPLACEMENT)  # what follows may be the start of a character
        new = stable[self._num_returned :]
        self._num_returned = max(self._num_returned, len(stable))
        if stable == text:
            self._shift()
        return new

    def flush(self) -> str:
        """The text of what was held back, U+FFFD for bytes that never became a character."""
        text = self._decode()
        new = text[self._num_returned :]
        self._num_returned = max(self._num_returned, len(text))
        return new

    def _shift(self) -> None:
        self._whole = [self._whole[1], len(self._window)]
        if len(self._window) > _WINDOW_TOKENS and self._whole[0] > 0:
            self._window = self._window[self._whole[0] :]
            self._whole = [0, len(self._window)]
            self._num_returned = len(self._decode())

    def _decode(self) -> str:
        return self._decoder.decode(self._window, skip_special_tokens=False) if self._window else ""


@dataclass(frozen=True)
class StopMatch:
    """A stop string found in a text: ``text[start:end] == stop``."""

    stop: str
    start: int
    end: int


def find_stop(text: str, stops: Sequence[str], new_from: int = 0) -> StopMatch | None:
    """The stop string that is completed first in ``text``, among those that end after character ``new_from``.

    "First" is by the end of the match, so that the answer does not depend on how the text came in pieces. Of several
    that end at one place the longest is taken, which leaves nothing of a stop string in the text.
    """
    best: StopMatch | None = None
    for stop in stops:
        start = text.find(stop, max(0, new_from - len(stop) + 1))
        if start < 0:
            continue
        match = StopMatch(stop, start, start + len(stop))
        if best is None or (match.end, match.start) < (best.end, best.start):
            best = match
    return best


class TextStream:
    """The text of one completion: decoded token by token, cut at the first stop string.

    min_tokens: stop strings completed by one of the first ``min_tokens`` tokens do not count.
    decoder: None for a model without a tokenizer; the text is then empty.
    """

    def __init__(
        self,
        decoder: Decoder | None,
        prompt_token_ids: Sequence[int] = (),
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = (
            None
            if decoder is None
            else IncrementalDetokenizer(decoder, prompt_token_ids, skip_special_tokens=skip_special_tokens)
        )
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self.text = ""
        self.stopped_by: str | None = None

    def append(self, token_id: int) -> bool:
        """Add a token; True if it completes a stop string, which cuts the text and ends the stream."""
        self._num_tokens += 1
        return self._detokenizer is not None and self._extend(self._detokenizer.append(token_id))

    def finish(self) -> bool:
        """Add what was held back; True if that completes a stop string. Call once, when no more tokens follow."""
        if self._detokenizer is None or self.stopped_by is not None:
            return False
        return self._extend(self._detokenizer.flush())

    def _extend(self, new: str) -> bool:
        new_from = len(self.text)
        self.text += new
        if not new or not self._stops or self._num_tokens <= self._min_tokens:
            return False
        match = find_stop(self.text, self._stops, new_from)
        if match is None:
            return False
        self.stopped_by = match.stop
        self.text = self.text[: match.end if self._include_stop else match.start]
        return True
