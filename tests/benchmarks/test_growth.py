"""The growth benchmark: that it times the steps it means to, on a fake model, and a whole run on a tiny one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

import growth
from compiled_engine.engine.core import Engine
from compiled_engine.engine.scheduler import Scheduler
from fake_runner import FakeRunner
from tiny_models import write_tiny_model

TEXT = list(range(2, 61))
SIZES = growth.Sizes(
    batches=(1, 3), contexts=(48, 64, 100_000), queues=(5, 20), steps=2, requests=10, tokens_per_request=2
)


def fake_engine(**settings: int) -> Engine:
    usual = {"num_blocks": 800, "max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 128}
    return Engine(FakeRunner(**usual | settings))


def test_prompts_are_read_in_a_circle() -> None:
    assert growth.prompt(TEXT, 0, 4) == TEXT[:4]
    assert growth.prompt(TEXT, 1, 3) == TEXT[7:10]
    assert growth.prompt(TEXT, 0, len(TEXT) + 2) == TEXT + TEXT[:2]


@pytest.mark.parametrize(("size", "budget"), [(1, 512), (1, 10), (4, 20), (64, 512)])
def test_timed_steps_decode_every_request_of_the_batch(size: int, budget: int) -> None:
    engine = fake_engine(max_num_batched_tokens=budget)
    growth.start_decoding(engine, [growth.prompt(TEXT, number) for number in range(size)], 5)
    for _ in range(5):
        computed, sampled = engine.num_computed_tokens, engine.num_sampled_tokens
        assert len(growth.timed_steps(engine, 1)) == 1
        assert engine.num_computed_tokens - computed == engine.num_sampled_tokens - sampled == size
    growth.run_to_end(engine)
    assert not engine.has_unfinished()


def test_requests_that_end_too_soon_are_an_error() -> None:
    engine = fake_engine()
    growth.start_decoding(engine, [growth.prompt(TEXT, 0)], 2)
    with pytest.raises(RuntimeError, match="ended while steps were timed"):
        growth.timed_steps(engine, 100)
    narrow = fake_engine(max_num_seqs=2)
    with pytest.raises(RuntimeError, match="never decoded together"):
        growth.start_decoding(narrow, [growth.prompt(TEXT, number) for number in range(3)], 2)


def test_context_steps_see_the_whole_context() -> None:
    engine = fake_engine()
    lengths = []
    execute = engine.runner.execute

    def record(batch):
        lengths.append(batch.requests[0].seq_len)
        return execute(batch)

    engine.runner.execute = record
    growth.context_step(engine, TEXT, 100, 5)
    assert max(lengths) <= 100
    assert lengths[-1] >= 100 - growth.SPARE_TOKENS
    assert not engine.has_unfinished()


def test_the_queue_is_as_long_as_said_and_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine(max_num_seqs=growth.QUEUE_BATCH, max_num_batched_tokens=64)
    waiting = []
    schedule = Scheduler.schedule

    def record(scheduler):
        scheduled = schedule(scheduler)
        waiting.append(len(scheduler.waiting))
        return scheduled

    monkeypatch.setattr(Scheduler, "schedule", record)
    result = growth.queue_time(engine, TEXT, 40, 3)
    assert waiting == [40, 36, 32], "each step ends its requests and admits others"
    assert result.waiting == 40
    assert 0 < result.schedule_s < 1
    assert 0 < result.add_s < 1
    assert not engine.has_unfinished()


def test_parts_of_a_step_are_timed_and_then_let_go() -> None:
    before = Scheduler.schedule
    shares = growth.step_shares(fake_engine(), TEXT, growth.GREEDY, 3)
    assert set(shares) == {*growth.PARTS, growth.REST}
    assert shares["scheduling"] > 0
    assert shares["output text"] > 0
    assert shares["layers"] == 0, "the fake runner has none"
    assert shares[growth.REST] > 0
    assert Scheduler.schedule is before


def test_memory_is_read_at_the_start_and_after_all_requests() -> None:
    readings = list(growth.memory_over_requests(fake_engine(max_num_seqs=1), TEXT, 40, 2))
    assert readings[0].finished == 0
    assert readings[-1].finished == 40
    assert len(readings) == growth.MEMORY_READINGS + 1
    assert all(2**20 < reading.resident < 2**40 for reading in readings)


@pytest.mark.slow
def test_a_run_on_a_tiny_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_model(tmp_path / "tiny", "llama", num_hidden_layers=1)
    monkeypatch.setattr(growth, "QUICK", SIZES)
    target = tmp_path / "result"
    options = ["--quick", "--piece-compiler", "eager", "--threads", "1", "--model", str(folder)]
    assert growth.main([*options, "--output", str(target)]) == 0
    result = json.loads(target.with_suffix(".json").read_text())
    assert [row["size"] for row in result["batch"]] == [1, 3]
    assert [row["size"] for row in result["context"]] == [48, 64], "the model's own limit is 512"
    assert [row["waiting"] for row in result["queue"]] == [5, 20]
    for parts in result["shares"].values():
        assert all(seconds > 0 for seconds in parts.values())
    document = target.with_suffix(".html").read_text("utf-8")
    pictures = [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", document, re.DOTALL)]
    assert len(pictures) == 5
    assert len(re.findall(r"^batch \d+: .* ms a step", capsys.readouterr().out, re.MULTILINE)) == 2
