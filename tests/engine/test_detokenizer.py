"""Text and stop strings under every split of UTF-8 into tokens, against decoding everything at once."""

from __future__ import annotations

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from compiled_engine.engine.detokenizer import IncrementalDetokenizer, StopMatch, TextStream, find_stop
from compiled_engine.engine.tokenizer import Tokenizer
from fake_runner import BYTE_CHARACTERS, BYTE_EOS, byte_token, byte_tokenizer

# Characters of one to four bytes, few of them, so that stop strings are often met.
ALPHABET = "abcä€😀 \n"
texts = st.text(ALPHABET, max_size=14)
raw_bytes = st.lists(st.sampled_from([*"aä€😀".encode(), 0xFF, 0xE2, 0x41]), max_size=14).map(bytes)


def stops_for(data, text: str) -> list[str]:
    """A few stop strings: parts of ``text``, which often overlap or nest, and others."""
    starts, sizes = st.integers(0, max(0, len(text) - 1)), st.integers(1, 5)
    parts = st.tuples(starts, sizes).map(lambda part: text[part[0] : sum(part)] or "a")
    others = st.text(ALPHABET, min_size=1, max_size=4)
    return data.draw(st.lists(parts | others, min_size=1, max_size=4))


def split(data, content: bytes) -> tuple[Tokenizer, list[int]]:
    """Cut ``content`` into tokens of 1 to 5 bytes anywhere; a tokenizer that knows them, and their ids."""
    pieces = []
    while content:
        size = data.draw(st.integers(1, min(5, len(content))))
        pieces.append(content[:size])
        content = content[size:]
    extra = sorted({piece for piece in pieces if len(piece) > 1})
    fast = byte_tokenizer(extra)
    return Tokenizer(fast), [fast.token_to_id(byte_token(piece)) for piece in pieces]


def slow_stop(text: str, stops, after: int = 0) -> StopMatch | None:
    """The first stop string by walking over the text one character at a time."""
    for end in range(after + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            event("several end at one place" if len(set(ending)) > 1 else "one")
            return StopMatch(longest, end - len(longest), end)
    return None


@given(st.data(), st.one_of(texts.map(str.encode), raw_bytes))
def test_pieces_add_up_to_decoding_all(data, content):
    tokenizer, ids = split(data, content)
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.append(token) for token in ids]
    assert "".join(pieces) + detokenizer.flush() == content.decode("utf-8", errors="replace") == tokenizer.decode(ids)


@given(st.data(), texts)
def test_a_character_comes_with_the_token_that_completes_it(data, text):
    tokenizer, ids = split(data, text.encode())
    detokenizer = IncrementalDetokenizer(tokenizer)
    so_far, content = "", b""
    for token in ids:
        so_far += detokenizer.append(token)
        content += tokenizer_bytes(tokenizer, token)
        assert so_far == content.decode("utf-8", errors="ignore")


def tokenizer_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    return bytes(map(BYTE_CHARACTERS.index, tokenizer._tokenizer.id_to_token(token)))


@given(st.data(), st.one_of(texts.map(str.encode), raw_bytes), st.integers(0, 14))
def test_the_prompt_before_changes_nothing(data, content, cut):
    """Whatever the prompt is, even one that ends inside a character, the text is that of the output alone."""
    tokenizer, ids = split(data, content)
    prompt, output = ids[:cut], ids[cut:]
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    assert "".join(map(detokenizer.append, output)) + detokenizer.flush() == tokenizer.decode(output)


def test_a_long_text_is_decoded_through_a_short_window():
    tokenizer = Tokenizer(byte_tokenizer())
    sizes = []

    class Counting:
        special_token_ids = tokenizer.special_token_ids

        def decode(self, token_ids, *, skip_special_tokens=True):
            sizes.append(len(token_ids))
            return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    text = "abcä€😀" * 60
    detokenizer = IncrementalDetokenizer(Counting(), list(b"prompt"))
    assert "".join(map(detokenizer.append, text.encode())) == text
    assert max(sizes) < 30


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens(skip):
    tokenizer = Tokenizer(byte_tokenizer())
    euro = list("€".encode())
    ids = [BYTE_EOS, ord("a"), BYTE_EOS, *euro[:2], BYTE_EOS, euro[2], BYTE_EOS]
    detokenizer = IncrementalDetokenizer(tokenizer, [BYTE_EOS], skip_special_tokens=skip)
    text = "".join(map(detokenizer.append, ids)) + detokenizer.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)
    assert ("<eos>" in text) is not skip
    assert ("€" in text) is skip


def sentencepiece_like() -> Tokenizer:
    """The decoder of Llama 2 and Mistral: "▁" for a space, byte tokens, and the first space of a text dropped."""
    words = ["<unk>", "▁Hello", "▁world", "!", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    fast = FastTokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True))
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(fast)


@given(
    st.lists(
        st.sampled_from([(1,), (2,), (3,), (4,), *(tuple(b + 5 for b in c.encode()) for c in "aä€😀")]), max_size=12
    )
)
def test_byte_fallback_and_spaces(groups):
    tokenizer = sentencepiece_like()
    ids = [token for group in groups for token in group]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert "".join(map(detokenizer.append, ids)) + detokenizer.flush() == tokenizer.decode(ids)
    # After a prompt the space before the first new word is part of the new text.
    detokenizer = IncrementalDetokenizer(tokenizer, [1])
    assert "Hello" + "".join(map(detokenizer.append, ids)) + detokenizer.flush() == tokenizer.decode([1, *ids])


@given(st.data(), texts, st.integers(0, 14))
def test_find_stop_equals_walking_over_the_text(data, text, after):
    stops = stops_for(data, text)
    assert find_stop(text, stops, min(after, len(text))) == slow_stop(text, stops, min(after, len(text)))


@given(st.data(), texts, st.booleans(), st.integers(0, 4))
def test_stop_strings_under_every_split(data, text, include, min_tokens):
    """The cut, the stop string and the token that completes it are those of the whole text, however it is split."""
    stops = stops_for(data, text)
    tokenizer, ids = split(data, text.encode())
    ends = []  # characters that are whole after each token
    content = b""
    for token in ids:
        content += tokenizer_bytes(tokenizer, token)
        ends.append(len(content.decode("utf-8", errors="ignore")))
    expected = slow_stop(text, stops, ends[min(min_tokens, len(ends)) - 1] if min_tokens and ends else 0)
    stream = TextStream(tokenizer, stops=stops, include_stop=include, min_tokens=min_tokens)
    used = 0
    for token in ids:
        used += 1
        if stream.append(token):
            break
    else:
        stream.finish()
    if expected is None:
        assert (stream.text, stream.stopped_by) == (text, None)
    else:
        assert stream.stopped_by == expected.stop
        assert stream.text == text[: expected.end if include else expected.start]
        assert used == next(i for i, end in enumerate(ends, 1) if end >= expected.end)


def test_stop_inside_a_token_before_half_a_character():
    """A token that completes a stop string and begins another character ends the text at once."""
    fast = byte_tokenizer([b"xSTOP\xe2"])
    stream = TextStream(Tokenizer(fast), stops=["STOP"])
    assert stream.append(259)
    assert stream.text == "x"


def test_stop_string_in_held_back_text():
    stream = TextStream(Tokenizer(byte_tokenizer()), stops=["\ufffd"])
    assert not stream.append(0xE2)
    assert stream.finish()
    assert stream.text == ""


def test_without_a_tokenizer_there_is_no_text():
    stream = TextStream(None, [1, 2])
    assert not stream.append(3)
    assert not stream.finish()
    assert stream.text == ""
