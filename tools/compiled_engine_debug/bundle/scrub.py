"""Taking out of texts and configs what tells of the machine that they come from: paths and addresses.

A text keeps the last component of each path. A model's config keeps numbers, and text only where it is known to name
something public.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from compiled_engine_debug.findings import Finding

# A directory may have white space, quotes and punctuation within its name, not at its end; else "a/b, (/c/d)" would be
# one path. A colon ends a path before white space and line numbers.
_DIRECTORY = r"""(?!\s)(?:[^\s/\\:*"<>|]|[ \t](?![ \t]*[/\\])|:(?![\s\d/\\]))*[^\s/\\:*"'`<>|(\[{,;=]"""
_LAST = r"""[^\s/\\:*?"'`<>|(),;=\[\]{}]+"""
# What follows a name, a number or a closing bracket is a quotient or a name with a slash in it; two slashes after
# "https:" begin a URL. Relative paths are those with a dot for a folder.
_PATH = re.compile(
    rf"""
    (?<![\w.\-/\\~)\]]) (?<!http:) (?<!https:) (?!//\d)
    (?: [/\\]{{2,4}} [?.] (?=[/\\]) )?
    (?: ~[\w.\-]* | [/\\]*[A-Za-z]: | (?:[\w.\-]+[/\\]+)*? \.{{1,2}} (?=[/\\]) )?
    [/\\]+ (?: {_DIRECTORY} [/\\]+ )* (?: {_LAST} )?
    """,
    re.VERBOSE,
)
# A home folder's name is a person's, which may be several words.
_HOME = re.compile(r"[/\\](?:home|Users)[/\\]+[^/\\]*[/\\]*\Z", re.IGNORECASE)
_MORE_NAMES = re.compile(r"(?:[ ][A-Z][\w.\-]*)*")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{5,}")

_PRIVATE_SETTINGS = frozenset(
    ("_name_or_path", "name_or_path", "_commit_hash", "auto_map", "id2label", "label2id", "task_specific_params")
)
_PUBLIC_TEXTS = frozenset(
    (
        *("architectures", "model_type", "transformers_version", "dtype", "torch_dtype"),
        *("hidden_act", "hidden_activation", "activation_function", "summary_type", "position_embedding_type"),
        *("layer_types", "mlp_layer_types", "rope_type", "type", "attention_types", "attention_layers"),
        *("quant_method", "fmt", "bnb_4bit_compute_dtype", "bnb_4bit_quant_type"),
    )
)
"""Settings of a model's config whose text names a class, a function or a kind, and nobody's files."""


def scrub_text(text: str) -> str:
    """``text`` with the last component instead of every path: POSIX, Windows, UNC, ``file:`` and relative with dots.

    Home folders become ``~``. A relative path without a dot cannot be told from a name with a slash and stays.
    """
    text = _with_short_home(text)
    parts, end = [], 0
    for found in _PATH.finditer(text):
        if found.start() < end:
            continue
        parts.append(text[end : found.start()])
        end = found.end()
        if _HOME.search(found.group()):
            parts.append("~")
            end = _end_of_names(text, end)
        else:
            parts.append(_last_component(found.group()))
    return "".join((*parts, text[end:]))


def _with_short_home(text: str) -> str:
    """``text`` with ``~`` for this user's home, which may have characters that end a path in other texts."""
    home = Path.home()
    if len(home.parts) < 2:
        return text
    return re.sub(rf"{re.escape(str(home))}(?![\w\-])", "~", text)


def _end_of_names(text: str, begin: int) -> int:
    found = _MORE_NAMES.match(text, begin)
    return begin if found is None else found.end()


def _last_component(path: str) -> str:
    """Of a path that ends with a slash the last folder; nothing of one that is only slashes but these."""
    return re.split(r"[/\\]+", path.rstrip("/\\"))[-1] or path


def scrub_data(data: Any) -> Any:
    """Plain data with every text in it scrubbed; keys of mappings stay."""
    if isinstance(data, str):
        return scrub_text(data)
    if isinstance(data, Mapping):
        return {key: scrub_data(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [scrub_data(value) for value in data]
    return data


def scrub_model_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A model's config.json, and those nested in it, without where it came from.

    Numbers stay; text stays in the settings that are known to have no private one, and others are left out whole.
    """
    kept: dict[str, Any] = {}
    for name, value in config.items():
        if name in _PRIVATE_SETTINGS:
            continue
        if isinstance(value, Mapping):
            kept[name] = scrub_model_config(value)
        elif name in _PUBLIC_TEXTS or not _has_text(value):
            kept[name] = scrub_data(value)
    return kept


def _has_text(value: Any) -> bool:
    """Whether there is text in ``value``, or a mapping, whose keys are text."""
    if isinstance(value, (list, tuple)):
        return any(map(_has_text, value))
    return isinstance(value, (str, Mapping))


def scrub_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """``findings`` without paths, and with numbers instead of addresses, equal ones for equal addresses."""
    numbers: dict[int, int] = {}

    def numbered(found: re.Match[str]) -> str:
        return f"address {numbers.setdefault(int(found.group(), 16), len(numbers) + 1)}"

    def scrubbed(value: Any) -> Any:
        return _ADDRESS.sub(numbered, scrub_text(value)) if isinstance(value, str) else value

    return tuple(
        Finding(**{field.name: scrubbed(getattr(finding, field.name)) for field in fields(Finding)})
        for finding in findings
    )
