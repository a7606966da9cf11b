"""``compiled-engine graphs``: what is stored, why a start hits or misses, whether files are sound, and clearing up."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_engine.cli.common import EXIT_OK, starting, stdout_for_answers_only, told_on_stderr
from compiled_engine.cli.options import (
    add_debug_option,
    add_engine_options,
    add_positional_model,
    config_of_stored_graphs,
    engine_settings,
)
from compiled_engine.errors import ConfigError

if TYPE_CHECKING:
    from compiled_engine.compile.key import Difference
    from compiled_engine.compile.store import GraphStore, StoreEntry

EXIT_MISS = EXIT_DAMAGED = 1

_EPILOG = """\
Graphs are kept in $COMPILED_ENGINE_CACHE, else in the user's cache folder; --graphs DIR looks at a bundle instead.

examples:
  compiled-engine graphs list
  compiled-engine graphs explain path/to/model --dtype bfloat16
  compiled-engine graphs verify && echo sound
  compiled-engine graphs clear
"""

_EXPLAIN_EPILOG = """\
KEY is the key of stored graphs, as "graphs list" shows it, or its first digits (six at least). MODEL is a folder, GGUF
file or hub id; the key is then computed from it and the settings above, as a start would do. Neither weights nor the
compiler are loaded.

exit codes:
  0 the graphs are stored     1 they are not: a start would compile     2 bad usage     3 the model cannot be used

examples:
  compiled-engine graphs explain                   the default model with the default settings
  compiled-engine graphs explain path/to/model --dtype bfloat16
  compiled-engine graphs explain path/to/model --graphs bundle --json
"""

_VERIFY_EPILOG = """\
exit codes:
  0 every file is as it was written     1 damaged entries were found; they are named

example:
  compiled-engine graphs verify --graphs bundle
"""

_CLEAR_EPILOG = """\
examples:
  compiled-engine graphs clear               remove everything
  compiled-engine graphs clear 3f2a91        remove one key; its first digits are enough
"""

_NO_STORE = "the graphs cannot be read"
_KEY = re.compile(r"[0-9a-f]{6,64}")
_SHOWN_DIGITS = 16
_SHOWN_TEXT = 96
_SHOWN_DIFFERENCES = 5


def add_command(commands: Any) -> None:
    """Add the subcommand's parser, which has subcommands of its own, to ``commands``."""
    text = "Show, explain, verify and remove stored graphs."
    parser = _parser(commands, "graphs", text, _EPILOG)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    action = _parser(actions, "list", "List the stored graphs, the newest first.", "")
    action.set_defaults(run=_list)
    _add_store_options(action, json_help="print one JSON object per entry and line")

    action = _parser(
        actions, "explain", "Show every component of a key and, for a miss, what differs.", _EXPLAIN_EPILOG
    )
    action.set_defaults(run=_explain)
    add_positional_model(action, "KEY|MODEL", "a stored key, or the same as --model")
    action.add_argument("--json", action="store_true", help="print JSON, with every component in full")
    add_engine_options(action, leave_out=("store", "require_precompiled", "on_compile", "piece_compiler", "record"))

    action = _parser(actions, "verify", "Compare every stored file with its checksum.", _VERIFY_EPILOG)
    action.set_defaults(run=_verify)
    _add_store_options(action)

    action = _parser(actions, "clear", "Remove stored graphs. They are compiled again when needed.", _CLEAR_EPILOG)
    action.set_defaults(run=_clear)
    action.add_argument("keys", nargs="*", metavar="KEY", help="what to remove (default: everything)")
    _add_store_options(action)


def _parser(commands: Any, name: str, text: str, epilog: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text[0].lower() + text[1:].rstrip("."),
        description=text,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def _add_store_options(parser: argparse.ArgumentParser, json_help: str | None = None) -> None:
    parser.add_argument("--graphs", metavar="DIR", help="look at this bundle instead of the store of this user")
    if json_help is not None:
        parser.add_argument("--json", action="store_true", help=json_help)
    add_debug_option(parser)


def _list(arguments: argparse.Namespace) -> int:
    store = _store(arguments.graphs)
    with starting(_NO_STORE):
        entries = store.entries()
    if arguments.json:
        for entry in entries:
            print(json.dumps(_entry_as_json(entry)))
    elif entries:
        header = ("key", "model", "created", "size", "pieces")
        _print_table([header, *(_entry_as_row(entry) for entry in entries)])
    print(f"[compiled-engine] {len(entries)} stored in {store.root}", file=sys.stderr)
    return EXIT_OK


def _explain(arguments: argparse.Namespace) -> int:
    target = arguments.positional_model
    if target is not None and _KEY.fullmatch(target) and not Path(target).exists():
        return _explain_key(_store(engine_settings(arguments).get("graphs")), target, arguments.json)
    config = config_of_stored_graphs(arguments)
    with stdout_for_answers_only(), told_on_stderr(True), starting("the key cannot be computed"):
        from compiled_engine.models import find_model
        from compiled_engine.runners.precompile import lookup, store_for

        key, stored = lookup(config, find_model(config.model))
        store = store_for(config)
        nearest = store.nearest(key) if stored is None else None
    if arguments.json:
        result: dict[str, Any] = {"key": key.digest, "store": str(store.root), "hit": stored is not None}
        result["components"] = dict(key.components)
        result["nearest"] = None if nearest is None else nearest.entry.digest
        differences = () if nearest is None else nearest.differences
        result["differences"] = {item.name: [item.stored, item.wanted] for item in differences}
        print(json.dumps(result, indent=1))
        return EXIT_MISS if stored is None else EXIT_OK
    _print_key(key.digest, store, "hit" if stored is not None else "miss", key.components)
    if nearest is not None:
        print(f"\nThe nearest stored key is {nearest.entry.digest[:_SHOWN_DIGITS]}. It differs in:")
        _print_differences(nearest.differences)
    elif stored is None:
        print("\nNothing is stored there. Fill it with: compiled-engine precompile")
    return EXIT_MISS if stored is None else EXIT_OK


def _explain_key(store: GraphStore, digits: str, as_json: bool) -> int:
    with starting(_NO_STORE):
        found = [entry for entry in store.entries() if entry.digest.startswith(digits)]
    if not found:
        print(f"compiled-engine: {store.root} has no key that begins with {digits}", file=sys.stderr)
        return EXIT_MISS
    for entry in found:
        if as_json:
            print(json.dumps({**_entry_as_json(entry), "components": dict(entry.components)}, indent=1))
        else:
            _print_key(entry.digest, store, "hit", entry.components)
    return EXIT_OK


def _verify(arguments: argparse.Namespace) -> int:
    store = _store(arguments.graphs)
    with starting(_NO_STORE):
        report = store.verify()
    for fault in report.faults:
        print(fault)
    counted = f"{report.num_entries} entries and {report.num_packages} packages in {store.root}"
    unused = f", {len(report.unused)} packages of no entry" if report.unused else ""
    print(f"[compiled-engine] {counted}: {len(report.faults)} faults{unused}", file=sys.stderr)
    return EXIT_DAMAGED if report.faults else EXIT_OK


def _clear(arguments: argparse.Namespace) -> int:
    store = _store(arguments.graphs)
    with starting("the store could not be cleared"):
        digests = [_whole_key(store, digits) for digits in dict.fromkeys(arguments.keys)]
        reports = [store.clear(digest) for digest in dict.fromkeys(digests)] if digests else [store.clear()]
    num_entries, num_bytes = sum(item.num_entries for item in reports), sum(item.num_bytes for item in reports)
    print(f"[compiled-engine] removed {num_entries} entries, {_bytes(num_bytes)}, from {store.root}", file=sys.stderr)
    return EXIT_OK


def _store(bundle: str | None) -> GraphStore:
    from compiled_engine.compile.store import GraphStore
    from compiled_engine.config import default_store_root

    return GraphStore(default_store_root() if bundle is None else Path(bundle))


def _whole_key(store: GraphStore, digits: str) -> str:
    if not _KEY.fullmatch(digits):
        raise ConfigError(f"{digits!r} is no key: give six or more of the digits that `graphs list` shows")
    found = [entry.digest for entry in store.entries() if entry.digest.startswith(digits)]
    if len(found) > 1:
        raise ConfigError(f"{len(found)} keys begin with {digits}: give more digits")
    return found[0] if found else digits


def _entry_as_row(entry: StoreEntry) -> tuple[str, ...]:
    created = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.created))
    return entry.digest[:_SHOWN_DIGITS], entry.class_name, created, _bytes(entry.num_bytes), str(len(entry.packages))


def _entry_as_json(entry: StoreEntry) -> dict[str, Any]:
    return {
        "key": entry.digest,
        "model": entry.class_name,
        "created": entry.created,
        "num_bytes": entry.num_bytes,
        "packages": list(entry.packages),
    }


def _print_key(digest: str, store: GraphStore, state: str, components: Mapping[str, str]) -> None:
    _print_table([("key", digest), ("store", str(store.root)), ("state", state)])
    print()
    _print_table([("component", "value"), *((name, _short(text)) for name, text in components.items())])


def _print_differences(differences: Sequence[Difference]) -> None:
    for item in differences[:_SHOWN_DIFFERENCES]:
        stored, wanted = _around_difference(item.stored, item.wanted)
        print(f"  {item.name}\n    stored  {stored}\n    wanted  {wanted}")
    if len(differences) > _SHOWN_DIFFERENCES:
        print(f"  and {len(differences) - _SHOWN_DIFFERENCES} more: --json shows them all")


def _around_difference(stored: str | None, wanted: str | None) -> tuple[str, str]:
    """Both texts, cut to the part around the first place where they differ."""
    if stored is None or wanted is None:
        return _short(stored), _short(wanted)
    pairs = enumerate(zip(stored, wanted, strict=False))
    same = next((index for index, (a, b) in pairs if a != b), min(len(stored), len(wanted)))
    begin = max(0, same - _SHOWN_TEXT // 2)
    if max(len(stored), len(wanted)) <= _SHOWN_TEXT:
        begin = 0
    before = "..." if begin else ""
    return before + _short(stored[begin:]), before + _short(wanted[begin:])


def _short(text: str | None) -> str:
    if text is None:
        return "(none)"
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN_TEXT else f"{text[: _SHOWN_TEXT - 3]}..."


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _bytes(num_bytes: int) -> str:
    from compiled_engine.compile.ledger import format_bytes

    return format_bytes(num_bytes)
