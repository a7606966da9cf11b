"""``compiled-engine-debug padding``: what padding costs, and the capture sizes that would cost least."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_engine.cli.common import EXIT_OK
from compiled_engine.errors import ConfigError
from compiled_engine_debug.arguments import positive_number

if TYPE_CHECKING:
    from compiled_engine_debug.capture_sizes import Mismatch, Replayed, SizeOption
    from compiled_engine_debug.padding import Padding

_EPILOG = """\
Every recorded step is replayed with the sizes that were captured, with the best list of as many sizes, and with powers
of two. A step is padded to the smallest size that holds it; one above the largest runs eagerly, without padding. The
best list is exact: no other list of as many sizes pads these steps less.

On a GPU one list serves decode steps (sizes are requests) and all others (tokens), and is chosen for both together; the
engine captures max_num_seqs for decode steps too. --what looks at one kind only; the option sets the list of both. On a
TPU token and request buckets are lists of their own.

examples:
  compiled-engine-debug padding run.jsonl
  compiled-engine-debug padding run.jsonl --sizes 8 --max 256
  compiled-engine-debug padding run.jsonl --list 1,2,4,8 --list 4,8,16 --what requests
  compiled-engine-debug padding run.jsonl --json
"""


def add_command(commands: Any) -> None:
    """Add the subcommand's parser to ``commands``."""
    parser = commands.add_parser(
        "padding",
        help="show what padding costs, and propose better capture sizes",
        description="Show what padding costs, and propose the capture sizes that would cost least.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_run)
    parser.add_argument("file", type=Path, metavar="FILE", help="a recording or a bundle")
    parser.add_argument(
        "--sizes", type=positive_number, metavar="N", help="propose so many sizes (default: as many as were captured)"
    )
    parser.add_argument(
        "--max", type=positive_number, metavar="N", help="propose no larger size; larger steps run eagerly"
    )
    parser.add_argument(
        "--list", type=_numbers, action="append", default=[], metavar="N,N,...", help="replay this list too"
    )
    parser.add_argument("--what", choices=("tokens", "requests"), help="only steps whose sizes are these")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _run(arguments: argparse.Namespace) -> int:
    from compiled_engine_debug.capture_sizes import compare_lists, mismatches, size_options
    from compiled_engine_debug.runs import read_run

    recording = read_run(arguments.file)
    options = size_options(recording, arguments.what)
    if not options:
        what = f"steps measured in {arguments.what}" if arguments.what else "steps that a graph could serve"
        raise ConfigError(f"{arguments.file} has no {what}: record a run that answers requests")
    results = []
    for option in options:
        _check_lists(option, arguments.list)
        lists = compare_lists(option, arguments.sizes, arguments.max, arguments.list)
        results.append((option, lists, mismatches(recording, option)))
    if arguments.json:
        print(json.dumps([_as_json(*result) for result in results], indent=1))
    else:
        for result in results:
            _print_result(*result)
    return EXIT_OK


def _print_result(option: SizeOption, lists: Sequence[Replayed], differing: Sequence[Mismatch]) -> None:
    from compiled_engine_debug.tables import columns, print_table

    names = ("list", "kind", "steps", "eager", "real", "padded", "wasted", "wasted %")
    print_table(f"Padding by {option.name}", columns(*names, right=names[2:]), _rows(option, lists))
    for replayed in lists:
        print(f"{replayed.name} ({len(replayed.sizes)}): {','.join(map(str, replayed.sizes)) or 'none'}")
    for mismatch in differing:
        print(_sentence(mismatch))
    if not differing and option.recorded:
        print("The recorded list, replayed, gives the padding that the recording shows, in every step.")
    print(f"\nTo capture the proposed list: {option.text(_proposed(lists).sizes)}\n")


def _rows(option: SizeOption, lists: Sequence[Replayed]) -> list[list[str]]:
    rows = []
    for replayed in lists:
        for demand, padding in zip(option.demands, replayed.paddings, strict=True):
            rows.append([replayed.name, f"{demand.kind} ({demand.unit})", *_cells(padding)])
        if len(option.demands) > 1:
            rows.append([replayed.name, "all", *_cells(replayed.total)])
    return rows


def _cells(padding: Padding) -> list[str]:
    numbers = (padding.num_steps, padding.num_eager, padding.num_real, padding.num_padded, padding.num_wasted)
    return [*map(str, numbers), f"{100 * padding.share:.2f}"]


def _sentence(mismatch: Mismatch) -> str:
    why = f" ({mismatch.reason})" if mismatch.reason else ""
    return (
        f"{mismatch.num_steps} step(s), {mismatch.kind}, were padded otherwise than the captured sizes say, the first "
        f"is step {mismatch.step}: {mismatch.unpadded} ran as {mismatch.recorded}, not {mismatch.replayed}{why}"
    )


def _as_json(option: SizeOption, lists: Sequence[Replayed], differing: Sequence[Mismatch]) -> dict[str, Any]:
    return {
        "option": option.name,
        "proposed": option.text(_proposed(lists).sizes),
        "lists": [
            {
                "name": replayed.name,
                "sizes": list(replayed.sizes),
                "kinds": [
                    {"kind": demand.kind, "unit": demand.unit, **_padding_as_json(padding)}
                    for demand, padding in zip(option.demands, replayed.paddings, strict=True)
                ],
                "all": _padding_as_json(replayed.total),
            }
            for replayed in lists
        ],
        "mismatches": [asdict(mismatch) for mismatch in differing],
    }


def _padding_as_json(padding: Padding) -> dict[str, Any]:
    return {**asdict(padding), "num_wasted": padding.num_wasted, "share": padding.share}


def _proposed(lists: Sequence[Replayed]) -> Replayed:
    return next(replayed for replayed in lists if replayed.name == "proposed")


def _check_lists(option: SizeOption, lists: Sequence[tuple[int, ...]]) -> None:
    for sizes in lists:
        if option.limit is not None and sizes[-1] > option.limit:
            raise ConfigError(
                f"--list has {sizes[-1]}, and no step of this recording's engine is above {option.limit}: leave it out"
            )


def _numbers(text: str) -> tuple[int, ...]:
    """Distinct numbers, ascending."""
    return tuple(sorted({positive_number(part) for part in text.split(",")}))
