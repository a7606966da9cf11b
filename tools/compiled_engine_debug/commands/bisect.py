"""``compiled-engine-debug bisect``: the first rung, step, request, layer and node where numbers go wrong."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_engine.cli.common import EXIT_NO_START, EXIT_OK, starting, stdout_for_answers_only, told_on_stderr
from compiled_engine.cli.options import add_engine_options, add_positional_model, settings_with_model
from compiled_engine.errors import ConfigError

if TYPE_CHECKING:
    from compiled_engine.config import EngineConfig
    from compiled_engine.models import ModelFiles
    from compiled_engine_debug.bisect.compare import Measured
    from compiled_engine_debug.bisect.outcome import RungOutcome

EXIT_DIVERGED = 1

_EPILOG = """\
The same prompts are run in ways that come ever closer to captured graphs:
  transformers   the model's own definition with its eager attention, one request at a time: the reference
  eager          the engine's plan, its pieces run operation by operation
  aot_eager      pieces traced by AOTAutograd
  inductor       pieces compiled by Inductor
  aoti           pieces compiled ahead of time
  graphs         steps replayed from captured graphs of their very sizes (emulated on the CPU)
  padding        steps padded to larger captured graphs
Every rung computes the tokens that transformers chose, so one other token hides nothing. Query, key, value and output
of every layer, what its cache holds afterwards, the last hidden states and the logits are compared with the rung below
and with transformers; rows of padding are left out. A difference counts from --tolerance on, relative to the largest
number of the tensor; without it, from what the dtype explains on, or four times the rounding error that transformers
itself has there, measured in a wider dtype. A NaN or infinity that one rung has alone always counts. Where a rung
diverges, its pieces are run operation by operation on the arguments that they had, and the first node that it gets
wrong is named.

exit codes:
  0 every rung that could be tried agrees     1 one diverged or failed     2 bad usage or settings
  3 the model could not be run, or no rung could be judged
A rung is skipped where a tool that it needs is not installed.

examples:
  compiled-engine-debug bisect                                  the default model, all rungs
  compiled-engine-debug bisect path/to/model --rungs eager,inductor,graphs --json ladder.json
  compiled-engine-debug bisect --prompt "The capital of France is" --max-tokens 16 --dtype bfloat16
"""

# What the ladder decides by itself, or has no use for.
_LEFT_OUT = (
    *("piece_compiler", "graphs", "graph_sizes", "max_graph_size", "require_precompiled", "on_compile", "record"),
    *("token_buckets", "request_buckets", "bucket_gap", "enable_prefix_caching"),
)

# Small enough that longer prompts come in chunks and that steps mix chunks with decodes.
_DEFAULT_TOKENS_PER_STEP = 24


def add_command(commands: Any) -> None:
    """Add the subcommand's parser to ``commands``."""
    parser = commands.add_parser(
        "bisect",
        help="find the first rung, layer and node where results diverge",
        description="Run the same prompts from transformers up to padded graph replay, and find where results diverge.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_run)
    add_positional_model(parser)
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="a prompt; may be repeated (default: four of random tokens)"
    )
    parser.add_argument("--max-tokens", type=_count, default=6, metavar="N", help="new tokens per prompt (default 6)")
    parser.add_argument("--rungs", metavar="NAME,NAME", help="run these rungs only; transformers is always the lowest")
    parser.add_argument(
        "--tolerance",
        type=_share,
        metavar="X",
        help="largest difference, relative to a tensor's largest number (default 5e-4 in float32, 1e-2 in float16, "
        "5e-2 in bfloat16, and more where rounding errors are larger)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every rung and finding to FILE as JSON")
    add_engine_options(parser, leave_out=_LEFT_OUT)


def _run(arguments: argparse.Namespace) -> int:
    from compiled_engine_debug.bisect.ladder import Ladder
    from compiled_engine_debug.bisect.rungs import RUNGS, choose_rungs

    rungs = choose_rungs(arguments.rungs.split(",")) if arguments.rungs else RUNGS
    _check_file(arguments.json)
    settings = settings_with_model(arguments)
    with stdout_for_answers_only(), told_on_stderr(False), starting("the model could not be run"):
        from compiled_engine.models import find_model

        files = find_model(settings.get("model"))
        prompts = None if arguments.prompt is None else _token_ids(files, arguments.prompt)
        config = _config(settings, prompts, arguments.max_tokens)
        ladder = Ladder(
            config,
            files,
            _progress,
            prompts=prompts,
            max_tokens=arguments.max_tokens,
            tolerance=arguments.tolerance,
        )
        outcomes = list(ladder.climb(rungs))
    _print_outcomes(outcomes, ladder.tolerance)
    if arguments.json is not None:
        report = {"tolerance": ladder.tolerance, "rungs": [_as_json(outcome) for outcome in outcomes]}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if not any(outcome.is_judged for outcome in outcomes):
        print(
            "compiled-engine-debug bisect: no rung could be judged, so nothing is known (see the notes)",
            file=sys.stderr,
        )
        return EXIT_NO_START
    return EXIT_DIVERGED if any(outcome.is_wrong for outcome in outcomes) else EXIT_OK


def _config(settings: dict[str, Any], prompts: Sequence[Sequence[int]] | None, max_tokens: int) -> EngineConfig:
    """The settings that were given, and for the rest what just holds the prompts."""
    from compiled_engine.config import EngineConfig
    from compiled_engine_debug.bisect.workload import STANDARD_LENGTHS

    lengths = STANDARD_LENGTHS if prompts is None else tuple(map(len, prompts))
    fitting = {
        "max_num_seqs": len(lengths),
        "max_num_batched_tokens": _DEFAULT_TOKENS_PER_STEP,
        "max_model_len": max(lengths) + max_tokens,
    }
    config = EngineConfig(**{**fitting, **settings})
    if config.device_type == "tpu":
        raise ConfigError("device is 'tpu', whose runner has no pieces to compare: choose cpu or cuda")
    longest = max(lengths) + max_tokens
    if config.max_model_len is not None and config.max_model_len < longest:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, and the longest text has {longest} tokens: raise it, or lower "
            "--max-tokens"
        )
    return config


def _token_ids(files: ModelFiles, prompts: Sequence[str]) -> list[list[int]]:
    from compiled_engine.engine.tokenizer import Tokenizer

    if not (files.folder / "tokenizer.json").is_file():
        raise ConfigError("--prompt needs a tokenizer, and the model has no tokenizer.json: leave it out")
    tokenizer = Tokenizer.from_folder(files.folder)
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    if not all(ids):
        raise ConfigError("--prompt is empty: it has no tokens")
    return ids


def _print_outcomes(outcomes: Sequence[RungOutcome], tolerance: float) -> None:
    from compiled_engine_debug.tables import columns, print_table

    header = columns("rung", "result", "compared with", "largest difference", "where", "from transformers", "note")
    print_table(f"Rungs, tolerance {tolerance:g}", header, [_row(outcome) for outcome in outcomes])
    for outcome in outcomes:
        for difference in outcome.tokens:
            print(f"token  {outcome.rung}: {difference}")
    for outcome in outcomes:
        for divergence in outcome.divergences:
            print(divergence.finding())


def _row(outcome: RungOutcome) -> list[str]:
    below, oracle = outcome.from_reference, outcome.from_oracle
    return [
        outcome.rung,
        outcome.verdict.value,
        outcome.reference,
        "" if below is None else str(below.difference),
        "" if below is None or below.difference.relative == 0 else str(below.place),
        "" if oracle is None else str(oracle.difference),
        outcome.note,
    ]


def _as_json(outcome: RungOutcome) -> dict[str, Any]:
    return {
        "rung": outcome.rung,
        "result": outcome.verdict.name.lower(),
        "note": outcome.note,
        "reference": outcome.reference,
        "from_reference": _measured_as_json(outcome.from_reference),
        "from_transformers": _measured_as_json(outcome.from_oracle),
        "tokens": [asdict(item) for item in outcome.tokens],
        "findings": [item.finding().to_json() for item in outcome.divergences],
        "seconds": outcome.seconds,
    }


def _measured_as_json(measured: Measured | None) -> dict[str, Any] | None:
    """JSON has no infinity: the difference of a NaN or infinity is null, and ``not_finite`` names it."""
    if measured is None:
        return None
    place, found = measured.place, measured.difference
    return {
        "step": place.step,
        "request": place.request,
        "layer": place.site.layer,
        "tensor": place.site.tensor.value,
        "relative": found.relative if math.isfinite(found.relative) else None,
        "scale": found.scale,
        "not_finite": found.not_finite,
    }


def _check_file(path: Path | None) -> None:
    """Raise ``ConfigError`` if --json cannot be written, before minutes are spent."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"--json {path}: give a file in a folder that exists")


def _progress(what: str, done: int, total: int) -> None:
    if done < total:
        print(f"[bisect] {what}: {done + 1} of {total}", file=sys.stderr, flush=True)


def _count(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return number


def _share(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not (math.isfinite(number) and number >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 0")
    return number
