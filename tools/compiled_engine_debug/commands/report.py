"""``compiled-engine-debug report``: a recording as one HTML page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from compiled_engine.cli.common import EXIT_OK

_EPILOG = """\
The page is one file: it loads nothing from elsewhere, so that it can be mailed and kept.

examples:
  compiled-engine-debug report run.jsonl -o report.html
  compiled-engine-debug report cold.jsonl --warm warm.jsonl --audit findings.json -o report.html
"""


def add_command(commands: Any) -> None:
    """Add the subcommand's parser to ``commands``."""
    parser = commands.add_parser(
        "report",
        help="show a recording as one HTML page",
        description="Show a recording as one HTML page: findings, start-up, the model, bindings, steps, keys, memory.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_run)
    parser.add_argument("recording", metavar="FILE", type=Path, help="the recording")
    parser.add_argument("-o", "--output", metavar="HTML", type=Path, required=True, help="the page to write")
    parser.add_argument("--warm", metavar="FILE", type=Path, help="a second recording, whose start is shown beside it")
    parser.add_argument("--audit", metavar="JSON", type=Path, help="findings of an audit, which come first")


def _run(arguments: argparse.Namespace) -> int:
    from compiled_engine_debug.recording import read_recording
    from compiled_engine_debug.report import render_report, write_report
    from compiled_engine_debug.report.findings import read_audit

    audit = None if arguments.audit is None else read_audit(arguments.audit)
    warm = None if arguments.warm is None else read_recording(arguments.warm)
    write_report(arguments.output, render_report(read_recording(arguments.recording), warm, audit))
    print(f"[compiled-engine-debug] wrote {arguments.output}", file=sys.stderr)
    return EXIT_OK
