"""``compiled-engine generate``: prompts in, texts out."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from compiled_engine.cli.common import (
    EXIT_CODES,
    EXIT_OK,
    EXIT_REQUEST_ERROR,
    starting,
    stdout_for_answers_only,
    told_on_stderr,
)
from compiled_engine.cli.options import (
    add_engine_options,
    add_ledger_options,
    check_ledger_file,
    engine_settings,
    show_ledger,
    wants_ledger,
)
from compiled_engine.config import EngineConfig
from compiled_engine.engine.sampling_params import SamplingParams
from compiled_engine.errors import ConfigError

if TYPE_CHECKING:
    from compiled_engine.engine.outputs import RequestOutput
    from compiled_engine.llm import LLM

SEPARATOR = "---"

_EPILOG = f"""\
Prompts are the arguments; or "-" for all of stdin as one prompt; or, without arguments, the lines of stdin
(blank lines are skipped). The texts are printed in the order of the prompts. Between the texts of several prompts
stands a line "{SEPARATOR}"; a prompt that failed has an empty text in its place. Use --json for output that cannot be
ambiguous.

examples:
  compiled-engine generate --chat "What is the capital of France?"
  compiled-engine generate --temperature 0.8 --top-p 0.95 --seed 7 --max-tokens 64 "Once upon a time"
  compiled-engine generate --json < prompts.txt > answers.jsonl
  cat letter.txt | compiled-engine generate --chat --system "Summarise in one sentence." -

{EXIT_CODES}"""


def add_command(commands: Any) -> None:
    """Add the subcommand's parser to ``commands``."""
    parser = commands.add_parser(
        "generate",
        help="complete prompts, or answer them as a chat",
        description="Complete prompts, or answer them as a chat.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_run)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help='a prompt; "-" reads one from stdin')
    parser.add_argument("--chat", action="store_true", help="put each prompt through the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message of each chat (needs --chat)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per prompt and line")
    parser.add_argument("--no-progress", action="store_true", help="no start-up messages and no progress bar")
    add_ledger_options(parser)
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default 0)")
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="X", help="mass of the most likely tokens that are kept"
    )
    group.add_argument(
        "--top-k", type=int, default=0, metavar="N", help="number of most likely tokens kept; 0 keeps all"
    )
    group.add_argument(
        "--min-p", type=float, default=0.0, metavar="X", help="least share of the best token's probability"
    )
    group.add_argument("--max-tokens", type=int, default=256, metavar="N", help="most new tokens (default 256)")
    group.add_argument("--min-tokens", type=int, default=0, metavar="N", help="no stop before so many new tokens")
    group.add_argument("--seed", type=int, metavar="N", help="makes sampled texts repeatable")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="ends the text before TEXT (repeatable)"
    )
    group.add_argument(
        "--stop-token-id", type=int, action="append", default=[], metavar="ID", help="ends the text (repeatable)"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end-of-sequence tokens")
    group.add_argument("--include-stop", action="store_true", help="leave the stop text in the output")
    group.add_argument("--keep-special-tokens", action="store_true", help="leave special tokens in the text")
    group.add_argument("--logprobs", type=int, metavar="N", help="with --json: log-probabilities of the N best tokens")
    add_engine_options(parser)


def _run(arguments: argparse.Namespace) -> int:
    settings = engine_settings(arguments)
    EngineConfig(**settings)
    params = SamplingParams(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        max_tokens=arguments.max_tokens,
        min_tokens=arguments.min_tokens,
        seed=arguments.seed,
        stop=arguments.stop,
        stop_token_ids=arguments.stop_token_id,
        ignore_eos=arguments.ignore_eos,
        include_stop_str_in_output=arguments.include_stop,
        skip_special_tokens=not arguments.keep_special_tokens,
        logprobs=arguments.logprobs,
    )
    if arguments.system is not None and not arguments.chat:
        raise ConfigError("--system needs --chat: a plain prompt has no system message")
    if arguments.logprobs is not None and not arguments.json:
        raise ConfigError("--logprobs needs --json: plain text has no place for them")
    check_ledger_file(arguments)
    prompts = read_prompts(arguments.prompts)
    with stdout_for_answers_only(), told_on_stderr(not arguments.no_progress), _start(settings) as llm:
        progress = sys.stderr.isatty() and not arguments.no_progress
        if arguments.chat:
            system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
            outputs = llm.chat([[*system, {"role": "user", "content": prompt}] for prompt in prompts], params, progress)
        else:
            outputs = llm.generate(prompts, params, progress)
    _print_answers(prompts, outputs, arguments.json)
    failed = [(index, output.error) for index, output in enumerate(outputs, 1) if output.error is not None]
    for index, message in failed:
        print(f"compiled-engine: prompt {index}: {message}", file=sys.stderr)
    if wants_ledger(arguments):
        show_ledger(arguments, llm.ledger)
    return EXIT_REQUEST_ERROR if failed else EXIT_OK


def read_prompts(given: Sequence[str]) -> list[str]:
    """The prompts that ``given`` stands for: see --help. Raises ``ConfigError`` where there is none."""
    if given.count("-") > 1:
        raise ConfigError('"-" stands for all of stdin and can be given only once')
    try:
        if given:
            return [sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt for prompt in given]
        if sys.stdin is None or sys.stdin.isatty():
            raise ConfigError(
                'no prompt: give one as an argument, or prompts on stdin, one per line (see "generate --help")'
            )
        prompts = [line.rstrip("\r\n") for line in sys.stdin if line.strip()]
    except UnicodeDecodeError as error:
        raise ConfigError(f"stdin is not valid {error.encoding} text (byte {error.start}): convert it first") from error
    if not prompts:
        raise ConfigError("no prompt: stdin holds no line with text")
    return prompts


@contextlib.contextmanager
def _start(settings: dict[str, Any]) -> Iterator[LLM]:
    with starting():
        from compiled_engine.llm import LLM

        llm = LLM(**settings)
    with llm:
        yield llm


def _print_answers(prompts: Sequence[str], outputs: Sequence[RequestOutput], as_json: bool) -> None:
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")  # a terminal that knows fewer characters than the model must not lose the answer
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        if as_json:
            print(json.dumps(_as_json(prompt, output), ensure_ascii=False))
            continue
        if index:
            print(SEPARATOR)
        print(output.outputs[0].text)
    sys.stdout.flush()


def _as_json(prompt: str, output: RequestOutput) -> dict[str, Any]:
    completion = output.outputs[0]
    result: dict[str, Any] = {
        "prompt": prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "error": output.error,
    }
    if completion.logprobs is not None:
        result["logprobs"] = completion.logprobs
    return result
