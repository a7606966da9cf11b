"""Every field of SamplingParams is checked when it is made, and nothing changes afterwards."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from compiled_engine.engine.sampling_params import SamplingParams
from compiled_engine.errors import ConfigError

NO_NUMBERS = [None, "1", True, [1], math.nan, math.inf, -math.inf, 10**400]
NO_INTEGERS = ["1", True, 1.0, [1], math.nan]

BAD = {
    "n": [None, 0, -1, *NO_INTEGERS],
    "temperature": [-0.1, 1e39, *NO_NUMBERS],
    "top_p": [0, 0.0, -0.5, 1.0001, *NO_NUMBERS],
    "top_k": [None, -2, 2**31, *NO_INTEGERS],
    "min_p": [-0.1, 1.1, *NO_NUMBERS],
    "seed": [2**63, -(2**63) - 1, *NO_INTEGERS],
    "max_tokens": [0, -1, *NO_INTEGERS],
    "min_tokens": [None, -1, *NO_INTEGERS],
    "stop": ["", [""], ["a", ""], [1], 5, b"x", {"a": 1}, [None]],
    "stop_token_ids": [[-1], ["a"], [True], [1.5], 5, "12", {1: 2}],
    "ignore_eos": [None, 0, 1, "yes"],
    "include_stop_str_in_output": [None, 1],
    "skip_special_tokens": [None, 1],
    "logprobs": [-1, *NO_INTEGERS],
}

GOOD = {
    "n": [1, 5],
    "temperature": [0, 0.0, 1, 2.5, 1e38, np.float32(0.5)],
    "top_p": [1, 1.0, 1e-9, 0.5],
    "top_k": [-1, 0, 1, 2**31 - 1, np.int64(4)],
    "min_p": [0, 1, 0.5],
    "seed": [None, 0, -1, 2**63 - 1, -(2**63)],
    "max_tokens": [None, 1, 10**9],
    "min_tokens": [0, 16],
    "stop": [None, (), [], "a", ["a", "b"], ("\n",)],
    "stop_token_ids": [None, (), [], [0, 5], (7,), np.array([1, 2])],
    "ignore_eos": [True, False],
    "include_stop_str_in_output": [True, False],
    "skip_special_tokens": [True, False],
    "logprobs": [None, 0, 20],
}


def test_every_field_is_tried():
    names = {item.name for item in dataclasses.fields(SamplingParams)}
    assert names == set(BAD) == set(GOOD)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_bad_values_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name) as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD.items() for value in values])
def test_good_values_are_taken(name, value):
    SamplingParams(**{name: value})


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert params.stop_strings == params.stop_ids == ()
    assert (params.ignore_eos, params.include_stop_str_in_output, params.skip_special_tokens) == (False, False, True)


def test_forms_are_made_alike():
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(stop_token_ids=[3]) == SamplingParams(stop_token_ids=(3,))


def test_min_tokens_must_fit_max_tokens():
    with pytest.raises(ConfigError, match=r"min_tokens is 17, above max_tokens \(16\)"):
        SamplingParams(min_tokens=17)
    SamplingParams(min_tokens=17, max_tokens=None)


def test_immutable_and_apart_from_the_callers_lists():
    stop, ids = ["a"], [1]
    params = SamplingParams(stop=stop, stop_token_ids=ids)
    stop.append("b")
    ids.append(2)
    assert (params.stop_strings, params.stop_ids) == (("a",), (1,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.5
