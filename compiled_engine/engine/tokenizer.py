"""Text to token ids and back, and chats to text, from the files of a model folder.

Built on the ``tokenizers`` library and jinja2 alone, because importing transformers costs seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_engine.errors import ModelError, RequestError

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer as _FastTokenizer

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

Message = Mapping[str, Any]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; an empty one if there is no such file. Raises ``ModelError`` if it is damaged."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}): download the model again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds {type(content).__name__}, expected a JSON object: download the model again")
    return content


def read_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """The model's end-of-sequence ids: those of generation_config.json, else of config.json, else none.

    Both files may hold one id or a list of them. This is the order in which transformers' ``generate`` looks.
    """
    for name in ("generation_config.json", "config.json"):
        config = read_json(folder / name)
        value = config.get("eos_token_id")
        if value is None and isinstance(config.get("text_config"), dict):
            value = config["text_config"].get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
            raise ModelError(f"eos_token_id in {folder / name} is {value!r}: expected an integer or a list of integers")
        if ids:
            return tuple(ids)
    return ()


class Tokenizer:
    """The tokenizer of one model.

    ``Tokenizer.from_folder(folder)`` reads tokenizer.json, tokenizer_config.json and, if there is one, the chat
    template (chat_template.jinja, else ``chat_template`` in tokenizer_config.json). Ids and texts equal those of
    transformers.
    """

    def __init__(
        self,
        tokenizer: _FastTokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        source: str = "the model",
    ) -> None:
        # A file may carry the truncation and padding of some training run; neither belongs to a prompt.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special_tokens = dict(special_tokens or {})
        self._source = source
        self.chat_template = chat_template
        self._compiled_template: Template | None = None
        added = tokenizer.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read a model folder. Raises ``ModelError`` if it has no tokenizer.json or a damaged one."""
        from tokenizers import Tokenizer as FastTokenizer

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(
                f"model folder {folder} has no tokenizer.json: add one (transformers' "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...) writes it), or give prompts as token ids"
            )
        try:
            tokenizer = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for a damaged file
            raise ModelError(f"{path} cannot be read ({error}): download the model again") from error
        config = read_json(folder / "tokenizer_config.json")
        return cls(
            tokenizer,
            special_tokens=_special_tokens(config),
            chat_template=_find_chat_template(folder, config),
            source=str(folder),
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids that the tokenizer knows, added tokens included. The model's own may be larger."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; with ``add_special_tokens`` those that the model expects around a plain prompt.

        Raises ``RequestError`` for text that is not valid Unicode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt is not valid Unicode: lone surrogate at character {error.start}; decode the text "
                "properly first"
            ) from None
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``. Ids that the tokenizer does not know give no text; broken UTF-8 gives U+FFFD."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_to_id(self, token: str) -> int | None:
        """Id of a token given by its own spelling in the vocabulary; None if there is none."""
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The text that the model's chat template makes of a conversation.

        ``messages``: dicts with ``role`` and ``content``. Encode the text with ``add_special_tokens=False``: templates
        write special tokens themselves. Raises ``ModelError`` if the model has no chat template, ``RequestError`` if
        the messages are malformed or the template refuses them.
        """
        from jinja2 import TemplateError

        template = self._template()
        try:
            return template.render(
                messages=_checked_messages(messages),
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(f"the chat template refused this conversation: {error}") from error

    def _template(self) -> Template:
        if self.chat_template is None:
            raise ModelError(
                f"{self._source} has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json): "
                "use generate() with a plain prompt, or a model tuned for chat"
            )
        if self._compiled_template is None:
            self._compiled_template = _compile_template(self.chat_template, self._source)
        return self._compiled_template


def _checked_messages(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, (list, tuple)):
        raise RequestError(f"a conversation is a list of messages, got {type(messages).__name__}")
    if not messages:
        raise RequestError(
            "the conversation is empty: give at least one message such as {'role': 'user', 'content': ...}"
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"message {index} is {message!r}: give a dict with a 'role' and a 'content'")
        if not isinstance(message.get("content"), (str, list)) and not set(message) - {"role", "content"}:
            raise RequestError(f"message {index} has content {message.get('content')!r}: give text")
    return [dict(message) for message in messages]


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        if isinstance(value, dict):  # an AddedToken, written out
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _find_chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read ({error}): download the model again") from error
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones; the plain chat is called "default"
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _compile_template(source: str, where: str) -> Template:
    """Compile a chat template in the environment that model authors write for (transformers'): sandboxed, blocks
    trimmed."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_extension()]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ModelError(f"the chat template of {where} is not valid Jinja: {error}") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which would change a prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(pattern)


def _generation_extension() -> Any:
    """``{% generation %}`` marks the assistant's words for training; for a prompt its body is rendered as it stands."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - read by jinja, which declares it so

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation
