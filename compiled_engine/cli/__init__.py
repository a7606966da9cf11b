"""The command ``compiled-engine``, one file per subcommand.

Results go to stdout, everything else to stderr, and exit codes tell how it went. Only light modules are imported
before the arguments are known, so that ``--help`` and mistakes answer at once.
"""

from __future__ import annotations

from compiled_engine.cli.command import build_parser, main
from compiled_engine.cli.common import EXIT_INTERRUPTED, EXIT_NO_START, EXIT_OK, EXIT_REQUEST_ERROR, EXIT_USAGE
from compiled_engine.cli.options import add_engine_options, engine_settings

__all__ = [
    "EXIT_INTERRUPTED",
    "EXIT_NO_START",
    "EXIT_OK",
    "EXIT_REQUEST_ERROR",
    "EXIT_USAGE",
    "add_engine_options",
    "build_parser",
    "engine_settings",
    "main",
]
