"""``compiled-engine-debug replay``: run a bundle's steps again and see whether its findings come back."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_engine.cli.common import EXIT_OK, starting, stdout_for_answers_only, told_on_stderr
from compiled_engine.cli.options import add_engine_options, engine_settings
from compiled_engine_debug.arguments import positive_number

if TYPE_CHECKING:
    from compiled_engine_debug.replay import ReplayReport

_EPILOG = """\
The model has the recorded shapes, and random weights unless the bundle has its own; tokens are random. Settings are
the recorded ones unless given here. Where the recorded device is missing, the CPU emulates its graphs.

A finding reappears where the same detector names the same layer and kind of place. An audit ends at the first step
with findings, so of other findings nothing is known then.

exit codes:
  0 nothing was found     1 a finding reappears, or there is a new one     2 bad usage, settings or files
  3 the engine could not start, or a step failed

examples:
  compiled-engine-debug replay report.zip
  compiled-engine-debug replay report.zip --piece-compiler eager --steps 100 --json
"""
_SHOWN_KEYS = 3


def add_command(commands: Any) -> None:
    """Add the subcommand's parser to ``commands``."""
    parser = commands.add_parser(
        "replay",
        help="run a bundle's steps again and see whether its findings come back",
        description="Run the steps of a bundle again under an audit, and say which of its findings come back.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_run)
    parser.add_argument("bundle", metavar="ZIP", type=Path, help="what `bundle` wrote")
    parser.add_argument("--steps", type=positive_number, metavar="N", help="run the first N recorded steps only")
    parser.add_argument("--replay-seed", type=int, default=0, metavar="N", help="of weights and tokens (default 0)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_engine_options(parser, leave_out=("model", "record", "graphs", "require_precompiled", "dtype"))


def _run(arguments: argparse.Namespace) -> int:
    with stdout_for_answers_only(), told_on_stderr(True):
        from compiled_engine_debug.bundle import read_bundle
        from compiled_engine_debug.cli import EXIT_FINDINGS
        from compiled_engine_debug.replay import Fate, replay

        bundle = read_bundle(arguments.bundle)
        with starting("the replay failed"):
            report = replay(
                bundle,
                overrides=engine_settings(arguments),
                most_steps=arguments.steps,
                seed=arguments.replay_seed,
            )
    if arguments.json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        _show(report, bundle.findings is None)
    is_found = report.with_fate(Fate.REAPPEARS) or report.with_fate(Fate.NEW)
    return EXIT_FINDINGS if is_found else EXIT_OK


def _show(report: ReplayReport, is_without_findings: bool) -> None:
    for note in report.notes:
        print(f"note: {note}")
    print(f"{report.num_replayed} of {report.num_recorded} recorded steps ran again, {report.audit.num_steps} in all")
    if report.other_keys:
        print(f"{len(report.other_keys)} of them ran by another graph than recorded:")
        for item in report.other_keys[:_SHOWN_KEYS]:
            print(f"  step {item.step}: {item.replayed or 'eagerly'}, recorded: {item.recorded or 'eagerly'}")
    if is_without_findings:
        print("the bundle has no findings to compare with")
    for verdict in report.verdicts:
        print(f"{verdict.fate.value}: {verdict.seen or verdict.finding}")
        if verdict.reason is not None:
            print(f"  nothing is known: {verdict.reason}")
    if not report.verdicts:
        print("nothing was found")
