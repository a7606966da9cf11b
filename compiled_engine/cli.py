"""The command ``compiled-engine``. Generated text goes to stdout, everything else to stderr.

Only light modules are imported before the arguments are known, so that ``--help`` and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from compiled_engine import __version__
from compiled_engine.config import EngineConfig
from compiled_engine.engine.sampling_params import SamplingParams
from compiled_engine.errors import CompiledEngineError, ConfigError

if TYPE_CHECKING:
    from compiled_engine.engine.outputs import RequestOutput
    from compiled_engine.llm import LLM

EXIT_OK, EXIT_REQUEST_ERROR, EXIT_USAGE, EXIT_NO_START, EXIT_INTERRUPTED = 0, 1, 2, 3, 130
SEPARATOR = "---"

_EXIT_CODES = """\
exit codes:
  0 every prompt was answered     1 at least one request ended in an error (see stderr)
  2 bad usage or settings         3 the engine could not start         130 interrupted
"""

_GENERATE_EPILOG = f"""\
Prompts are the arguments; or "-" for all of stdin as one prompt; or, without arguments, the lines of stdin
(blank lines are skipped). The texts are printed in the order of the prompts. Between the texts of several prompts
stands a line "{SEPARATOR}"; a prompt that failed has an empty text in its place. Use --json for output that cannot be
ambiguous.

examples:
  compiled-engine generate --chat "What is the capital of France?"
  compiled-engine generate --temperature 0.8 --top-p 0.95 --seed 7 --max-tokens 64 "Once upon a time"
  compiled-engine generate --json < prompts.txt > answers.jsonl
  cat letter.txt | compiled-engine generate --chat --system "Summarise in one sentence." -

{_EXIT_CODES}"""

_BINDINGS_EPILOG = """\
examples:
  compiled-engine bindings
  compiled-engine bindings path/to/model --kv-cache-memory 1GiB --json
"""

# Settings of EngineConfig that have no option of their own: --model is described apart, --seed is the sampling seed,
# and there is one device so far.
_NO_OPTION = ("model", "device", "seed")


class _CannotStart(Exception):
    """The engine could not be built; ``__cause__`` says why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: that of the process); returns the exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED, debug=False)
    except BrokenPipeError:
        # The reader of stdout has gone, as with "| head". Python would complain again when it flushes at exit.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_REQUEST_ERROR
    except ConfigError as error:
        return _fail(str(error), EXIT_USAGE, arguments.debug)
    except _CannotStart as error:
        return _fail(f"the engine could not start: {_describe(error.__cause__)}", EXIT_NO_START, arguments.debug)
    except CompiledEngineError as error:
        return _fail(str(error), EXIT_REQUEST_ERROR, arguments.debug)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command, one subparser per subcommand."""
    parser = argparse.ArgumentParser(
        prog="compiled-engine",
        description="Offline LLM inference with graphs that are captured once by torch.compile.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"compiled-engine {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_generate(commands)
    _add_bindings(commands)
    return parser


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add --model and an option for each setting of ``EngineConfig``; options that are not given leave no attribute."""
    group = parser.add_argument_group("engine")
    for item in dataclasses.fields(EngineConfig):
        if item.name not in _NO_OPTION or item.name == "model":
            _add_field(group, item)
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")


def engine_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given on the command line, by their names in ``EngineConfig``."""
    names = {item.name for item in dataclasses.fields(EngineConfig)} - (set(_NO_OPTION) - {"model"})
    return {name: value for name, value in vars(arguments).items() if name in names}


def _add_field(group: argparse._ArgumentGroup, item: dataclasses.Field[Any]) -> None:
    kinds = str(item.type).replace(" ", "").split("|")
    option: dict[str, Any] = {}
    if "bool" in kinds:
        option["action"] = argparse.BooleanOptionalAction
    elif "str" not in kinds and ("int" in kinds or "float" in kinds):
        option["type"] = int if "int" in kinds else float
        option["metavar"] = "N"
    else:
        option["metavar"] = item.name.rsplit("_", 1)[-1].upper()
    default = "" if item.default is None else f" (default {item.default})"
    group.add_argument(
        "--" + item.name.removeprefix("enable_").replace("_", "-"),
        dest=item.name,
        default=argparse.SUPPRESS,
        help=(item.metadata["doc"] + default).replace("%", "%%"),
        **option,
    )


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="complete prompts, or answer them as a chat",
        description="Complete prompts, or answer them as a chat.",
        epilog=_GENERATE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_generate)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help='a prompt; "-" reads one from stdin')
    parser.add_argument("--chat", action="store_true", help="put each prompt through the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message of each chat (needs --chat)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per prompt and line")
    parser.add_argument("--no-progress", action="store_true", help="no start-up messages and no progress bar")
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


def _add_bindings(commands: Any) -> None:
    parser = commands.add_parser(
        "bindings",
        help="show which attention layer gets which KV cache",
        description="Show which attention layer gets which KV cache, without reading weights or compiling anything.",
        epilog=_BINDINGS_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_bindings)
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="same as --model")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_engine_options(parser)


def _bindings(arguments: argparse.Namespace) -> int:
    settings = engine_settings(arguments)
    if arguments.positional_model is not None:
        if "model" in settings:
            raise ConfigError("the model is named twice, as MODEL and as --model: name it once")
        settings["model"] = arguments.positional_model
    config = EngineConfig(**settings)
    with _stdout_for_answers_only(), _told_on_stderr(True), _starting():
        from compiled_engine.models import find_model
        from compiled_engine.runners.bindings import describe_bindings

        description = describe_bindings(config, find_model(config.model))
    print(json.dumps(description.to_json(), indent=1) if arguments.json else description)
    return EXIT_OK


def _generate(arguments: argparse.Namespace) -> int:
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
    prompts = _read_prompts(arguments.prompts)
    with _stdout_for_answers_only(), _told_on_stderr(not arguments.no_progress), _start(settings) as llm:
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
    return EXIT_REQUEST_ERROR if failed else EXIT_OK


def _read_prompts(given: Sequence[str]) -> list[str]:
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
def _told_on_stderr(wanted: bool) -> Iterator[None]:
    """Show what the engine does while it starts, a line each: compiling takes a while."""
    logger = logging.getLogger("compiled_engine")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("[compiled-engine] %(message)s"))
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.INFO if wanted else logging.WARNING)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """Tell what goes wrong while the engine starts from what goes wrong later."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # whatever the compiler, the file system or a library raises: it did not start
        raise _CannotStart from error


@contextlib.contextmanager
def _start(settings: dict[str, Any]) -> Iterator[LLM]:
    with _starting():
        from compiled_engine.llm import LLM

        llm = LLM(**settings)
    with llm:
        yield llm


@contextlib.contextmanager
def _stdout_for_answers_only() -> Iterator[None]:
    """Send to stderr what libraries and compilers print on stdout in the meantime, also below Python."""
    sys.stdout.flush()
    try:
        saved = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # a process may be started with either of them closed
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


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


def _describe(error: BaseException | None) -> str:
    if isinstance(error, CompiledEngineError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"compiled-engine: {message}", file=sys.stderr)
    return code
