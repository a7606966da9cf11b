"""``compiled-engine-debug bundle``: a recording and what belongs to it as one file for a bug report."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_engine.cli.common import EXIT_OK
from compiled_engine.cli.options import add_debug_option
from compiled_engine.errors import ConfigError

if TYPE_CHECKING:
    from compiled_engine.models import ModelFiles
    from compiled_engine_debug.recording import Recording

_EPILOG = """\
The file holds the recording, the model's config and the findings, with every address as a region of memory and an
offset, and with the last component of every path. It holds no prompt, no token and no weight that was not asked for.
Of the model's config it keeps numbers, and text only in settings that name classes, functions and kinds. `replay` runs
it again; `report`, `diff`, `padding`, `memory` and `startup` read it as they read a recording.

examples:
  compiled-engine-debug bundle run.jsonl -o report.zip --model path/to/model --findings audit.json
  compiled-engine-debug bundle run.jsonl -o report.zip --model path/to/model --with-weights
"""


def add_command(commands: Any) -> None:
    """Add the subcommand's parser to ``commands``."""
    parser = commands.add_parser(
        "bundle",
        help="put a recording into one file for a bug report",
        description="Put a recording, findings and the model's shapes into one file for a bug report.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_run)
    parser.add_argument("recording", metavar="RECORDING", type=Path, help="what `record`, or record=FILE, wrote")
    parser.add_argument("-o", "--out", required=True, metavar="ZIP", type=Path, help="the bundle, which is replaced")
    parser.add_argument("--model", metavar="MODEL", help="the recorded model, whose config `replay` needs")
    parser.add_argument(
        "--findings", metavar="JSON", type=Path, help="what `audit --json` printed or `bisect --json` wrote"
    )
    parser.add_argument("--with-weights", action="store_true", help="put the weights of --model in")
    parser.add_argument("--with-prompts", metavar="FILE", type=Path, help="put this text file in")
    add_debug_option(parser)


def _run(arguments: argparse.Namespace) -> int:
    from compiled_engine.models import find_model
    from compiled_engine_debug.bundle import write_bundle
    from compiled_engine_debug.findings import read_findings
    from compiled_engine_debug.recording import read_recording

    if arguments.with_weights and arguments.model is None:
        raise ConfigError("--with-weights puts the weights of --model in: give --model too")
    recording = read_recording(arguments.recording)
    findings = None if arguments.findings is None else read_findings(arguments.findings)
    files = None if arguments.model is None else find_model(arguments.model)
    write_bundle(
        arguments.out,
        recording,
        model_config=None if files is None else _model_config(files, recording),
        findings=findings,
        prompts=None if arguments.with_prompts is None else _text(arguments.with_prompts),
        weight_files=files.weight_files if files is not None and arguments.with_weights else (),
    )
    if files is None:
        print("[compiled-engine-debug] without --model, `replay` cannot run it", file=sys.stderr)
    print(f"{arguments.out}: {len(recording.steps)} steps, {arguments.out.stat().st_size} bytes")
    return EXIT_OK


def _model_config(files: ModelFiles, recording: Recording) -> dict[str, Any]:
    """The config.json of ``files``. Raises ``ConfigError`` if it is not that of the recorded model."""
    path = files.folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        architecture = (config.get("architectures") or [None])[0]
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read as a JSON object: {error}") from error
    model = recording.header.model
    if model is not None and (architecture, config.get("vocab_size")) != (model.architecture, model.vocab_size):
        raise ConfigError(
            f"--model is a {architecture} with {config.get('vocab_size')} tokens, and a {model.architecture} with "
            f"{model.vocab_size} was recorded: give the model that was recorded"
        )
    return dict(config)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--with-prompts {path} cannot be read as text: {error}") from error
