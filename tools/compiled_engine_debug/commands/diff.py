"""``compiled-engine-debug diff``: in what two starts differ."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_engine.cli.common import EXIT_OK

if TYPE_CHECKING:
    from compiled_engine_debug.diff import Comparison, Difference

EXIT_DIFFERENT = 1

_EPILOG = """\
Compared are versions, settings, the model, attention layers, pieces and passes, weights, caches, declared and captured
graphs, and what each graph uses. Addresses are compared as places: in which layer's cache, or how far from the lowest.
A and B are recordings, bundles, graph plans, or what `compiled-engine graphs explain --json` printed.

"store key" names the component of the key of stored graphs that a difference changes: graphs that were stored under
one of the keys do not serve the other.

exit codes:
  0 no differences     1 there are some     2 bad usage or files

examples:
  compiled-engine-debug diff yesterday.jsonl today.jsonl
  compiled-engine-debug diff good.jsonl bad.jsonl --limit 100
  compiled-engine-debug diff a.jsonl b.jsonl --json && echo the same
"""
_DEFAULT_LIMIT = 20
_SHOWN_TEXT = 100
_ABSENT = "(none)"


def add_command(commands: Any) -> None:
    """Add the subcommand's parser to ``commands``."""
    parser = commands.add_parser(
        "diff",
        help="show in what two starts differ",
        description="Show in what two starts differ, and why graphs of one would not serve the other.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_run)
    parser.add_argument("a", type=Path, metavar="A", help="a recording, or another file; see below")
    parser.add_argument("b", type=Path, metavar="B", help="what to compare it with")
    parser.add_argument(
        "--limit",
        type=int,
        default=_DEFAULT_LIMIT,
        metavar="N",
        help="show so many differences of a kind (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with everything, instead of tables")


def _run(arguments: argparse.Namespace) -> int:
    from compiled_engine_debug.diff import compare
    from compiled_engine_debug.diff_facts import read_contents

    comparison = compare(read_contents(arguments.a), read_contents(arguments.b))
    if arguments.json:
        print(json.dumps(comparison.to_json(), indent=1))
    else:
        _print(comparison, max(0, arguments.limit))
    return EXIT_DIFFERENT if comparison.differences else EXIT_OK


def _print(comparison: Comparison, limit: int) -> None:
    for section, group in groupby(comparison.differences, key=lambda difference: difference.section):
        _print_section(section, list(group), limit)
    for name in comparison.left_out:
        print(f"not compared: {name}, of which only one of the files tells")
    if not comparison.differences:
        print("no differences")
    for line in _reuse(comparison):
        print(line)


def _print_section(section: str, differences: list[Difference], limit: int) -> None:
    from compiled_engine_debug.tables import columns, print_table

    shown = differences[:limit]
    header = ["item", "A", "B"]
    has_component = any(difference.component for difference in shown)
    has_note = any(difference.note for difference in shown)
    header += ["store key"] * has_component + ["where"] * has_note
    rows = []
    for difference in shown:
        row = [difference.item, *_values(difference)]
        row += [difference.component or ""] * has_component + [difference.note or ""] * has_note
        rows.append(row)
    title = section[0].upper() + section[1:]
    if len(differences) > limit:
        title += f": {len(differences)} differences, {limit} of them shown"
    print_table(title, columns(*header), rows)


def _reuse(comparison: Comparison) -> list[str]:
    """Why the graphs that one start stored did not serve the other, as far as the files tell."""
    lines = []
    for letter, contents in (("A", comparison.a), ("B", comparison.b)):
        if contents.lookup is not None:
            lines.append(f"{letter} looked for stored graphs: {contents.lookup}")
    if comparison.components:
        lines.append(f"the keys of stored graphs differ in: {', '.join(comparison.components)}")
    elif "miss" in (comparison.a.lookup, comparison.b.lookup):
        lines.append(
            "nothing here changes the key of stored graphs; sources, CPU, environment and the model's files may: "
            "`compiled-engine graphs explain` shows every component"
        )
    return lines


def _values(difference: Difference) -> tuple[str, str]:
    a, b = _text(difference.a), _text(difference.b)
    if max(len(a), len(b)) <= _SHOWN_TEXT:
        return a, b
    same = next((place for place, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), 0)
    begin = max(0, same - _SHOWN_TEXT // 2)
    return _cut(a, begin), _cut(b, begin)


def _cut(text: str, begin: int) -> str:
    end = begin + _SHOWN_TEXT
    return f"{'...' if begin else ''}{text[begin:end]}{'...' if end < len(text) else ''}"


def _text(value: Any) -> str:
    if value is None:
        return _ABSENT
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(part)}" for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return ",".join(map(_text, value)) or "(empty)"
    return str(value)
