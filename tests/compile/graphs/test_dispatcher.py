"""The dispatcher against every key its settings allow and every shape a small engine can have."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.compile.graphs.dispatcher import Decision, Dispatcher
from compiled_engine.compile.graphs.keys import GraphKey, GraphKind, GraphMode, StepShape
from compiled_engine.compile.graphs.sizes import decode_sizes, token_sizes
from compiled_engine.errors import ConfigError

MOST_REQUESTS, LARGEST_TOKEN_SIZE, LARGEST_BUCKET = 4, 10, 7
"""The small engine: most requests of a step, most tokens of a graph, longest request of a graph."""

DECODES = {GraphMode.FULL_DECODE_ONLY, GraphMode.FULL, GraphMode.FULL_AND_PIECEWISE}
PIECES = {GraphMode.PIECEWISE, GraphMode.FULL_AND_PIECEWISE}


@dataclass(frozen=True)
class Settings:
    """What a dispatcher is made of; ``splits``: KV splits for (requests, bucket)."""

    mode: GraphMode
    decode: tuple[int, ...]
    tokens: tuple[int, ...]
    max_num_seqs: int
    buckets: tuple[int, ...]
    splits: int

    def num_kv_splits(self, num_padded_requests: int, max_seq_len: int) -> int:
        """An arbitrary pure function that tells its two arguments apart."""
        return 1 + (self.splits * num_padded_requests + 5 * max_seq_len) % 7

    def dispatcher(self) -> Dispatcher:
        return Dispatcher(
            self.mode, self.decode, self.tokens, self.max_num_seqs, self.buckets, num_kv_splits=self.num_kv_splits
        )


in_each_mode = pytest.mark.parametrize("mode", list(GraphMode))


def ascending(largest: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.sets(st.integers(1, largest), min_size=1, max_size=4).map(sorted).map(tuple)


@st.composite
def settings_in(draw: st.DrawFn, mode: GraphMode) -> Settings:
    max_num_seqs = draw(st.integers(1, MOST_REQUESTS))
    return Settings(
        mode=mode,
        decode=draw(ascending(max_num_seqs)),
        tokens=draw(ascending(LARGEST_TOKEN_SIZE)),
        max_num_seqs=max_num_seqs,
        buckets=draw(ascending(LARGEST_BUCKET)),
        splits=draw(st.integers(1, 6)),
    )


def shape_of(query_lens: tuple[int, ...], max_seq_len: int) -> StepShape:
    """The shape of a batch, from the tokens of each request."""
    return StepShape(
        num_tokens=sum(query_lens),
        num_requests=len(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max_seq_len,
        is_uniform=len(set(query_lens)) == 1,
    )


def _all_batches() -> Iterator[StepShape]:
    for requests in range(1, MOST_REQUESTS + 1):
        for query_lens in itertools.combinations_with_replacement(range(1, LARGEST_TOKEN_SIZE + 2), requests):
            for cached in range(LARGEST_BUCKET + 1):
                yield shape_of(query_lens, max(query_lens) + cached)


EVERY_SHAPE = sorted(
    {shape for shape in _all_batches() if shape.num_tokens <= LARGEST_TOKEN_SIZE + 1},
    key=lambda shape: (shape.num_tokens, shape.num_requests, shape.max_query_len, shape.max_seq_len),
)
"""Every shape of a batch of the small engine, and some that are above each captured size."""


def shapes_for(settings: Settings) -> list[StepShape]:
    return [shape for shape in EVERY_SHAPE if shape.num_requests <= settings.max_num_seqs]


def every_key(settings: Settings) -> list[GraphKey]:
    """All keys that the mode allows, whether or not a step needs them."""
    keys = []
    if settings.mode in DECODES:
        for size, bucket in itertools.product(settings.decode, settings.buckets):
            splits = settings.num_kv_splits(size, bucket)
            keys.append(GraphKey(GraphKind.FULL, size, size, 1, bucket, splits))
    if settings.mode is GraphMode.FULL:
        for size, bucket in itertools.product(settings.tokens, settings.buckets):
            keys.append(GraphKey(GraphKind.FULL, size, settings.max_num_seqs, None, bucket, 1))
    if settings.mode in PIECES:
        keys += [GraphKey(GraphKind.PIECEWISE, size, 0, None, 0, 0) for size in settings.tokens]
    return keys


def form(key: GraphKey) -> tuple[GraphKind, int | None]:
    return key.kind, key.uniform_query_len


def fits(key: GraphKey, shape: StepShape) -> bool:
    """Whether the launches of ``key`` are enough for ``shape``."""
    if shape.num_tokens > key.num_padded_tokens:
        return False
    if key.kind is GraphKind.PIECEWISE:
        return True
    if shape.num_requests > key.num_padded_requests or shape.max_seq_len > key.max_seq_len:
        return False
    return key.uniform_query_len is None or (shape.is_uniform and shape.max_query_len == key.uniform_query_len)


def best(keys: list[GraphKey], shape: StepShape) -> GraphKey | None:
    """The oracle: of all keys that fit, a decode graph if there is one, and of these the smallest."""
    return min(
        (key for key in keys if fits(key, shape)),
        key=lambda key: (key.uniform_query_len is None, key.num_padded_tokens, key.max_seq_len),
        default=None,
    )


@in_each_mode
@given(data=st.data())
def test_every_step_gets_the_smallest_graph_it_fits_or_a_reason(mode: GraphMode, data: st.DataObject) -> None:
    settings = data.draw(settings_in(mode))
    dispatcher, keys = settings.dispatcher(), every_key(settings)
    for shape in shapes_for(settings):
        decision = dispatcher.dispatch(shape)
        assert decision.key == best(keys, shape)
        assert bool(decision.reason) is (decision.key is None)


@in_each_mode
@given(data=st.data())
def test_what_is_captured_is_exactly_what_some_step_needs(mode: GraphMode, data: st.DataObject) -> None:
    settings = data.draw(settings_in(mode))
    dispatcher = settings.dispatcher()
    answers = {dispatcher.dispatch(shape).key for shape in shapes_for(settings)} - {None}
    assert set(dispatcher.keys()) == answers
    assert len(set(dispatcher.keys())) == len(dispatcher.keys())


@in_each_mode
@given(data=st.data())
def test_no_captured_graph_of_the_same_form_is_smaller_and_fits(mode: GraphMode, data: st.DataObject) -> None:
    settings = data.draw(settings_in(mode))
    dispatcher = settings.dispatcher()
    captured = dispatcher.keys()
    for shape in shapes_for(settings):
        key = dispatcher.dispatch(shape).key
        for other in captured:
            if key is not None and form(other) == form(key) and fits(other, shape):
                assert other.num_padded_tokens >= key.num_padded_tokens
                assert other.max_seq_len >= key.max_seq_len


@in_each_mode
@given(data=st.data())
def test_a_larger_or_longer_step_never_gets_a_smaller_graph(mode: GraphMode, data: st.DataObject) -> None:
    settings = data.draw(settings_in(mode))
    dispatcher, shapes = settings.dispatcher(), shapes_for(settings)
    for _ in range(10):
        shape, other = data.draw(st.sampled_from(shapes)), data.draw(st.sampled_from(shapes))
        key, larger = dispatcher.dispatch(shape).key, dispatcher.dispatch(other).key
        if key is None or larger is None or form(key) != form(larger):
            continue
        if other.num_tokens >= shape.num_tokens:
            assert larger.num_padded_tokens >= key.num_padded_tokens
            assert larger.num_padded_requests >= key.num_padded_requests
        if other.max_seq_len >= shape.max_seq_len:
            assert larger.max_seq_len >= key.max_seq_len


@in_each_mode
@given(data=st.data())
def test_steps_that_share_a_graph_share_every_launch_value(mode: GraphMode, data: st.DataObject) -> None:
    """Launch values are computed here from the step itself, with no look at keys."""
    settings = data.draw(settings_in(mode))
    dispatcher = settings.dispatcher()
    for shape in shapes_for(settings):
        key = dispatcher.dispatch(shape).key
        if key is None:
            continue
        if key.kind is GraphKind.PIECEWISE:
            launched = (min(size for size in settings.tokens if size >= shape.num_tokens), 0, None, 0, 0)
        else:
            bucket = min(size for size in settings.buckets if size >= shape.max_seq_len)
            if key.uniform_query_len is None:
                tokens = min(size for size in settings.tokens if size >= shape.num_tokens)
                launched = (tokens, settings.max_num_seqs, None, bucket, 1)
            else:
                rows = min(size for size in settings.decode if size >= shape.num_requests)
                launched = (rows, rows, 1, bucket, settings.num_kv_splits(rows, bucket))
        assert astuple(key)[1:] == launched
        assert key.kind is GraphKind.PIECEWISE or shape.max_query_len <= key.max_query_len


@in_each_mode
@given(data=st.data())
def test_keys_come_largest_first(mode: GraphMode, data: st.DataObject) -> None:
    settings = data.draw(settings_in(mode))
    keys = settings.dispatcher().keys()
    for larger, key in itertools.pairwise(keys):
        assert larger.num_padded_tokens >= key.num_padded_tokens
        if larger.num_padded_tokens == key.num_padded_tokens:
            assert (larger.num_padded_requests, larger.max_seq_len) >= (key.num_padded_requests, key.max_seq_len)


def one_mode(mode: GraphMode, max_num_seqs: int = 100) -> Dispatcher:
    """Decode sizes to 64 of 100 requests, token sizes to 512, buckets 1024 and 4096, 8 splits."""
    return Dispatcher(mode, (1, 8, 64), (16, 128, 512), max_num_seqs, (1024, 4096), lambda requests, length: 8)


DECODE = shape_of((1,) * 5, 700)
LARGE_DECODE = shape_of((1,) * 65, 700)
LONG_DECODE = shape_of((1,) * 5, 4097)
MIXED = shape_of((1, 1, 30), 1025)
PREFILL = shape_of((16, 16), 16)
HUGE = shape_of((513,), 513)
FULL_DECODE_8 = GraphKey(GraphKind.FULL, 8, 8, 1, 1024, 8)
PIECEWISE_16, PIECEWISE_128 = (GraphKey(GraphKind.PIECEWISE, size, 0, None, 0, 0) for size in (16, 128))

OFF = "graphs are off (mode none)"
TOO_MANY_TOKENS = "513 tokens are above the largest captured token size, 512"
TOO_LONG = "max_seq_len 4097 is above the largest captured bucket, 4096"


def full_mixed(tokens: int, bucket: int) -> GraphKey:
    return GraphKey(GraphKind.FULL, tokens, 100, None, bucket, 1)


@pytest.mark.parametrize(
    ("mode", "answers"),
    [
        (GraphMode.NONE, [OFF] * 6),
        (
            GraphMode.FULL_DECODE_ONLY,
            [
                FULL_DECODE_8,
                "65 requests are above the largest captured decode size, 64",
                TOO_LONG,
                "32 tokens of 3 request(s) are no decode step, and only those are captured",
                "32 tokens of 2 request(s) are no decode step, and only those are captured",
                "513 tokens of 1 request(s) are no decode step, and only those are captured",
            ],
        ),
        (
            GraphMode.PIECEWISE,
            [PIECEWISE_16, PIECEWISE_128, PIECEWISE_16, PIECEWISE_128, PIECEWISE_128, TOO_MANY_TOKENS],
        ),
        (
            GraphMode.FULL,
            [
                FULL_DECODE_8,
                full_mixed(128, 1024),
                TOO_LONG,
                full_mixed(128, 4096),
                full_mixed(128, 1024),
                TOO_MANY_TOKENS,
            ],
        ),
        (
            GraphMode.FULL_AND_PIECEWISE,
            [FULL_DECODE_8, PIECEWISE_128, PIECEWISE_16, PIECEWISE_128, PIECEWISE_128, TOO_MANY_TOKENS],
        ),
    ],
)
def test_each_mode_does_what_its_name_says(mode: GraphMode, answers: list[GraphKey | str]) -> None:
    dispatcher = one_mode(mode)
    for shape, answer in zip((DECODE, LARGE_DECODE, LONG_DECODE, MIXED, PREFILL, HUGE), answers, strict=True):
        expected = Decision(None, answer) if isinstance(answer, str) else Decision(answer, "")
        assert dispatcher.dispatch(shape) == expected


def test_the_largest_decode_batch_is_captured_without_padding() -> None:
    dispatcher = Dispatcher(
        GraphMode.FULL_AND_PIECEWISE, decode_sizes(100), token_sizes(512), 100, (2048,), lambda requests, length: 4
    )
    assert dispatcher.dispatch(shape_of((1,) * 100, 2048)).key == GraphKey(GraphKind.FULL, 100, 100, 1, 2048, 4)
    assert dispatcher.dispatch(shape_of((1,) * 97, 2048)).key == GraphKey(GraphKind.FULL, 100, 100, 1, 2048, 4)
    assert dispatcher.dispatch(shape_of((1,) * 96, 2048)).key == GraphKey(GraphKind.FULL, 96, 96, 1, 2048, 4)


def test_an_explicit_maximum_of_42_serves_42_requests() -> None:
    sizes = decode_sizes(100, maximum=42)
    dispatcher = Dispatcher(GraphMode.FULL_DECODE_ONLY, sizes, (), 100, (64,), lambda requests, length: 1)
    assert dispatcher.keys()[0].num_padded_requests == 42
    assert dispatcher.dispatch(shape_of((1,) * 42, 9)).key == GraphKey(GraphKind.FULL, 42, 42, 1, 64, 1)
    assert dispatcher.dispatch(shape_of((1,) * 43, 9)).reason.startswith("43 requests are above")


def test_splits_are_asked_for_once_per_graph_with_padded_sizes() -> None:
    asked: list[tuple[int, int]] = []

    def num_kv_splits(num_padded_requests: int, max_seq_len: int) -> int:
        asked.append((num_padded_requests, max_seq_len))
        return 2

    dispatcher = Dispatcher(GraphMode.FULL, (2, 4), (16,), 4, (8, 32), num_kv_splits)
    for _ in range(3):
        dispatcher.dispatch(shape_of((1, 1, 1), 20))
    assert sorted(asked) == [(2, 8), (2, 32), (4, 8), (4, 32)]


def test_more_requests_than_the_engine_runs_are_an_error_in_every_mode() -> None:
    for mode in GraphMode:
        with pytest.raises(ValueError, match=r"the step has 3 requests, above max_num_seqs 2"):
            Dispatcher(mode, (2,), (8,), 2, (16,), lambda requests, length: 1).dispatch(shape_of((1, 1, 1), 4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decode": ()}, r"decode_sizes is empty: mode full "),
        ({"tokens": ()}, r"token_sizes is empty: mode full "),
        ({"buckets": ()}, r"max_seq_len_buckets is empty: mode full "),
        ({"decode": (2, 1)}, r"decode_sizes is \(2, 1\)"),
        ({"tokens": (8, 8)}, r"token_sizes is \(8, 8\)"),
        ({"buckets": (0, 8)}, r"max_seq_len_buckets is \(0, 8\)"),
        ({"decode": (1, 5)}, r"decode_sizes has 5, above max_num_seqs 4"),
        ({"max_num_seqs": 0}, r"max_num_seqs is 0"),
    ],
)
def test_sizes_that_cannot_work_are_refused(changes: dict[str, object], message: str) -> None:
    settings = Settings(GraphMode.FULL, (1, 4), (8, 16), 4, (8, 32), 1)
    assert settings.dispatcher().keys()
    with pytest.raises(ConfigError, match=message):
        replace(settings, **changes).dispatcher()


def test_a_mode_needs_only_the_sizes_it_captures() -> None:
    assert Dispatcher(GraphMode.NONE, (), (), 4, (), lambda requests, length: 1).keys() == ()
    assert len(Dispatcher(GraphMode.PIECEWISE, (), (8,), 4, (), lambda requests, length: 1).keys()) == 1


def test_a_decision_has_a_key_or_a_reason_and_not_both() -> None:
    for key, reason in ((None, ""), (FULL_DECODE_8, "why")):
        with pytest.raises(ValueError, match=r"a decision has a key or a reason"):
            Decision(key, reason)


legal_batches = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(query_lens=legal_batches, cached=st.integers(0, 5))
def test_every_batch_has_a_legal_shape(query_lens: list[int], cached: int) -> None:
    shape = shape_of(tuple(query_lens), max(query_lens) + cached)
    assert shape.is_decode is all(length == 1 for length in query_lens)


def test_exactly_the_shapes_that_some_batch_has_are_accepted() -> None:
    batches = [b for n in range(1, 5) for b in itertools.combinations_with_replacement(range(1, 7), n)]
    real = {(sum(b), len(b), max(b), len(set(b)) == 1) for b in batches}
    numbers = itertools.product(range(8), range(5), range(7), range(8), (False, True))
    for tokens, requests, longest, max_seq_len, is_uniform in numbers:
        if (tokens, requests, longest, is_uniform) in real and longest <= max_seq_len:
            StepShape(tokens, requests, longest, max_seq_len, is_uniform)
            continue
        with pytest.raises(ValueError, match=r"^(num_tokens|num_requests|max_query_len|max_seq_len|is_uniform) is "):
            StepShape(tokens, requests, longest, max_seq_len, is_uniform)


def test_a_shape_that_no_batch_has_is_refused_with_its_numbers() -> None:
    with pytest.raises(ValueError, match=r"num_tokens is 2 for 3 requests"):
        StepShape(2, 3, 1, 8, False)
    with pytest.raises(ValueError, match=r"max_query_len is 2: 1 requests cannot share 3 tokens"):
        StepShape(3, 1, 2, 8, False)
    with pytest.raises(ValueError, match=r"max_query_len is 9, above max_seq_len 8"):
        StepShape(9, 1, 9, 8, True)
    with pytest.raises(ValueError, match=r"is_uniform is False: 2 requests have 4 tokens, 2 at most each"):
        StepShape(4, 2, 2, 8, False)


@pytest.mark.parametrize("bad", [0, -1, 2.0, True, "2"])
@pytest.mark.parametrize("name", ["num_tokens", "num_requests", "max_query_len", "max_seq_len"])
def test_numbers_of_a_shape_are_positive_and_whole(name: str, bad: object) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is "):
        replace(shape_of((2, 2), 8), **{name: bad})


def _small_keys() -> Iterator[GraphKey]:
    """Keys that differ from one another in a single value, and in several."""
    for first, requests, length in itertools.product((1, 2, 3), (1, 2, 3), (2, 3)):
        yield GraphKey(GraphKind.FULL, first, requests, None, length, 1)
        for query_len, splits in itertools.product((1, 2), (1, 2, 3)):
            yield GraphKey(GraphKind.FULL, requests * query_len, requests, query_len, length, splits)
        yield GraphKey(GraphKind.PIECEWISE, first, 0, None, 0, 0)


def test_keys_with_any_different_launch_value_are_different_keys() -> None:
    keys = list({astuple(key): key for key in _small_keys()}.values())
    assert len(set(keys)) == len({hash(key) for key in keys}) == len({str(key) for key in keys}) == len(keys)
    for key in keys:
        assert key == replace(key)
        assert hash(key) == hash(replace(key))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "full"}, r"kind is 'full': give a GraphKind"),
        ({"num_padded_tokens": 0}, r"num_padded_tokens is 0: give a whole number of at least 1"),
        ({"num_padded_tokens": 9}, r"num_padded_tokens is 9: 8 requests of 1 tokens have 8"),
        ({"num_padded_requests": 0}, r"num_padded_requests is 0"),
        ({"uniform_query_len": 0}, r"uniform_query_len is 0"),
        ({"uniform_query_len": True}, r"uniform_query_len is True"),
        ({"uniform_query_len": 2, "num_padded_tokens": 16, "max_seq_len": 1}, r"uniform_query_len is 2, above max_seq"),
        ({"max_seq_len": 0}, r"max_seq_len is 0"),
        ({"num_kv_splits": 0}, r"num_kv_splits is 0"),
        ({"uniform_query_len": None}, r"num_kv_splits is 8: a mixed key does not split"),
        ({"kind": GraphKind.PIECEWISE}, r"a PIECEWISE key has no attention: .* \(8, 1, 1024, 8\)"),
    ],
)
def test_a_key_that_is_not_normalised_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(FULL_DECODE_8, **changes)


@pytest.mark.parametrize(
    "changes", [{"num_padded_requests": 1}, {"uniform_query_len": 1}, {"max_seq_len": 1}, {"num_kv_splits": 1}]
)
def test_a_piecewise_key_holds_nothing_of_attention(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"a PIECEWISE key has no attention"):
        replace(PIECEWISE_16, **changes)


def test_names_and_query_lengths_of_keys() -> None:
    assert str(GraphKey(GraphKind.FULL, 8, 8, 1, 4096, 8)) == "full decode 8 requests, seq_len <= 4096, 8 KV splits"
    assert str(GraphKey(GraphKind.FULL, 1, 1, 1, 64, 1)) == "full decode 1 request, seq_len <= 64, 1 KV split"
    assert str(GraphKey(GraphKind.FULL, 8, 4, 2, 64, 3)) == (
        "full decode 4 requests of 2 tokens, seq_len <= 64, 3 KV splits"
    )
    assert str(full_mixed(64, 4096)) == "full mixed 64 tokens, 100 requests, seq_len <= 4096"
    assert str(PIECEWISE_16) == "piecewise 16 tokens"
    lengths = [key.max_query_len for key in (FULL_DECODE_8, full_mixed(64, 4096), full_mixed(4096, 64), PIECEWISE_16)]
    assert lengths == [1, 64, 64, 0]


def test_keys_and_dispatcher_need_no_torch() -> None:
    code = (
        "import sys, compiled_engine.compile.graphs.dispatcher, compiled_engine.compile.graphs.sizes\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
