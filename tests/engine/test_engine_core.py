"""Engine on the fake runner: every text is that of its prompt alone, whatever else runs and however small the cache."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from engine_runs import GREEDY, check_nothing_is_held, finish, least_blocks, pools
from hypothesis import given
from hypothesis import strategies as st

import fake_runner
from compiled_engine.engine.core import Engine
from compiled_engine.engine.request import derive_seed
from compiled_engine.engine.sampling_params import SamplingParams
from compiled_engine.engine.tokenizer import Tokenizer
from compiled_engine.errors import EngineStateError, LogitsError, ModelError
from fake_runner import BYTE_EOS, BYTE_VOCAB_SIZE, FakeRunner, byte_tokenizer, expected_tokens, model_logits

prompts = st.lists(st.integers(0, 63), min_size=1, max_size=14)
sampling = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.5]),
        "top_k": st.sampled_from([0, 5]),
        "top_p": st.sampled_from([1.0, 0.8]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "max_tokens": st.integers(1, 10),
        "min_tokens": st.just(0),
        "stop_token_ids": st.lists(st.integers(0, 63), max_size=8, unique=True),
    }
)
jobs = st.lists(st.tuples(prompts, sampling, st.booleans(), st.integers(0, 5)), min_size=1, max_size=8)


@given(jobs, pools, st.lists(st.integers(0, 63), max_size=2), st.booleans())
def test_every_text_is_that_of_its_prompt_alone(work, pool, eos, caching):
    """Whatever arrives when, is chunked, set back or found in the cache: equal to the slow account, token by token."""
    runner = FakeRunner(**pool)
    engine = Engine(runner, eos_token_ids=eos, seed=3, enable_prefix_caching=caching)
    outputs, sent = {}, {}
    for prompt, options, with_min, steps_before in work:
        for _ in range(steps_before):
            outputs |= {output.request_id: output for output in engine.step()}
        options = dict(options)
        if with_min:
            options["min_tokens"] = min(3, options["max_tokens"])
        sent[engine.add_request(prompt, SamplingParams(**options))] = prompt, options
    outputs |= finish(engine)
    assert set(outputs) == set(sent)
    for request_id, (prompt, options) in sent.items():
        output = outputs[request_id]
        room = pool["max_model_len"] - len(prompt)
        limit = min(options["max_tokens"], room)
        too_large = any(
            least_blocks(group, len(prompt) + limit - 1, pool["block_size"]) >= group.num_blocks
            for group in (pool["cache_groups"] if room > 0 else ())
        )
        if room < 1 or too_large:
            assert output.outputs[0].finish_reason == "error"
            assert ("max_model_len" if room < 1 else "kv_cache_memory") in output.error
            continue
        stops = {*options["stop_token_ids"], *eos}
        arguments = {name: options[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed", "min_tokens")}
        expected = expected_tokens(prompt, limit, stop_ids=sorted(stops), **arguments)
        completion = output.outputs[0]
        assert completion.token_ids == expected
        stopped = expected[-1] in stops
        assert completion.finish_reason == ("stop" if stopped else "length")
        assert completion.stop_reason == (expected[-1] if stopped and expected[-1] not in eos else None)
        assert output.error is None
    check_nothing_is_held(engine)


def test_small_caches_do_preempt_and_change_nothing():
    """The property above is empty unless requests are really set back; here they are, many times."""
    tight = FakeRunner(num_blocks=8, block_size=2, max_num_batched_tokens=6)
    roomy = FakeRunner(num_blocks=200, block_size=2, max_num_batched_tokens=100)
    work = [([i, i + 1, i + 2], SamplingParams(max_tokens=9, seed=i, ignore_eos=True)) for i in range(6)]
    results = []
    for runner in (tight, roomy):
        engine = Engine(runner)
        ids = [engine.add_request(prompt, params) for prompt, params in work]
        outputs = finish(engine)
        results.append([outputs[request_id] for request_id in ids])
    assert [o.outputs[0].token_ids for o in results[0]] == [o.outputs[0].token_ids for o in results[1]]
    assert sum(output.num_preemptions for output in results[0]) >= 5
    assert sum(output.num_preemptions for output in results[1]) == 0


def test_the_fake_runner_finds_planted_faults():
    """The oracle has teeth: a wrong block table, a wrong position and a skipped recompute are all seen."""

    def run(spoil):
        engine = Engine(FakeRunner(num_blocks=10, block_size=2))
        engine.add_request([1, 2, 3], GREEDY)
        engine.add_request([4, 5, 6], GREEDY)
        engine.step()
        spoil(*(completion.request for completion in engine._completions.values()))
        return [output.outputs[0].token_ids for output in finish(engine).values()]

    right = [expected_tokens([1, 2, 3], 5), expected_tokens([4, 5, 6], 5)]
    assert run(lambda first, second: None) == right
    with pytest.raises(AssertionError, match="reads wrong positions"):
        run(lambda first, second: first.block_ids[0].reverse())
    with pytest.raises(AssertionError, match=r"writes block \d+, which is .*'[01]'.* too"):
        run(lambda first, second: second.block_ids.__setitem__(0, list(first.block_ids[0])))

    def swap(first, second):
        first.block_ids, second.block_ids = second.block_ids, first.block_ids

    swapped = run(swap)
    assert swapped != right
    with pytest.raises(AssertionError, match="reads wrong positions"):
        run(lambda first, second: setattr(first, "num_computed_tokens", 5) or first.token_ids.extend([9, 9]))


def test_seeds():
    """A seed fixes a text whatever the batch and order; without one each request and engine seed has its own."""
    params = SamplingParams(temperature=2.0, max_tokens=12, seed=11, ignore_eos=True)
    free = SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True)
    texts = []
    for others in (0, 3):
        engine = Engine(FakeRunner())
        for _ in range(others):
            engine.add_request([9], free)
        request_id = engine.add_request([1, 2], params)
        texts.append(finish(engine)[request_id].outputs[0].token_ids)
    assert texts[0] == texts[1] == expected_tokens([1, 2], 12, seed=11, temperature=2.0)

    def two_of(seed):
        engine = Engine(FakeRunner(), seed=seed)
        ids = [engine.add_request([1, 2], free) for _ in range(2)]
        outputs = finish(engine)
        return [tuple(outputs[request_id].outputs[0].token_ids) for request_id in ids]

    assert two_of(0) == two_of(0)
    assert len({*two_of(0), *two_of(1)}) == 4
    assert two_of(5)[1] == tuple(expected_tokens([1, 2], 12, seed=derive_seed(5, 1, 0), temperature=2.0))


def test_n_completions_have_derived_seeds():
    engine = Engine(FakeRunner())
    request_id = engine.add_request([1, 2], SamplingParams(n=3, temperature=1.5, max_tokens=6, seed=8, ignore_eos=True))
    (output,) = finish(engine).values()
    assert output.request_id == request_id
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    expected = [expected_tokens([1, 2], 6, seed=s, temperature=1.5) for s in (8, derive_seed(8, 1), derive_seed(8, 2))]
    assert [completion.token_ids for completion in output.outputs] == expected
    assert len({tuple(tokens) for tokens in expected}) == 3


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "empty"),
        ("", GREEDY, "empty"),
        ([1] * 20, GREEDY, "20 tokens, and max_model_len is 20"),
        ([1] * 500, GREEDY, "max_model_len"),
        ([1, BYTE_VOCAB_SIZE], GREEDY, f"token id {BYTE_VOCAB_SIZE} is outside the vocabulary"),
        ([1, -1], GREEDY, "token id -1 is outside"),
        ([1] * 10, SamplingParams(max_tokens=None), "needs 10 cache blocks .* has 8"),
        ([1.5], GREEDY, "holds 1.5"),
        ([True], GREEDY, "holds True"),
        (["a"], GREEDY, "holds 'a'"),
        (None, GREEDY, "NoneType"),
        (5, GREEDY, "int"),
        (b"abc", GREEDY, "bytes"),
        ({"prompt": 3}, GREEDY, "'prompt' is int"),
        ({"promt": "a"}, GREEDY, "did you mean 'prompt'"),
        ({}, GREEDY, "neither"),
        ({"prompt_token_ids": "abc"}, GREEDY, "a prompt is str"),
        ("\ud800", GREEDY, "surrogate"),
        ([1], SamplingParams(stop_token_ids=[300]), "stop_token_ids: token id 300"),
        ([1], SamplingParams(logprobs=300), "logprobs is 300"),
        ([1], SamplingParams(min_tokens=1, stop_token_ids=list(range(BYTE_VOCAB_SIZE))), "forbids every token"),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_a_bad_request_fails_alone(prompt, params, message, n):
    runner = FakeRunner(vocab_size=BYTE_VOCAB_SIZE, num_blocks=9, block_size=2, max_model_len=20)
    engine = Engine(runner, tokenizer=Tokenizer(byte_tokenizer()), eos_token_ids=[BYTE_EOS])
    before = engine.add_request([1, 2], GREEDY)
    bad = engine.add_request(prompt, dataclasses.replace(params, n=n))
    after = engine.add_request([3, 4], GREEDY)
    outputs = finish(engine)
    assert outputs[bad].outputs[0].finish_reason == "error"
    assert len(outputs[bad].outputs) == n
    assert outputs[bad].finished
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(outputs[bad].error)
    assert outputs[before].outputs[0].token_ids == expected_tokens([1, 2], 5, vocab_size=BYTE_VOCAB_SIZE)
    assert outputs[after].outputs[0].token_ids == expected_tokens([3, 4], 5, vocab_size=BYTE_VOCAB_SIZE)
    assert outputs[after].error is None


def test_forms_of_a_prompt():
    engine = Engine(FakeRunner(vocab_size=BYTE_VOCAB_SIZE), tokenizer=Tokenizer(byte_tokenizer()))
    forms = ["ab", [97, 98], (97, 98), np.array([97, 98]), torch.tensor([97, 98]), {"prompt": "ab"}]
    forms += [{"prompt_token_ids": [97, 98]}, {"prompt": "shown", "prompt_token_ids": [97, 98]}]
    ids = [engine.add_request(form, GREEDY) for form in forms]
    outputs = finish(engine)
    assert all(outputs[request_id].prompt_token_ids == [97, 98] for request_id in ids)
    assert [outputs[i].prompt for i in ids] == ["ab", None, None, None, None, "ab", None, "shown"]
    assert len({tuple(outputs[request_id].outputs[0].token_ids) for request_id in ids}) == 1


def first_tokens(vocab_size=BYTE_VOCAB_SIZE, count=8):
    return expected_tokens(list(b"hi"), count, vocab_size=vocab_size)


def run_one(params: SamplingParams, eos=(), prompt="hi"):
    engine = Engine(FakeRunner(vocab_size=BYTE_VOCAB_SIZE), tokenizer=Tokenizer(byte_tokenizer()), eos_token_ids=eos)
    engine.add_request(prompt, params)
    (output,) = finish(engine).values()
    return output.outputs[0]


def test_ignore_eos_ignores_the_models_eos_only():
    tokens = first_tokens()
    assert len(set(tokens)) == len(tokens)
    eos, stop = tokens[2], tokens[4]
    plain = run_one(SamplingParams(temperature=0, max_tokens=8), eos=[eos])
    assert (plain.token_ids, plain.finish_reason, plain.stop_reason) == (tokens[:3], "stop", None)
    ignored = run_one(SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), eos=[eos])
    assert (ignored.token_ids, ignored.finish_reason) == (tokens, "length")
    both = run_one(SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[stop, eos]), eos=[eos])
    assert (both.token_ids, both.finish_reason, both.stop_reason) == (tokens[:3], "stop", eos)
    later = run_one(SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[stop]), eos=[eos])
    assert (later.token_ids, later.stop_reason) == (tokens[:5], stop)


def test_min_tokens_masks_every_stop_token():
    """With several end-of-sequence ids and stop ids, all of them, and the choice is made among the others."""
    tokens = first_tokens()
    eos, stops = tokens[0:2], tokens[2:3]
    params = SamplingParams(temperature=0, max_tokens=8, min_tokens=4, stop_token_ids=stops)
    completion = run_one(params, eos=eos)
    banned = {*eos, *stops}
    assert not banned & set(completion.token_ids[:4])
    assert completion.token_ids == expected_tokens(
        list(b"hi"), 8, vocab_size=BYTE_VOCAB_SIZE, stop_ids=sorted(banned), min_tokens=4
    )


def test_stop_strings_cut_text_and_tokens():
    tokenizer = Tokenizer(byte_tokenizer())
    tokens = first_tokens(count=30)
    text = tokenizer.decode(tokens)
    start = next(i for i in range(4, 25) if text[i : i + 2].isascii() and text.count(text[i : i + 2]) == 1)
    stop = text[start : start + 2]
    for include in (False, True):
        params = SamplingParams(
            temperature=0, max_tokens=30, stop=[stop, "never"], include_stop_str_in_output=include, ignore_eos=True
        )
        completion = run_one(params)
        assert completion.finish_reason == "stop"
        assert completion.stop_reason == stop
        assert completion.text == text[: start + 2 if include else start]
        cut = next(k for k in range(1, 31) if stop in tokenizer.decode(tokens[:k]))
        assert completion.token_ids == tokens[:cut]


def test_stop_tokens_text():
    tokens = first_tokens()
    stop = tokens[3]
    tokenizer = Tokenizer(byte_tokenizer())
    for include, count in ((False, 3), (True, 4)):
        params = SamplingParams(temperature=0, stop_token_ids=[stop], include_stop_str_in_output=include)
        completion = run_one(params)
        assert completion.token_ids == tokens[:4]
        assert completion.text == tokenizer.decode(tokens[:count])


def test_max_model_len_ends_the_text():
    engine = Engine(FakeRunner(max_model_len=7))
    engine.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=None))
    engine.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=50))
    engine.add_request([1, 2, 3, 4, 5, 6], SamplingParams(temperature=0, max_tokens=50))
    outputs = finish(engine)
    assert [len(output.outputs[0].token_ids) for output in outputs.values()].count(4) == 2
    assert {output.outputs[0].finish_reason for output in outputs.values()} == {"length"}
    assert len(outputs["2"].outputs[0].token_ids) == 1


def test_logprobs():
    completion = run_one(SamplingParams(max_tokens=4, seed=1, logprobs=2, ignore_eos=True))
    total, prefix = 0.0, list(b"hi")
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        exact = torch.log_softmax(model_logits(prefix, BYTE_VOCAB_SIZE).double(), -1)
        assert next(iter(entry)) == token
        assert set(exact.topk(2).indices.tolist()) <= set(entry)
        assert entry[token] == pytest.approx(float(exact[token]), abs=1e-5)
        total += float(exact[token])
        prefix.append(token)
    assert completion.cumulative_logprob == pytest.approx(total, abs=1e-4)
    assert run_one(GREEDY).logprobs is None
    assert run_one(GREEDY).cumulative_logprob is None


def test_token_ids_work_without_a_tokenizer():
    engine = Engine(FakeRunner())
    good = engine.add_request([1, 2], GREEDY)
    text = engine.add_request("hi", GREEDY)
    stop = engine.add_request([1, 2], SamplingParams(stop="a"))
    outputs = finish(engine)
    assert outputs[good].outputs[0].text == ""
    assert outputs[good].outputs[0].token_ids == expected_tokens([1, 2], 5)
    assert "tokenizer.json" in outputs[text].error
    assert "stop_token_ids" in outputs[stop].error
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        engine.add_chat([{"role": "user", "content": "hi"}], GREEDY)


def test_eos_ids_outside_the_vocabulary_are_ignored():
    engine = Engine(FakeRunner(), eos_token_ids=[64, 10**9, -3])
    request_id = engine.add_request([1], SamplingParams(temperature=0, max_tokens=3, min_tokens=2))
    assert finish(engine)[request_id].error is None


@pytest.mark.parametrize("late", [False, True])
def test_a_failing_step_leaves_the_engine_usable(late):
    runner = FakeRunner(num_blocks=20, block_size=2)
    engine = Engine(runner)
    runner.fail_at, runner.fail_late = 2, late
    for i in range(4):
        engine.add_request([i, i + 1, i + 2], GREEDY)
    engine.add_request([], GREEDY)
    engine.step()
    engine.step()
    with pytest.raises(RuntimeError, match="on fire"):
        engine.step()
    engine.abort_all()
    assert not engine.has_unfinished()
    check_nothing_is_held(engine)
    request_id = engine.add_request([1, 2, 3], GREEDY)
    assert finish(engine)[request_id].outputs[0].token_ids == expected_tokens([1, 2, 3], 5)


def test_a_failed_step_can_be_repeated():
    """A step that raised has changed no request: stepping again gives the same text."""
    runner = FakeRunner()
    engine = Engine(runner)
    runner.fail_at = 3
    request_id = engine.add_request([1, 2, 3], GREEDY)
    with pytest.raises(RuntimeError):
        finish(engine)
    assert finish(engine)[request_id].outputs[0].token_ids == expected_tokens([1, 2, 3], 5)


def test_runner_that_returns_too_few_rows_is_refused():
    runner = FakeRunner()
    engine = Engine(runner)
    engine.add_request([1], GREEDY)

    def execute(batch):
        output = FakeRunner.execute(runner, batch)
        return type(output)(type(output.sampled)((), ()))

    runner.execute = execute
    with pytest.raises(EngineStateError, match="0 tokens for 1 rows"):
        engine.step()


def test_nan_logits_are_reported(monkeypatch):
    monkeypatch.setattr(fake_runner, "logits_after", lambda digest, vocab: torch.full((vocab,), float("nan")))
    engine = Engine(FakeRunner())
    engine.add_request([1], GREEDY)
    with pytest.raises(LogitsError, match="nan"):
        engine.step()


def test_close():
    runner = FakeRunner()
    engine = Engine(runner)
    engine.add_request([1], GREEDY)
    engine.close()
    engine.close()
    assert runner.closed == 1
    assert not engine.has_unfinished()
    for call in (engine.step, lambda: engine.add_request([1], GREEDY)):
        with pytest.raises(EngineStateError, match="closed"):
            call()


def test_parameters_are_not_changed():
    params = SamplingParams(max_tokens=100, stop=["a"], stop_token_ids=[3], seed=None, logprobs=1)
    same = SamplingParams(max_tokens=100, stop=["a"], stop_token_ids=[3], seed=None, logprobs=1)
    prompt = [1, 2]
    engine = Engine(FakeRunner(vocab_size=BYTE_VOCAB_SIZE, max_model_len=9), tokenizer=Tokenizer(byte_tokenizer()))
    engine.add_request(prompt, params)
    finish(engine)
    assert params == same
    assert prompt == [1, 2]
