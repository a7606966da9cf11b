"""What a debugging tool has found wrong: one sentence, and the exact place as data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from compiled_engine.errors import ConfigError

_NEEDED = ("detector", "message")
_LONGEST_SHOWN = 40


@dataclass(frozen=True)
class Finding:
    """One fault. ``detector`` is the stable identifier of what found it; ``message`` says it in one sentence.

    The other fields name the place, as far as it has one: ``step`` counts the steps of the run from 0, ``layer`` is a
    layer's name, ``request`` a request's id, ``slot`` a cache slot (block * block size + offset), ``key`` a graph's
    name, ``node`` anything else that has a name (a weight, an input array, a launch).
    """

    detector: str
    message: str
    step: int | None = None
    layer: str | None = None
    request: str | None = None
    slot: int | None = None
    key: str | None = None
    node: str | None = None

    def to_json(self) -> dict[str, str | int | None]:
        """All fields, as JSON can hold them."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Finding:
        """The finding that ``to_json`` gave, as data. Raises ``ValueError``, which says what is wrong with it."""
        if not isinstance(data, dict):
            raise ValueError(f"a finding is a JSON object, not {_shown(data)}")
        if unknown := sorted(set(data) - {field.name for field in fields(cls)}):
            raise ValueError(f"a finding has no field {unknown[0]!r}")
        for name, value in data.items():
            is_number = name in ("step", "slot")
            # A bool is an int to Python, and no number in JSON.
            is_right = type(value) is (int if is_number else str) or (value is None and name not in _NEEDED)
            if not is_right:
                kind = "whole number" if is_number else "text"
                raise ValueError(f"the field {name!r} of a finding is {_shown(value)}, which is no {kind}")
        if missing := [name for name in _NEEDED if name not in data]:
            raise ValueError(f"a finding has no {missing[0]!r}")
        return cls(**data)

    def __str__(self) -> str:
        return f"{self.detector}: {self.message}"


def read_findings(path: Path) -> tuple[Finding, ...]:
    """The findings in the JSON that ``audit --json`` printed or ``bisect --json`` wrote to ``path``, in its order.

    Raises ``ConfigError`` for another file.
    """
    way_out = "give what audit --json printed or bisect --json wrote"
    try:
        return findings_from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}: {way_out}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: it cannot be read as findings ({error}): {way_out}") from error


def findings_from_json(data: Any) -> tuple[Finding, ...]:
    """The findings in ``data``: a list of them, or the report of an audit or a bisection.

    Raises ``ValueError`` for other data.
    """
    if isinstance(data, dict) and "rungs" in data:
        return tuple(item for rung in _list(data["rungs"], "rungs") for item in _of_report(rung))
    return _of_report(data) if isinstance(data, dict) else _of_list(data)


def _of_report(report: Any) -> tuple[Finding, ...]:
    if not isinstance(report, dict) or "findings" not in report:
        raise ValueError(f"no 'findings' in {_shown(report)}")
    return _of_list(report["findings"])


def _of_list(items: Any) -> tuple[Finding, ...]:
    return tuple(map(Finding.from_json, _list(items, "findings")))


def _list(data: Any, name: str) -> list[Any]:
    if not isinstance(data, list):
        raise ValueError(f"the {name} are {_shown(data)}, which is no list")
    return data


def _shown(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
