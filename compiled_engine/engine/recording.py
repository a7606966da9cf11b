"""A step as a record: what was scheduled and what the runner made of it, without any token."""

from __future__ import annotations

import time

from compiled_engine.compile.recorder import Recorder
from compiled_engine.compile.records import ScheduledShare, StepRecord
from compiled_engine.runners.base import Runner
from compiled_engine.runners.batch import ScheduledBatch, StepFacts, StepOutput


def execute_recorded(runner: Runner, batch: ScheduledBatch, recorder: Recorder) -> StepOutput:
    """``runner.execute(batch)``, timed and given to ``recorder``. A step that fails is not recorded."""
    begin = time.perf_counter()
    output = runner.execute(batch)
    seconds = time.perf_counter() - begin
    recorder.add_step(make_step_record(recorder.num_steps, recorder.since_start(begin), seconds, batch, output.facts))
    return output


def make_step_record(
    index: int, start: float, seconds: float, batch: ScheduledBatch, facts: StepFacts | None
) -> StepRecord:
    """The record of ``batch``, which took ``seconds`` from ``start`` on. ``facts`` None: the runner tells nothing."""
    num_tokens, num_requests = batch.num_scheduled_tokens, len(batch.requests)
    if facts is None:
        facts = StepFacts(num_tokens, num_requests, "eager", epoch=0)
    return StepRecord(
        index=index,
        start=start,
        seconds=seconds,
        num_tokens=num_tokens,
        num_padded_tokens=facts.num_padded_tokens,
        num_requests=num_requests,
        num_padded_requests=facts.num_padded_requests,
        num_sampled=len(batch.sampling.num_logprobs),
        mode=facts.mode,
        key=None if facts.key is None else str(facts.key),
        reason=facts.reason,
        epoch=facts.epoch,
        requests=tuple(
            ScheduledShare(request.request_id, request.num_computed_tokens, len(request.token_ids), request.samples)
            for request in batch.requests
        ),
    )
