"""The tokenizer equals transformers' on the real default model, and its errors say what to do."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from compiled_engine.engine.tokenizer import Tokenizer, read_eos_token_ids
from compiled_engine.errors import ModelError, RequestError
from fake_runner import BYTE_BOS, BYTE_EOS, byte_tokenizer, write_byte_model_folder

TEXTS = [
    "What is the capital of France?",
    " leading and trailing  ",
    "tabs\tand\n\nnewlines\r\n",
    "naïve café — “quotes” … ½",
    "日本語のテキスト、한국어, العربية, עברית",
    "😀 👩‍👩‍👧‍👦 🇫🇷 é",
    "def f(x):\n    return x**2 + 1  # comment",
    "1234567890 3.14159 1,000,000",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "x" * 500,
    "",
    "\x00\x01\x7f",
]

CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!  "},
        {"role": "user", "content": "<|im_end|> {{ braces }} 😀\n"},
    ],
    [{"role": "user", "content": ""}],
]


@pytest.fixture(scope="session")
def real(smollm2_folder):
    """Our tokenizer and transformers', from one folder."""
    from transformers import AutoTokenizer

    return Tokenizer.from_folder(smollm2_folder), AutoTokenizer.from_pretrained(smollm2_folder)


@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode_equal_transformers(real, text):
    ours, theirs = real
    ids = theirs(text)["input_ids"]
    assert ours.encode(text) == ids
    assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=60))
def test_any_text_equals_transformers(real, text):
    ours, theirs = real
    assert ours.encode(text) == theirs(text)["input_ids"]


@given(ids=st.lists(st.integers(0, 49151), max_size=20))
def test_any_ids_decode_as_in_transformers(real, ids):
    ours, theirs = real
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chats_equal_transformers(real, chat, add_generation_prompt):
    ours, theirs = real
    text = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert ours.render_chat(chat, add_generation_prompt=add_generation_prompt) == text
    ids = theirs.apply_chat_template(chat, add_generation_prompt=add_generation_prompt, return_dict=True)["input_ids"]
    assert ours.encode(text, add_special_tokens=False) == ids


def test_special_ids_equal_transformers(real, smollm2_folder):
    ours, theirs = real
    assert ours.special_token_ids == set(theirs.all_special_ids) | {
        i for i, token in theirs.added_tokens_decoder.items() if token.special
    }
    assert ours.token_to_id("<|im_end|>") == theirs.eos_token_id
    assert read_eos_token_ids(smollm2_folder) == (theirs.eos_token_id,)
    assert ours.vocab_size == len(theirs)


TEMPLATES = [
    "{% for m in messages %}\n  {% if m.role == 'user' %}\n    U:{{ m.content | trim }}\n  {% endif %}\n{% endfor %}",
    "{{ bos_token }}{{ messages | tojson }}{{ eos_token }}{{ messages[0] | tojson(indent=2) }}",
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% if tools is none and documents is none %}none{% endif %}{% if tools %}tools{% endif %}",
    "{%- for m in messages -%}\n  {{- '<' + m['role'] + '>' -}}\n  {{ m['content'] }}\n{%- endfor -%}\n",
    "{{ messages[0].content | upper | replace('A', '<b>&') }}{{ undefined_name }}",
    "{{ strftime_now('%Y') | length }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_template_features_render_as_in_transformers(real, template):
    from tokenizers import Tokenizer as FastTokenizer

    theirs = real[1]
    ours = Tokenizer(
        FastTokenizer.from_str(theirs.backend_tokenizer.to_str()),
        special_tokens={"bos_token": theirs.bos_token, "eos_token": theirs.eos_token},
        chat_template=template,
    )
    chat = [{"role": "user", "content": " aé<&> "}, {"role": "assistant", "content": "b"}]
    expected = theirs.apply_chat_template(chat, chat_template=template, tokenize=False)
    assert ours.render_chat(chat, add_generation_prompt=False) == expected


def test_templates_are_sandboxed():
    escape = "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}"
    tokenizer = Tokenizer(byte_tokenizer(), chat_template=escape)
    with pytest.raises(RequestError, match="unsafe"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])
    changing = Tokenizer(byte_tokenizer(), chat_template="{{ messages.append(1) }}")
    with pytest.raises(RequestError):
        changing.render_chat([{"role": "user", "content": "x"}])


def test_template_that_refuses_a_conversation():
    template = "{% if messages|length > 1 %}{{ raise_exception('one turn only') }}{% endif %}ok"
    tokenizer = Tokenizer(byte_tokenizer(), chat_template=template)
    message = {"role": "user", "content": "x"}
    assert tokenizer.render_chat([message]) == "ok"
    with pytest.raises(RequestError, match="one turn only"):
        tokenizer.render_chat([message, message])


@pytest.mark.parametrize(
    "messages",
    [[], "hi", None, {"role": "user"}, ["hi"], [{"content": "x"}], [{"role": 1, "content": "x"}], [{"role": "user"}]],
)
def test_malformed_conversations(messages):
    tokenizer = Tokenizer(byte_tokenizer(), chat_template="{{ messages }}")
    with pytest.raises(RequestError):
        tokenizer.render_chat(messages)


def test_no_chat_template():
    with pytest.raises(ModelError, match=r"chat_template\.jinja"):
        Tokenizer(byte_tokenizer()).render_chat([{"role": "user", "content": "x"}])


def test_broken_chat_template():
    with pytest.raises(ModelError, match="not valid Jinja"):
        Tokenizer(byte_tokenizer(), chat_template="{% for %}").render_chat([{"role": "user", "content": "x"}])


def test_folder(tmp_path):
    tokenizer = Tokenizer.from_folder(write_byte_model_folder(tmp_path / "m"))
    chat = [{"role": "user", "content": "é"}]
    assert tokenizer.render_chat(chat) == "user: é\nassistant: "
    assert tokenizer.encode("é") == list("é".encode())
    assert tokenizer.decode([BYTE_BOS, 0xC3, 0xA9, BYTE_EOS, 9999]) == "é"


def test_template_places(tmp_path):
    """chat_template.jinja first, then tokenizer_config.json, where it is one template or several by name."""
    folder = write_byte_model_folder(tmp_path)
    chat = [{"role": "user", "content": "x"}]
    config = {"bos_token": {"content": "<bos>", "special": True}, "chat_template": "config{{ bos_token }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.from_folder(folder).render_chat(chat).startswith("user: ")
    (folder / "chat_template.jinja").unlink()
    assert Tokenizer.from_folder(folder).render_chat(chat) == "config<bos>"
    config["chat_template"] = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.from_folder(folder).render_chat(chat) == "yes"
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match="no chat template"):
        Tokenizer.from_folder(folder).render_chat(chat)


def test_truncation_and_padding_of_the_file_are_dropped_and_special_tokens_kept(tmp_path):
    fast = byte_tokenizer()
    fast.enable_truncation(3)
    fast.enable_padding(length=10)
    fast.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BYTE_BOS)])
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("abcdef") == [BYTE_BOS, *b"abcdef"]
    assert tokenizer.encode("abcdef", add_special_tokens=False) == list(b"abcdef")


def test_bad_folders(tmp_path):
    with pytest.raises(ModelError, match=r"no tokenizer\.json.*token ids"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)
    write_byte_model_folder(tmp_path)
    for content in ("{", "[]"):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
            Tokenizer.from_folder(tmp_path)


def test_invalid_unicode():
    with pytest.raises(RequestError, match="lone surrogate at character 1"):
        Tokenizer(byte_tokenizer()).encode("a\udc80")


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, {}, ()),
        (None, {"eos_token_id": 2}, (2,)),
        (None, {"eos_token_id": [2, 3]}, (2, 3)),
        (None, {"eos_token_id": None, "text_config": {"eos_token_id": 5}}, (5,)),
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 2}, (7, 8)),
        ({"eos_token_id": 7}, {"eos_token_id": 2}, (7,)),
        ({}, {"eos_token_id": 2}, (2,)),
        ({"eos_token_id": 0}, {"eos_token_id": 2}, (0,)),
    ],
)
def test_eos_token_ids(tmp_path, generation, config, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_eos_token_ids(tmp_path) == expected


@pytest.mark.parametrize("value", ["2", [2, None], True, {"a": 1}])
def test_bad_eos_token_ids(tmp_path, value):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelError, match="eos_token_id"):
        read_eos_token_ids(tmp_path)


def test_transformers_and_torch_are_not_imported(tmp_path):
    folder = write_byte_model_folder(tmp_path)
    code = (
        "import sys; from pathlib import Path; from compiled_engine.engine.tokenizer import Tokenizer; "
        f"t = Tokenizer.from_folder(Path({str(folder)!r})); text = t.decode(t.encode('x')); "
        "t.render_chat([{'role': 'user', 'content': text}]); "
        "sys.exit(sum(name in sys.modules for name in ('transformers', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
