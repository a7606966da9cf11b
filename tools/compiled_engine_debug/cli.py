"""The command ``compiled-engine-debug``: its parser, and how errors become messages and exit codes.

Results go to stdout, everything else to stderr. Only light modules are imported before the arguments are known, so that
``--help`` and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from compiled_engine import __version__
from compiled_engine.cli.common import run_command

COMMANDS = ("record", "report", "audit", "bisect", "padding", "memory", "startup", "diff", "bundle", "replay")
"""Names of the modules in ``compiled_engine_debug.commands``, in the order of ``--help``."""

EXIT_OK, EXIT_FINDINGS, EXIT_USAGE, EXIT_NO_START, EXIT_INTERRUPTED = 0, 1, 2, 3, 130

EXIT_CODES = """\
exit codes:
  0 done, and nothing is wrong      1 something was found, or the work failed (see stderr)
  2 bad usage, settings or files    3 the engine could not start                        130 interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: that of the process); returns the exit code."""
    return run_command("compiled-engine-debug", build_parser().parse_args(argv))


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command, one subparser per subcommand."""
    parser = argparse.ArgumentParser(
        prog="compiled-engine-debug",
        description="Debug graph capture: record what the engine does, and find where graphs, caches and numbers "
        "are not what they should be.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"compiled-engine-debug {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"compiled_engine_debug.commands.{name}").add_command(commands)
    return parser
