"""``compiled-engine precompile``: capture and compile a model's graphs ahead of its first use, without its weights."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from compiled_engine.cli.common import EXIT_OK, starting, stdout_for_answers_only, told_on_stderr
from compiled_engine.cli.options import (
    add_engine_options,
    add_ledger_options,
    add_positional_model,
    check_ledger_file,
    config_of_stored_graphs,
    show_ledger,
    wants_ledger,
)
from compiled_engine.cli.progress import progress_on_stderr
from compiled_engine.errors import ConfigError

_EPILOG = """\
Two lines go to stdout: the folder that holds the graphs, and their key. Give the same settings here as later: a
setting that can change a graph is part of the key ("compiled-engine graphs explain" shows all of it).

With --out the graphs go into a folder of their own, a bundle. It may be copied to another machine with the same kind
of CPU and the same versions, and run there with "generate --graphs DIR"; nothing is compiled then.

examples:
  compiled-engine precompile
  compiled-engine precompile path/to/model --dtype bfloat16
  compiled-engine precompile --out bundle && compiled-engine generate --graphs bundle --require-precompiled "Hello"
"""

# They say where a run finds its graphs, what it does without them and what is kept of it; and only aoti makes files
# that can be kept.
_LEFT_OUT = ("graphs", "store", "require_precompiled", "on_compile", "piece_compiler", "record")


def add_command(commands: Any) -> None:
    """Add the subcommand's parser to ``commands``."""
    parser = commands.add_parser(
        "precompile",
        help="capture and compile a model's graphs ahead of time",
        description="Capture and compile a model's graphs ahead of time. No weights are loaded.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_run)
    add_positional_model(parser)
    parser.add_argument("--out", metavar="DIR", help="make a bundle in DIR instead of filling the store of this user")
    parser.add_argument("--no-progress", action="store_true", help="no messages and no progress bar")
    add_ledger_options(parser)
    add_engine_options(parser, leave_out=_LEFT_OUT)


def _run(arguments: argparse.Namespace) -> int:
    from compiled_engine.compile.ledger import Ledger

    ledger = Ledger()
    config = config_of_stored_graphs(arguments)
    check_ledger_file(arguments)
    if arguments.out is not None and Path(arguments.out).exists() and not Path(arguments.out).is_dir():
        raise ConfigError(f"--out {arguments.out}: this is a file; give a folder")
    wanted = not arguments.no_progress
    with (
        stdout_for_answers_only(),
        progress_on_stderr(wanted) as progress,
        told_on_stderr(wanted),
        starting("the graphs could not be compiled"),
    ):
        with ledger.phase("imports"):
            from compiled_engine.compile.store import GraphStore
            from compiled_engine.config import default_store_root
            from compiled_engine.models import find_model
            from compiled_engine.runners.precompile import precompile
        with ledger.phase("config and files"):
            files = find_model(config.model)
        store = GraphStore(default_store_root() if arguments.out is None else Path(arguments.out).absolute())
        key = precompile(config, files, store, ledger, progress)
    print(store.root)
    print(key.digest)
    if wants_ledger(arguments):
        show_ledger(arguments, ledger)
    return EXIT_OK
