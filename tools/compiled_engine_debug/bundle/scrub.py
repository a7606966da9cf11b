"""Taking out of texts and configs what tells of the machine that they come from: paths and addresses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from compiled_engine_debug.findings import Finding

# A component ends at white space or at punctuation that does not belong to names of files. What follows a letter, a
# digit or a slash is a quotient, a name with a slash in it or a URL.
_PATH = re.compile(r"""(?<![\w.\-/\\~])(?:~|[A-Za-z]:)?(?:[/\\][^\s/\\:*?"'`<>|(),;=\[\]{}]+)+""")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{5,}")

_PRIVATE_SETTINGS = ("_name_or_path", "name_or_path", "_commit_hash", "auto_map")


def scrub_text(text: str) -> str:
    """``text`` with the last component instead of every absolute path."""
    return _PATH.sub(lambda found: re.split(r"[/\\]", found.group())[-1], text.replace(str(Path.home()), "~"))


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
    """A model's config.json without where it came from."""
    return {key: scrub_data(value) for key, value in config.items() if key not in _PRIVATE_SETTINGS}


def scrub_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """``findings`` without paths, and with numbers instead of addresses, equal ones for equal addresses."""
    numbers: dict[int, int] = {}

    def numbered(found: re.Match[str]) -> str:
        return f"address {numbers.setdefault(int(found.group(), 16), len(numbers) + 1)}"

    return tuple(
        replace(
            finding,
            message=_ADDRESS.sub(numbered, scrub_text(finding.message)),
            node=None if finding.node is None else scrub_text(finding.node),
        )
        for finding in findings
    )
