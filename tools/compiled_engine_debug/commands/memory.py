"""``compiled-engine-debug memory``: where the memory of a recorded engine went."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_engine.cli.common import EXIT_OK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compiled_engine_debug.memory import MemoryReport, Tensor

_EPILOG = """\
"recorded" is the engine's own sum, "counted" that of the single records, where what lies at one address counts once.
Graphs share their memory: of each key, the bytes are what it grew by when the key was captured, largest keys first.
Workspaces are counted as far as captured graphs use them.

examples:
  compiled-engine-debug memory run.jsonl
  compiled-engine-debug memory run.jsonl --top 50
  compiled-engine-debug memory run.jsonl --json
"""
_DEFAULT_TOP = 15


def add_command(commands: Any) -> None:
    """Add the subcommand's parser to ``commands``."""
    parser = commands.add_parser(
        "memory",
        help="show where memory went",
        description="Show the bytes of weights, caches, graphs and workspaces, and how the sums agree.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_run)
    parser.add_argument("file", type=Path, metavar="FILE", help="a recording or a bundle")
    parser.add_argument(
        "--top",
        type=int,
        default=_DEFAULT_TOP,
        metavar="N",
        help="so many weights, graphs and buffers (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with everything, instead of tables")


def _run(arguments: argparse.Namespace) -> int:
    from compiled_engine_debug.memory import report_memory
    from compiled_engine_debug.runs import read_run

    report = report_memory(read_run(arguments.file))
    if arguments.json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        _print_sums(report)
        _print_pieces(report, max(0, arguments.top))
    return EXIT_OK


def _print_sums(report: MemoryReport) -> None:
    from compiled_engine_debug.tables import columns, print_table

    numbers = ("recorded", "counted", "difference")
    rows = [
        (part.name, _bytes(part.recorded), _bytes(part.counted), _bytes(part.difference))
        for part in (*report.parts, report.total)
    ]
    print_table("Memory", columns("part", *numbers, right=numbers), rows)
    numbers = ("expected", "actual", "difference")
    rows = [(e.name, _bytes(e.expected), _bytes(e.actual), _bytes(e.difference)) for e in report.expectations]
    if rows:
        print_table("Expected against actual", columns("what", *numbers, right=numbers), rows)


def _print_pieces(report: MemoryReport, top: int) -> None:
    from compiled_engine_debug.tables import columns, print_table

    if report.groups:
        groups = [
            (
                str(group.group),
                str(group.num_layers),
                _shape(group.shape),
                group.dtype,
                _bytes(group.num_bytes),
                ", ".join(f"{layer} -> {owner}" for layer, owner in group.shared),
            )
            for group in report.groups
        ]
        header = columns("group", "layers", "shape of each", "dtype", "bytes", "shared", right=("layers", "bytes"))
        print_table("KV caches by group", header, groups)
    if report.keys and top:
        keys: list[tuple[str, ...]] = [
            (key.key, str(key.num_graphs), str(key.num_launches), _bytes(key.num_bytes), f"{key.seconds:.3f}")
            for key in report.keys[:top]
        ]
        left = report.keys[top:]
        if left:
            rest = (sum(k.num_graphs for k in left), sum(k.num_launches for k in left))
            size, seconds = sum(k.num_bytes for k in left), sum(k.seconds for k in left)
            keys.append((_more(left), *map(str, rest), _bytes(size), f"{seconds:.3f}"))
        names = ("key", "graphs", "launches", "bytes", "seconds")
        print_table("Graphs by key", columns(*names, right=names[1:]), keys)
    _print_tensors("Weights", report.weights, top)
    _print_tensors("Workspaces and other buffers of graphs", report.buffers, top)


def _print_tensors(title: str, tensors: Sequence[Tensor], top: int) -> None:
    from compiled_engine_debug.tables import columns, print_table

    if not tensors or not top:
        return
    rows = [(t.name, t.dtype, _shape(t.shape), _bytes(t.num_bytes), _bytes(t.own_bytes)) for t in tensors[:top]]
    left = tensors[top:]
    if left:
        sizes = _bytes(sum(t.num_bytes for t in left)), _bytes(sum(t.own_bytes for t in left))
        rows.append((_more(left), "", "", *sizes))
    header = columns("name", "dtype", "shape", "bytes", "of its own", right=("bytes", "of its own"))
    print_table(title, header, rows)


def _more(left: Sequence[object]) -> str:
    return f"and {len(left)} more"


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _bytes(number: int | None) -> str:
    from compiled_engine.compile.ledger import format_bytes

    if number is None:
        return "-"
    return format_bytes(number) if number >= 0 else f"-{format_bytes(-number)}"
