"""LLM on the fake runner: forms of prompts, order, errors, interruption, closing, progress."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.processors import TemplateProcessing

import compiled_engine
import compiled_engine.models
import compiled_engine.runners
from compiled_engine import LLM, EngineConfig, RequestOutput, SamplingParams
from compiled_engine.compile.ledger import Ledger
from compiled_engine.engine.core import Engine
from compiled_engine.engine.tokenizer import Tokenizer
from compiled_engine.errors import ConfigError, EngineStateError, ModelError
from fake_runner import BYTE_EOS, BYTE_VOCAB_SIZE, FakeRunner, byte_tokenizer, expected_tokens, write_byte_model_folder

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
CHAT = "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def make_llm(tokenizer: FastTokenizer | None = None, template: str | None = CHAT, **limits) -> LLM:
    runner = FakeRunner(**{"vocab_size": BYTE_VOCAB_SIZE, "num_blocks": 40, "max_model_len": 60} | limits)
    ours = Tokenizer(tokenizer or byte_tokenizer(), chat_template=template)
    return LLM.from_engine(Engine(runner, tokenizer=ours, eos_token_ids=[BYTE_EOS]))


def answer(prompt, count=6):
    return expected_tokens(
        list(prompt.encode() if isinstance(prompt, str) else prompt), count, vocab_size=BYTE_VOCAB_SIZE
    )


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("ab", ["ab"]),
        ([97, 98], ["ab"]),
        ((97, 98), ["ab"]),
        ({"prompt": "ab"}, ["ab"]),
        ({"prompt_token_ids": [97]}, ["a"]),
        (["ab", "c", "ab"], ["ab", "c", "ab"]),
        ([[97], [98, 99]], ["a", "bc"]),
        (["a", [98], {"prompt": "c"}, {"prompt_token_ids": (100,)}], ["a", "b", "c", "d"]),
        ([], []),
    ],
)
def test_forms_of_prompts(prompts, expected):
    with make_llm() as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert all(isinstance(output, RequestOutput) for output in outputs)
    assert [output.outputs[0].token_ids for output in outputs] == [answer(prompt) for prompt in expected]
    assert [bytes(output.prompt_token_ids).decode() for output in outputs] == expected


def test_outputs_are_in_prompt_order_whatever_ends_first():
    lengths = [9, 1, 5, 2, 7, 1, 3, 8, 4, 6, 2, 9]
    prompts = [f"prompt {i}" for i in range(len(lengths))]
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
    with make_llm(max_num_seqs=3, max_num_batched_tokens=7) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert [output.outputs[0].token_ids for output in outputs] == list(map(answer, prompts, lengths))


def test_bad_prompts_fail_alone():
    bad = ["", "x" * 100, [], [BYTE_VOCAB_SIZE], None, 5, [1, "a"], {"text": "a"}, "\udc80"]
    prompts = ["good", *bad, "fine"]
    with make_llm() as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons == ["length", *["error"] * len(bad), "length"]
    assert all(output.error for output in outputs[1:-1])
    # The caller knows a failed prompt by its text.
    assert [output.prompt for output in outputs] == [p if isinstance(p, str) else None for p in prompts]
    assert [outputs[i].outputs[0].token_ids for i in (0, -1)] == [answer("good"), answer("fine")]


def test_default_parameters():
    with make_llm() as llm:
        (output,) = llm.generate("a", use_tqdm=False)
        (again,) = llm.generate("a", use_tqdm=False)
    assert 1 <= len(output.outputs[0].token_ids) <= 16
    # Without a seed each request draws its own numbers.
    assert output.outputs[0].token_ids != again.outputs[0].token_ids


def test_wrong_calls_are_refused():
    with make_llm() as llm:
        for call, message in [
            (lambda: llm.generate(["a", "b"], [GREEDY]), "1 sampling_params for 2 prompts"),
            (lambda: llm.generate("a", [GREEDY, GREEDY]), "2 sampling_params for 1 prompts"),
            (lambda: llm.generate("a", {"temperature": 0}), "sampling_params is"),
            (lambda: llm.generate("a", ["x"]), "sampling_params is"),
            (lambda: llm.generate(5), "prompts is int"),
            (lambda: llm.generate(b"a"), "prompts is bytes"),
            (lambda: llm.generate(None), "prompts is NoneType"),
            (lambda: llm.chat("hello"), "messages is str"),
            (lambda: llm.chat({"role": "user", "content": "a"}), "messages is dict"),
        ]:
            with pytest.raises(ConfigError, match=message):
                call()
        assert llm.generate("a", GREEDY, use_tqdm=False)[0].error is None


def test_chat():
    one = [{"role": "user", "content": "hi"}]
    two = [{"role": "system", "content": "s"}, {"role": "user", "content": "é"}]
    with make_llm() as llm:
        (output,) = llm.chat(one, GREEDY, use_tqdm=False)
        assert output.prompt == "user:hi>"
        assert output.outputs[0].token_ids == answer("user:hi>")
        outputs = llm.chat([one, two], [GREEDY, GREEDY], use_tqdm=False, add_generation_prompt=False)
        assert [output.prompt for output in outputs] == ["user:hi", "system:suser:é"]
        assert llm.chat([], GREEDY, use_tqdm=False) == []
        outputs = llm.chat([one, [], [{"content": "x"}], one], GREEDY, use_tqdm=False)
        assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "error", "length"]


def test_chat_adds_no_special_tokens_of_its_own():
    fast = byte_tokenizer()
    fast.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 257)])
    with make_llm(fast, "<bos>{{ messages[0].content }}") as llm:
        (output,) = llm.chat([{"role": "user", "content": "a"}], GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == [257, 97]
        assert llm.generate("a", GREEDY, use_tqdm=False)[0].prompt_token_ids == [257, 97]


def test_chat_without_a_template():
    with make_llm(template=None) as llm:
        with pytest.raises(ModelError, match="no chat template"):
            llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)
        assert llm.generate("a", GREEDY, use_tqdm=False)[0].error is None


@pytest.mark.parametrize("error", [RuntimeError("on fire"), KeyboardInterrupt()])
@pytest.mark.parametrize("late", [False, True])
def test_interruption_leaves_the_llm_usable(error, late):
    with make_llm() as llm:
        runner = llm._engine.runner
        runner.fail_at, runner.fail_late, runner.error = 3, late, error
        with pytest.raises(type(error)):
            llm.generate(["abc", "d", "", "efghi"], GREEDY, use_tqdm=False)
        assert llm._engine._scheduler.cache.pools[0].num_free_blocks == 39
        outputs = llm.generate(["abc", "d"], GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [answer("abc"), answer("d")]


def test_interruption_while_requests_are_added():
    class Interrupting(str):
        def encode(self, *_):
            raise KeyboardInterrupt

    with make_llm() as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["abc", Interrupting("x")], GREEDY, use_tqdm=False)
        assert not llm._engine.has_unfinished()
        assert len(llm.generate("abc", GREEDY, use_tqdm=False)) == 1


def test_close():
    llm = make_llm()
    with llm as same:
        assert same is llm
    llm.close()
    assert llm._engine.runner.closed == 1
    for call in (
        lambda: llm.generate("a"),
        lambda: llm.chat([{"role": "user", "content": "a"}]),
        llm.get_tokenizer,
        llm.__enter__,
    ):
        with pytest.raises(EngineStateError, match="closed"):
            call()


def test_second_call_from_another_thread_is_refused():
    with make_llm() as llm:
        runner = llm._engine.runner
        entered, go_on = threading.Event(), threading.Event()
        execute = runner.execute

        def waiting(batch):
            entered.set()
            assert go_on.wait(30)
            return execute(batch)

        runner.execute = waiting
        outputs = []
        thread = threading.Thread(target=lambda: outputs.extend(llm.generate("abc", GREEDY, use_tqdm=False)))
        thread.start()
        assert entered.wait(30)
        with pytest.raises(EngineStateError, match="cannot generate now"):
            llm.generate("x", GREEDY, use_tqdm=False)
        with pytest.raises(EngineStateError, match="cannot close now"):
            llm.close()
        go_on.set()
        thread.join(30)
        assert outputs[0].outputs[0].token_ids == answer("abc")


def test_progress_goes_to_stderr_only(capfd):
    with make_llm() as llm:
        llm.generate(["a", "b", ""], GREEDY, use_tqdm=True)
        shown = capfd.readouterr()
        assert shown.out == ""
        assert "3/3" in shown.err
        assert "tok/s generated" in shown.err
        llm.generate(["a", "b"], GREEDY, use_tqdm=False)
        assert capfd.readouterr() == ("", "")


def test_get_tokenizer():
    with make_llm() as llm:
        assert llm.get_tokenizer().encode("a") == [97]
    with LLM.from_engine(Engine(FakeRunner())) as llm, pytest.raises(ModelError, match=r"tokenizer\.json"):
        llm.get_tokenizer()


def test_unknown_settings_name_their_neighbours():
    with pytest.raises(ConfigError, match=r"unknown setting 'max_modellen': did you mean max_model_len"):
        LLM(max_modellen=5)
    with pytest.raises(ConfigError, match="The settings are model, "):
        LLM(zzz=5)
    with pytest.raises(ConfigError, match="block_size is 0"):
        LLM(block_size=0)


def test_a_real_start_passes_settings_and_files_on(monkeypatch, tmp_path):
    """LLM(...) finds the model, reads its text files, and hands config and files to create_runner."""
    folder = write_byte_model_folder(tmp_path / "model")
    calls = []

    def create_runner(config, files, ledger):
        calls.append((config, files))
        ledger.add("weights", 0.5, num_bytes=7)
        return FakeRunner(vocab_size=BYTE_VOCAB_SIZE)

    files = SimpleNamespace(folder=folder, source="there")
    monkeypatch.setattr(compiled_engine.models, "find_model", lambda model: files if model == "there" else None)
    monkeypatch.setattr(compiled_engine.runners, "create_runner", create_runner)
    with LLM("there", max_num_seqs=3, seed=5) as llm:
        (output,) = llm.chat([{"role": "user", "content": "a"}], GREEDY, use_tqdm=False)
        assert output.prompt == "user: a\nassistant: "
        assert llm._engine.eos_token_ids == (BYTE_EOS,)
    assert calls == [(EngineConfig(model="there", max_num_seqs=3, seed=5), files)]
    (folder / "tokenizer.json").unlink()
    with LLM("there") as llm:
        assert llm.generate([[1, 2]], GREEDY, use_tqdm=False)[0].outputs[0].text == ""


def test_ledger_of_a_start(monkeypatch, tmp_path):
    """From the start of the process to the first token, in order and without overlap; later calls add nothing."""
    folder = write_byte_model_folder(tmp_path / "model")
    files = SimpleNamespace(folder=folder, source="there")

    def create_runner(config, files, ledger):
        with ledger.phase("load"), ledger.phase("weights") as phase:
            phase.num_bytes = 7
        return FakeRunner(vocab_size=BYTE_VOCAB_SIZE)

    monkeypatch.setattr(compiled_engine.models, "find_model", lambda model: files)
    monkeypatch.setattr(compiled_engine.runners, "create_runner", create_runner)
    with LLM("there") as llm:
        llm.generate([[]], GREEDY, use_tqdm=False)  # an error is no token
        before = [phase.name for phase in llm.ledger.phases]
        assert before == ["before the engine", "imports", "config and files", "load", "weights"]
        begin = llm.ledger.now
        llm.generate("a", GREEDY, use_tqdm=False)
        llm.generate("b", GREEDY, use_tqdm=False)
        end = llm.ledger.now
    phases = llm.ledger.phases
    assert [phase.name for phase in phases] == [*before, "first token"]
    assert [phase.depth for phase in phases] == [0, 0, 0, 0, 1, 0]
    assert (phases[0].start, phases[4].num_bytes) == (0, 7)
    outer = [phase for phase in phases if phase.depth == 0]
    for earlier, later in itertools.pairwise(outer):
        assert earlier.start + earlier.seconds <= later.start + 1e-6
    assert begin <= phases[-1].start
    assert phases[-1].start + phases[-1].seconds == llm.ledger.total_seconds <= end


def test_ledger_of_an_engine_that_was_given():
    runner = FakeRunner(vocab_size=BYTE_VOCAB_SIZE)
    ledger = Ledger()
    with LLM.from_engine(Engine(runner), ledger=ledger) as llm:
        assert llm.ledger is ledger
        llm.generate([[1, 2]], GREEDY, use_tqdm=False)
    assert [phase.name for phase in ledger.phases] == ["first token"]
    with LLM.from_engine(Engine(FakeRunner())) as llm:
        assert llm.ledger.phases == ()


def test_public_names():
    for name in compiled_engine.__all__:
        assert getattr(compiled_engine, name) is not None
    assert set(compiled_engine.__all__) <= set(dir(compiled_engine))
    with pytest.raises(AttributeError, match="no attribute 'LLMM'"):
        compiled_engine.LLMM  # noqa: B018


@pytest.mark.parametrize("names", ["", "LLM, SamplingParams, EngineConfig, RequestOutput"])
def test_importing_the_package_stays_light(names):
    code = (
        f"import compiled_engine, sys{'; from compiled_engine import ' + names if names else ''}; "
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'numpy', 'jinja2', 'tqdm') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
