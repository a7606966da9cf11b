"""The command line: what goes to stdout, what to stderr, and the exit codes."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import compiled_engine
import compiled_engine.llm
from compiled_engine import __version__
from compiled_engine.cli import main
from compiled_engine.config import EngineConfig
from compiled_engine.engine.core import Engine
from compiled_engine.engine.tokenizer import Tokenizer
from compiled_engine.errors import ConfigError, ModelError
from compiled_engine.llm import LLM
from fake_runner import BYTE_EOS, BYTE_VOCAB_SIZE, CHAT_TEMPLATE, FakeRunner, byte_tokenizer, expected_tokens


class Started:
    """Stands in for LLM's constructor: notes the settings and answers from the fake runner."""

    def __init__(self) -> None:
        self.settings: list[dict] = []
        self.params: list = []
        self.error: BaseException | None = None
        self.chatter = False
        self.llms: list[LLM] = []

    def __call__(self, **settings):
        self.settings.append(settings)
        if self.chatter:
            print("loading", flush=True)
            os.write(1, b"compiler says hello\n")
        if self.error is not None:
            raise self.error
        runner = FakeRunner(vocab_size=BYTE_VOCAB_SIZE, num_blocks=100, max_model_len=200, max_num_batched_tokens=64)
        tokenizer = Tokenizer(byte_tokenizer(), chat_template=CHAT_TEMPLATE)
        engine = Engine(runner, tokenizer=tokenizer, eos_token_ids=[BYTE_EOS])
        add_request = engine.add_request

        def noting(prompt, params):
            self.params.append(params)
            return add_request(prompt, params)

        engine.add_request = noting
        self.llms.append(LLM.from_engine(engine, EngineConfig(**settings)))
        return self.llms[-1]


@pytest.fixture
def started(monkeypatch):
    stand_in = Started()
    monkeypatch.setattr(compiled_engine.llm, "LLM", stand_in)
    return stand_in


@pytest.fixture
def stdin(monkeypatch):
    def give(text, tty=False):
        stream = io.StringIO(text)
        stream.isatty = lambda: tty
        monkeypatch.setattr(sys, "stdin", stream)

    return give


def text_of(prompt: str, count: int) -> str:
    ids = expected_tokens(list(prompt.encode()), count, vocab_size=BYTE_VOCAB_SIZE, stop_ids=[BYTE_EOS])
    return Tokenizer(byte_tokenizer()).decode(ids)


def run(*arguments) -> int:
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as error:
        return error.code


def test_one_prompt(started, capfd):
    assert run("generate", "abc", "--max-tokens", 5) == 0
    shown = capfd.readouterr()
    assert shown.out == text_of("abc", 5) + "\n"
    assert shown.err == ""
    assert started.llms[0]._closed


def test_several_prompts_are_separated_and_in_order(started, capfd):
    assert run("generate", "abc", "d", "ef", "--max-tokens", 5) == 0
    assert capfd.readouterr().out == "\n---\n".join(text_of(prompt, 5) for prompt in ("abc", "d", "ef")) + "\n"


def test_prompts_from_stdin(started, stdin, capfd):
    stdin("abc\n\nd  \n  \nef")
    assert run("generate", "--json", "--max-tokens", 3) == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["abc", "d  ", "ef"]
    stdin("line 1\nline 2\n")
    assert run("generate", "first", "-", "--json", "--max-tokens", 3) == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["first", "line 1\nline 2"]


def test_json(started, capfd):
    assert run("generate", "é", "", "--json", "--max-tokens", 4, "--ignore-eos", "--logprobs", 2) == 1
    shown = capfd.readouterr()
    good, bad = [json.loads(line) for line in shown.out.splitlines()]
    ids = expected_tokens(list("é".encode()), 4, vocab_size=BYTE_VOCAB_SIZE)
    assert good.pop("text") == Tokenizer(byte_tokenizer()).decode(ids)
    assert len(good.pop("logprobs")) == 4
    assert good == {"prompt": "é", "token_ids": ids, "finish_reason": "length", "stop_reason": None, "error": None}
    assert bad["finish_reason"] == "error"
    assert (bad["text"], bad["token_ids"]) == ("", [])
    assert bad["error"] in shown.err
    assert "prompt 2" in shown.err


def test_failed_prompt_keeps_its_place(started, capfd):
    assert run("generate", "a", "", "b", "--max-tokens", 2) == 1
    shown = capfd.readouterr()
    assert shown.out == f"{text_of('a', 2)}\n---\n\n---\n{text_of('b', 2)}\n"
    assert shown.err == "compiled-engine: prompt 2: the prompt is empty: give at least one character\n"


def test_chat(started, capfd):
    assert run("generate", "--chat", "--system", "be brief", "hi", "--max-tokens", 4) == 0
    assert capfd.readouterr().out == text_of("system: be brief\nuser: hi\nassistant: ", 4) + "\n"


def test_sampling_options_reach_the_parameters(started, capfd):
    options = (
        "--temperature 0.5 --top-p 0.9 --top-k 7 --min-p 0.1 --max-tokens 9 --min-tokens 2 --seed 4 --stop x --stop yy"
    )
    options += " --stop-token-id 3 --stop-token-id 4 --ignore-eos --include-stop --keep-special-tokens"
    assert run("generate", "a", *options.split()) == 0
    (params,) = started.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.max_tokens, params.min_tokens, params.seed) == (9, 2, 4)
    assert (params.stop_strings, params.stop_ids) == (("x", "yy"), (3, 4))
    assert (params.ignore_eos, params.include_stop_str_in_output, params.skip_special_tokens) == (True, True, False)


def test_defaults(started):
    assert run("generate", "a") == 0
    assert (started.params[0].temperature, started.params[0].max_tokens, started.params[0].seed) == (0, 256, None)
    assert started.settings == [{}]


def test_engine_options_reach_the_settings(started):
    options = (
        "--model m --dtype float32 --max-model-len 9 --max-num-seqs 2 --max-num-batched-tokens 3 --block-size 4 "
        "--kv-cache-memory 5MiB --piece-compiler eager --num-threads 1 --graphs g --no-store --require-precompiled "
        "--on-compile warn"
    )
    assert run("generate", "a", *options.split()) == 0
    assert started.settings == [
        {
            "model": "m",
            "dtype": "float32",
            "max_model_len": 9,
            "max_num_seqs": 2,
            "max_num_batched_tokens": 3,
            "block_size": 4,
            "kv_cache_memory": "5MiB",
            "piece_compiler": "eager",
            "num_threads": 1,
            "graphs": "g",
            "store": False,
            "require_precompiled": True,
            "on_compile": "warn",
        }
    ]


def test_options_of_a_tpu_reach_the_settings(started):
    options = "--backend tpu --token-buckets 16,64 --request-buckets 8 --bucket-gap 32 --gpu-memory-fraction 0.5"
    assert run("generate", "a", *options.split()) == 0
    assert started.settings == [
        {
            "device": "tpu",
            "token_buckets": (16, 64),
            "request_buckets": (8,),
            "bucket_gap": 32,
            "gpu_memory_fraction": 0.5,
        }
    ]


def test_every_setting_has_an_option(capsys):
    assert run("generate", "--help") == 0
    text = capsys.readouterr().out
    for item in dataclasses.fields(EngineConfig):
        if item.name != "seed":
            assert "--" + item.name.removeprefix("enable_").replace("_", "-") in text
    assert "examples:" in text
    assert "exit codes:" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required"),
        (["dance"], "invalid choice"),
        (["generate", "a", "--temperature", "-1"], "temperature is -1.0"),
        (["generate", "a", "--temperature", "nan"], "temperature is nan"),
        (["generate", "a", "--temperature", "warm"], "invalid float"),
        (["generate", "a", "--top-p", "0"], "top_p"),
        (["generate", "a", "--max-tokens", "0"], "max_tokens is 0"),
        (["generate", "a", "--seed", str(2**63)], "seed is"),
        (["generate", "a", "--stop", ""], "empty text"),
        (["generate", "a", "--block-size", "0"], "block_size is 0"),
        (["generate", "a", "--dtype", "int3"], "dtype is 'int3'"),
        (["generate", "a", "--kv-cache-memory", "lots"], "'lots' is not a number of bytes"),
        (["generate", "a", "--on-compile", "shrug"], "on_compile is 'shrug'"),
        (["generate", "a", "--graphs", ""], "graphs is ''"),
        (["generate", "a", "--no-store", "--require-precompiled"], "require_precompiled needs a place"),
        (["generate", "a", "--ledger-json", "/"], "--ledger-json /: give a file"),
        (["generate", "a", "--ledger-json", "/nowhere/x.json"], "--ledger-json /nowhere/x.json: give a file"),
        (["generate", "a", "--backend", "tpu:0"], "device is 'tpu:0': choose one of cpu, cuda, cuda:N, tpu"),
        (["generate", "a", "--backend", "tpu", "--graph-mode", "full"], "XLA compiles whole steps: leave graph_mode"),
        (["generate", "a", "--backend", "tpu", "--quantization", "int8"], "multiplies with plain weights"),
        (["generate", "a", "--token-buckets", "16,x"], "no list of whole numbers"),
        (["generate", "a", "--token-buckets", "16,0"], "one of token_buckets is 0"),
        (["generate", "a", "--request-buckets=-8"], "one of request_buckets is -8"),
        (["generate", "a", "--bucket-gap=-1"], "bucket_gap is -1"),
        (["generate", "a", "--system", "x"], "--system needs --chat"),
        (["generate", "a", "--logprobs", "2"], "--logprobs needs --json"),
        (["generate", "-", "-"], "only once"),
        (["generate", "a", "--unknown"], "unrecognized"),
    ],
)
def test_bad_usage(started, capfd, arguments, message):
    assert run(*arguments) == 2
    shown = capfd.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert started.settings == []


def test_no_prompt(started, stdin, capfd):
    for text, tty in (("", False), ("\n \n", False), ("", True)):
        stdin(text, tty)
        assert run("generate") == 2
        assert "no prompt" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ModelError("model 'x' does not exist"), 3, "could not start: model 'x' does not exist"),
        (OSError("disk full"), 3, "could not start: OSError: disk full"),
        (RuntimeError("g++ not found"), 3, "could not start: RuntimeError: g++ not found"),
        (ConfigError("max_model_len is too large"), 2, "max_model_len is too large"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_start_errors(started, capfd, error, code, message):
    started.error = error
    assert run("generate", "a") == code
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err == f"compiled-engine: {'the engine ' if code == 3 else ''}{message}\n"


def test_debug_shows_the_traceback(started, capfd):
    started.error = ModelError("no such model")
    assert run("generate", "a", "--debug") == 3
    assert "Traceback" in capfd.readouterr().err


def test_interrupted_while_generating(started, monkeypatch, capfd):
    def execute(self, batch):
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeRunner, "execute", execute)
    assert run("generate", "a") == 130
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("", "compiled-engine: interrupted\n")
    assert started.llms[0]._closed


def test_chatter_of_libraries_goes_to_stderr(started, capfd):
    started.chatter = True
    assert run("generate", "abc", "--max-tokens", 5) == 0
    shown = capfd.readouterr()
    assert shown.out == text_of("abc", 5) + "\n"
    assert "loading" in shown.err
    assert "compiler says hello" in shown.err


def test_ledger_goes_to_stderr_and_into_a_file(started, capfd, tmp_path):
    file = tmp_path / "ledger.json"
    assert run("generate", "abc", "--max-tokens", 5, "--ledger", "--ledger-json", file) == 0
    shown = capfd.readouterr()
    assert shown.out == text_of("abc", 5) + "\n"
    data = json.loads(file.read_text())
    assert data == started.llms[0].ledger.to_json()
    (phase,) = data["phases"]
    assert phase["name"] == "first token"
    for text in ("phase", "first token", f"{phase['seconds']:.3f}", "total"):
        assert text in shown.err
    assert run("generate", "abc", "--max-tokens", 5) == 0
    assert "first token" not in capfd.readouterr().err


def test_ledger_file_that_cannot_be_written(started, capfd, tmp_path, monkeypatch):
    def write_text(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_text)
    assert run("generate", "abc", "--max-tokens", 5, "--ledger-json", tmp_path / "x") == 2
    shown = capfd.readouterr()
    assert shown.out == text_of("abc", 5) + "\n"
    assert "No space left on device" in shown.err


def test_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"compiled-engine {__version__}\n"


def test_help_and_mistakes_import_nothing_heavy():
    code = (
        "import sys; from compiled_engine.cli import main\n"
        "for arguments in (['generate', '--help'], ['precompile', '--help'], ['graphs', 'explain', '--help'],\n"
        "                  ['generate', 'a', '--top-p', '7'], ['precompile', '--dtype', 'int3']):\n"
        "    try: main(arguments)\n"
        "    except SystemExit: pass\n"
        "sys.exit(sum(m in sys.modules for m in ('torch', 'transformers', 'tokenizers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_module_is_the_command():
    result = subprocess.run([sys.executable, "-m", "compiled_engine", "--version"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, f"compiled-engine {__version__}\n")


def test_broken_pipe_is_quiet(tmp_path):
    """A reader that goes away, as "| head" does, causes no traceback."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, compiled_engine.cli as cli, compiled_engine.llm\n"
        "from compiled_engine.engine.outputs import CompletionOutput, RequestOutput\n"
        "class LLM:\n"
        "    def __init__(self, **_): pass\n"
        "    def __enter__(self): return self\n"
        "    def __exit__(self, *_): pass\n"
        "    def generate(self, prompts, *_):\n"
        "        answers = [CompletionOutput(0, 'x' * 500_000, [1], 'length')]\n"
        "        return [RequestOutput('0', 'a', [1], answers) for _ in prompts]\n"
        "compiled_engine.llm.LLM = LLM\n"
        "sys.exit(cli.main(['generate', 'a', 'b']))\n"
    )
    root = str(Path(compiled_engine.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": root},
    )
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(30) == 1
    process.stderr.close()
