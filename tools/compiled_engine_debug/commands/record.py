"""``compiled-engine-debug record``: run some work and keep what the engine did."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from compiled_engine.cli.common import EXIT_OK, EXIT_REQUEST_ERROR, starting, stdout_for_answers_only, told_on_stderr
from compiled_engine.cli.generate import read_prompts
from compiled_engine.cli.options import add_engine_options, add_positional_model, settings_with_model
from compiled_engine.compile.recorder import IN_MEMORY
from compiled_engine.config import EngineConfig
from compiled_engine.errors import ConfigError

_EPILOG = """\
Options come first, then MODEL, then prompts; "-" stands for all of stdin as one prompt. Without a prompt a small
workload runs that is the same every time. The file holds no prompt, no text and no token.

examples:
  compiled-engine-debug record -o run.jsonl
  compiled-engine-debug record -o run.jsonl --graph-mode full_and_piecewise path/to/model
  compiled-engine-debug record -o run.jsonl path/to/model "Once upon a time" "The capital of France is"
"""


def add_command(commands: Any) -> None:
    """Add the subcommand's parser to ``commands``."""
    parser = commands.add_parser(
        "record",
        help="run some work and record the start, every step and every compilation",
        description="Run some work and record the start, every step and every compilation.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_run)
    add_positional_model(parser)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a prompt; without one a fixed workload runs")
    parser.add_argument("-o", "--out", required=True, metavar="FILE", help="the recording, which is replaced")
    parser.add_argument("--requests", type=int, default=12, metavar="N", help="size of the workload (default 12)")
    parser.add_argument("--max-tokens", type=int, default=24, metavar="N", help="most new tokens each (default 24)")
    add_engine_options(parser, leave_out=("record",))


def _run(arguments: argparse.Namespace) -> int:
    settings = {**settings_with_model(arguments), "record": _file(arguments.out)}
    EngineConfig(**settings)
    for name in ("requests", "max_tokens"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(arguments, name)}: give at least 1")
    prompts = read_prompts(arguments.prompts) if arguments.prompts else []
    with stdout_for_answers_only(), told_on_stderr(True):
        with starting():
            from compiled_engine.llm import LLM
            from compiled_engine_debug.workload import standard_workload, workload_of

            llm = LLM(**settings)
        with llm:
            if prompts:
                workload = workload_of(prompts, arguments.max_tokens)
            else:
                workload = standard_workload(llm.limits, arguments.requests, arguments.max_tokens)
            outputs = llm.generate(list(workload.prompts), list(workload.params), use_tqdm=False)
    num_steps = 0 if llm.recorder is None else llm.recorder.num_steps
    failed = sum(output.error is not None for output in outputs)
    print(f"{arguments.out}: {num_steps} steps of {len(outputs)} requests, {failed} of them failed")
    return EXIT_REQUEST_ERROR if failed else EXIT_OK


def _file(out: str) -> str:
    """``out`` as a setting, in which one name does not mean a file."""
    return str(Path(out).absolute()) if out == IN_MEMORY else out
