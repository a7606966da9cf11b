"""The whole command: its parser, and how errors become messages and exit codes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from compiled_engine import __version__
from compiled_engine.cli import bindings, generate, graphs, precompile
from compiled_engine.cli.common import EXIT_CODES, run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: that of the process); returns the exit code."""
    return run_command("compiled-engine", build_parser().parse_args(argv))


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command, one subparser per subcommand."""
    parser = argparse.ArgumentParser(
        prog="compiled-engine",
        description="Offline LLM inference with graphs that are captured once by torch.compile.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"compiled-engine {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (generate, precompile, graphs, bindings):
        command.add_command(commands)
    return parser
