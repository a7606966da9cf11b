"""``compiled-engine bindings``: which attention layer gets which cache."""

from __future__ import annotations

import argparse
import json
from typing import Any

from compiled_engine.cli.common import EXIT_OK, starting, stdout_for_answers_only, told_on_stderr
from compiled_engine.cli.options import add_engine_options, add_positional_model, settings_with_model
from compiled_engine.config import EngineConfig

_EPILOG = """\
examples:
  compiled-engine bindings
  compiled-engine bindings path/to/model --kv-cache-memory 1GiB --json
"""


def add_command(commands: Any) -> None:
    """Add the subcommand's parser to ``commands``."""
    parser = commands.add_parser(
        "bindings",
        help="show which attention layer gets which KV cache",
        description="Show which attention layer gets which KV cache, without reading weights or compiling anything.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_run)
    add_positional_model(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_engine_options(parser, leave_out=("record",))


def _run(arguments: argparse.Namespace) -> int:
    config = EngineConfig(**settings_with_model(arguments))
    with stdout_for_answers_only(), told_on_stderr(True), starting():
        from compiled_engine.models import find_model
        from compiled_engine.runners.bindings import describe_bindings

        description = describe_bindings(config, find_model(config.model))
    print(json.dumps(description.to_json(), indent=1) if arguments.json else description)
    return EXIT_OK
