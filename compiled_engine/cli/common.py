"""What all subcommands share: exit codes, where output goes, and telling a failed start from later errors."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Iterator

from compiled_engine.cli.progress import MessagesAndBars
from compiled_engine.errors import CompiledEngineError, ConfigError

EXIT_OK, EXIT_REQUEST_ERROR, EXIT_USAGE, EXIT_NO_START, EXIT_INTERRUPTED = 0, 1, 2, 3, 130

EXIT_CODES = """\
exit codes:
  0 every prompt was answered     1 at least one request ended in an error (see stderr)
  2 bad usage or settings         3 the engine could not start         130 interrupted
"""


class CannotStart(Exception):
    """The work could not be begun; ``__cause__`` says why."""


@contextlib.contextmanager
def starting(what: str = "the engine could not start") -> Iterator[None]:
    """Tell what goes wrong while the engine starts from what goes wrong later."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # whatever the compiler, the file system or a library raises: it did not start
        raise CannotStart(what) from error


@contextlib.contextmanager
def told_on_stderr(wanted: bool) -> Iterator[None]:
    """Show what the engine does while it starts, a line each, on a terminal with bars: compiling takes a while."""
    logger = logging.getLogger("compiled_engine")
    handler = MessagesAndBars(sys.stderr)
    handler.setFormatter(logging.Formatter("[compiled-engine] %(message)s"))
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.INFO if wanted else logging.WARNING)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        handler.end_bars()
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


@contextlib.contextmanager
def stdout_for_answers_only() -> Iterator[None]:
    """Send to stderr what libraries and compilers print on stdout in the meantime, also below Python."""
    sys.stdout.flush()
    try:
        saved = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # a process may be started with either of them closed
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def run_command(program: str, arguments: argparse.Namespace) -> int:
    """Call ``arguments.run(arguments)`` and turn what it raises into a message of ``program`` and an exit code."""
    debug = getattr(arguments, "debug", False)
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        return _fail(program, "interrupted", EXIT_INTERRUPTED, debug=False)
    except BrokenPipeError:
        # The reader of stdout has gone, as with "| head". Python would complain again when it flushes at exit.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_REQUEST_ERROR
    except ConfigError as error:
        return _fail(program, str(error), EXIT_USAGE, debug)
    except CannotStart as error:
        return _fail(program, f"{error}: {_describe(error.__cause__)}", EXIT_NO_START, debug)
    except CompiledEngineError as error:
        return _fail(program, str(error), EXIT_REQUEST_ERROR, debug)


def _describe(error: BaseException | None) -> str:
    if isinstance(error, CompiledEngineError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _fail(program: str, message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"{program}: {message}", file=sys.stderr)
    return code
