"""The whole command: its parser, and how errors become messages and exit codes."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence

from compiled_engine import __version__
from compiled_engine.cli import bindings, generate, graphs, precompile
from compiled_engine.cli.common import (
    EXIT_CODES,
    EXIT_INTERRUPTED,
    EXIT_NO_START,
    EXIT_REQUEST_ERROR,
    EXIT_USAGE,
    CannotStart,
)
from compiled_engine.errors import CompiledEngineError, ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: that of the process); returns the exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED, debug=False)
    except BrokenPipeError:
        # The reader of stdout has gone, as with "| head". Python would complain again when it flushes at exit.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_REQUEST_ERROR
    except ConfigError as error:
        return _fail(str(error), EXIT_USAGE, arguments.debug)
    except CannotStart as error:
        return _fail(f"{error}: {_describe(error.__cause__)}", EXIT_NO_START, arguments.debug)
    except CompiledEngineError as error:
        return _fail(str(error), EXIT_REQUEST_ERROR, arguments.debug)


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


def _describe(error: BaseException | None) -> str:
    if isinstance(error, CompiledEngineError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"compiled-engine: {message}", file=sys.stderr)
    return code
