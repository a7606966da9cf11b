"""Running the steps of the workload on one rung, and comparing what it computes as it goes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compiled_engine.runners.batch import ScheduledBatch, StepFacts, StepOutput
from compiled_engine_debug.bisect.compare import Difference, Measured, Place, Watch
from compiled_engine_debug.bisect.outcome import TokenDifference
from compiled_engine_debug.bisect.runners import ProbedRunner
from compiled_engine_debug.bisect.trace import Rows, Site, TensorName, Trace
from compiled_engine_debug.bisect.workload import Text


@dataclass(frozen=True)
class StepsRun:
    """``trace``: all that the rung computed. ``note``: how its steps ran, where graphs were captured."""

    trace: Trace
    tokens: tuple[TokenDifference, ...]
    note: str


def run_steps(
    runner: ProbedRunner,
    steps: Sequence[ScheduledBatch],
    texts: Sequence[Text],
    oracle: Trace,
    watches: Sequence[tuple[Trace, Watch]],
) -> StepsRun:
    """Run ``steps``; each of ``watches`` is told how far every tensor is from the same one of its trace.

    What the rung samples is compared and goes nowhere: the tokens of the next step are given.
    """
    trace = Trace(texts)
    by_id = {text.request_id: text for text in texts}
    tokens: list[TokenDifference] = []
    facts: list[tuple[ScheduledBatch, StepFacts]] = []
    for number, batch in enumerate(steps):
        output = runner.execute(batch)
        logits = []
        for rows in runner.read(number, batch):
            trace.write(rows)
            for reference, watch in watches:
                values = reference.read(rows)
                if values is not None:
                    watch.compare(rows, values)
            if rows.site.tensor is TensorName.LOGITS:
                logits.append(rows)
        if output is not None:
            tokens += _token_differences(output, logits, by_id, oracle)
            for found in _wrong_choices(output, logits):
                for _, watch in watches:
                    watch.take(found)
            if output.facts is not None:
                facts.append((batch, output.facts))
    return StepsRun(trace, tuple(tokens), _describe(facts))


def _token_differences(
    output: StepOutput, logits: Sequence[Rows], texts: Mapping[str, Text], oracle: Trace
) -> list[TokenDifference]:
    found = []
    for rows, token in zip(logits, output.sampled.token_ids, strict=True):
        text = texts[rows.request]
        expected = text.continuation[rows.start + 1 - len(text.prompt)]
        reference = oracle.read(rows)
        if token != expected and reference is not None:
            gap = float(reference[0, expected] - reference[0, token])
            found.append(TokenDifference(rows.step, rows.request, token, expected, gap))
    return found


def _wrong_choices(output: StepOutput, logits: Sequence[Rows]) -> list[Measured]:
    """Tokens that are not the likeliest by the rung's own logits, which greedy sampling takes exactly."""
    found = []
    for rows, token in zip(logits, output.sampled.token_ids, strict=True):
        largest = float(rows.values[0].max())
        if float(rows.values[0, token]) < largest:
            place = Place(rows.step, rows.request, Site(None, TensorName.TOKEN))
            found.append(Measured(place, Difference(math.inf, largest)))
    return found


def _describe(facts: Sequence[tuple[ScheduledBatch, StepFacts]]) -> str:
    replayed = [(batch, fact) for batch, fact in facts if fact.key is not None]
    if not replayed:
        return ""
    added = sum(fact.num_padded_tokens - batch.num_scheduled_tokens for batch, fact in replayed)
    return f"{len(replayed)} of {len(facts)} steps replayed, {added} rows of padding"
