"""``compiled-engine-debug audit``: run a workload and look for what graph capture gets wrong."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from compiled_engine.cli.common import starting, stdout_for_answers_only, told_on_stderr
from compiled_engine.cli.options import add_engine_options, add_positional_model, settings_with_model
from compiled_engine.config import EngineConfig

if TYPE_CHECKING:
    from compiled_engine_debug.audit.session import AuditReport

_EPILOG = """\
examples:
  compiled-engine-debug audit
  compiled-engine-debug audit path/to/model --graph-mode full --json
  compiled-engine-debug audit --detectors address-changed,slot-outside-mapping

exit codes:
  0 nothing was found     1 something was found     2 bad usage or settings     3 the engine could not start
"""

_DEFAULTS: dict[str, Any] = {
    "graph_mode": "full_and_piecewise",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "graph_sizes": (2, 4, 8, 32),
}
"""Small caches and few graphs: an audit reads every cache slot twice in every step. Not on a TPU, and not for settings
that were given."""


def add_command(commands: Any) -> None:
    """Add the subcommand's parser to ``commands``."""
    parser = commands.add_parser(
        "audit",
        help="run a workload and look for stale addresses, stray cache writes, leaking padding and more",
        description="Run a small workload and look before, inside and after every step for faults of graph capture and "
        "cache binding. On the CPU, graphs are emulated, with everything that can go wrong with them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_run)
    add_positional_model(parser)
    parser.add_argument("--detectors", metavar="A,B,...", help="look for these only (default: all)")
    parser.add_argument("--strict", action="store_true", help="name graphs that the workload itself did not use")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_engine_options(parser, leave_out=("record",))


def _run(arguments: argparse.Namespace) -> int:
    config = EngineConfig(**audit_settings(settings_with_model(arguments)))
    with stdout_for_answers_only(), told_on_stderr(True):
        from compiled_engine_debug.audit.detectors import make_detectors
        from compiled_engine_debug.audit.session import run_audit
        from compiled_engine_debug.cli import EXIT_FINDINGS, EXIT_OK

        names = None if arguments.detectors is None else [name.strip() for name in arguments.detectors.split(",")]
        detectors = make_detectors(names, strict=arguments.strict)
        with starting("the audit could not be done"):
            report = run_audit(config, detectors)
    if arguments.json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        _show(report)
    return EXIT_FINDINGS if report.findings else EXIT_OK


def audit_settings(given: dict[str, Any]) -> dict[str, Any]:
    """``given`` settings, and small ones for what was not given."""
    if given.get("device") == "tpu":
        return given
    settings = {**_DEFAULTS, **given}
    limits = ("max_num_seqs", "max_num_batched_tokens", "max_graph_size")
    if "graph_sizes" not in given and any(name in given for name in limits):
        del settings["graph_sizes"]
    return settings


def _show(report: AuditReport) -> None:
    from compiled_engine_debug.tables import columns, print_table

    header = columns("detector", "looks", "findings", "what is compared", right=("looks", "findings"))
    rows = [
        (item.name, str(item.looks), str(item.findings), item.about)
        if item.skipped is None
        else (item.name, "-", str(item.findings), f"not checked: {item.skipped}")
        for item in report.detectors
    ]
    print_table(f"Audit of {report.num_steps} steps", header, rows)
    for finding in report.findings:
        print(finding)
