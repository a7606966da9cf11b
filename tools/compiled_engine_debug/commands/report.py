"""``compiled-engine-debug report``: a recording as one HTML page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_engine.cli.common import EXIT_OK
from compiled_engine.config import default_store_root

if TYPE_CHECKING:
    from compiled_engine_debug.findings import Finding
    from compiled_engine_debug.recording import Recording

_EPILOG = """\
The page is one file: it loads nothing from elsewhere, so that it can be mailed and kept. With
--graphs it has generated code, which names folders of the machine that compiled it.

examples:
  compiled-engine-debug report run.jsonl -o report.html
  compiled-engine-debug report cold.jsonl --warm warm.jsonl --findings audit.json -o report.html
  compiled-engine-debug report run.jsonl -o report.html --graphs
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
    parser.add_argument("recording", metavar="FILE", type=Path, help="a recording or a bundle")
    parser.add_argument("-o", "--output", metavar="HTML", type=Path, required=True, help="the page to write")
    parser.add_argument("--warm", metavar="FILE", type=Path, help="a second one, whose start is shown beside it")
    parser.add_argument(
        "--findings",
        metavar="JSON",
        type=Path,
        help="what `audit --json` printed or `bisect --json` wrote, which comes first (default: those of a bundle)",
    )
    parser.add_argument(
        "--graphs",
        metavar="FOLDER",
        type=Path,
        nargs="?",
        const=default_store_root(),
        help="show the generated code of pieces too, out of this store of compiled graphs (default: this user's)",
    )


def _run(arguments: argparse.Namespace) -> int:
    from compiled_engine_debug.findings import read_findings
    from compiled_engine_debug.report import render_report, write_report
    from compiled_engine_debug.report.generated import generated_code
    from compiled_engine_debug.runs import read_run

    recording, found = _run_and_findings(arguments.recording)
    if arguments.findings is not None:
        found = read_findings(arguments.findings)
    warm = None if arguments.warm is None else read_run(arguments.warm)
    generated = None
    if arguments.graphs is not None and recording.plan is not None:
        generated = generated_code(arguments.graphs, recording.plan)
    write_report(arguments.output, render_report(recording, warm, found, generated))
    print(f"[compiled-engine-debug] wrote {arguments.output}", file=sys.stderr)
    return EXIT_OK


def _run_and_findings(path: Path) -> tuple[Recording, tuple[Finding, ...] | None]:
    from compiled_engine_debug.bundle import is_bundle, read_bundle
    from compiled_engine_debug.recording import read_recording

    if not is_bundle(path):
        return read_recording(path), None
    bundle = read_bundle(path)
    return bundle.recording, bundle.findings
