"""Medians over the rounds of one engine, and whether two engines chose the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from task import BatchReport, Report


@dataclass(frozen=True)
class Rates:
    """Tokens per second at one batch size.

    prompt: prompt tokens over the time to one new token each. output: new tokens, end to end. decoded: new tokens but
    the first of each, over the time that they add; None if that came out as nothing.
    """

    prompt: float
    output: float
    decoded: float | None


@dataclass(frozen=True)
class Summary:
    """Medians over rounds; seconds and bytes.

    gap_median_s, gap_p99_s: the time between one token and the next of a single request, over the gaps of all rounds
    together; None if batch size 1 was not measured.
    """

    versions: dict[str, str]
    startup_s: float
    peak_memory_at_ready: float
    peak_memory: float
    long_prompt_s: float
    gap_median_s: float | None
    gap_p99_s: float | None
    rates: dict[int, Rates]


@dataclass(frozen=True)
class Agreement:
    """How many of a batch's texts are the same in two engines, and the token where each of the others parts."""

    engine: str
    batch_size: int
    equal_texts: int
    first_differences: dict[int, int]


def summarise(rounds: Sequence[Report]) -> Summary:
    batches = [batch for report in rounds for batch in report.batches]
    gaps = sorted(gap for batch in batches if batch.batch_size == 1 for gap in batch.token_gaps_s)
    return Summary(
        versions=rounds[0].versions,
        startup_s=median(report.startup_s for report in rounds),
        peak_memory_at_ready=median(report.peak_memory_at_ready for report in rounds),
        peak_memory=median(report.peak_memory for report in rounds),
        long_prompt_s=median(report.long_prompt_s for report in rounds),
        gap_median_s=median(gaps) if gaps else None,
        gap_p99_s=percentile(gaps, 99) if gaps else None,
        rates={
            first.batch_size: rates_of([batch for batch in batches if batch.batch_size == first.batch_size])
            for first in rounds[0].batches
        },
    )


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The smallest value that at least ``percent`` of the values do not exceed (nearest rank)."""
    rank = -(-len(ordered) * percent // 100)
    return ordered[rank - 1]


def rates_of(batches: Sequence[BatchReport]) -> Rates:
    decoding = [
        (batch.output_tokens - batch.batch_size) / (batch.all_tokens_s - batch.first_token_s)
        for batch in batches
        if batch.all_tokens_s > batch.first_token_s
    ]
    return Rates(
        prompt=median(batch.prompt_tokens / batch.first_token_s for batch in batches),
        output=median(batch.output_tokens / batch.all_tokens_s for batch in batches),
        decoded=median(decoding) if decoding else None,
    )


def compare_texts(reports: dict[str, list[Report]], reference: str) -> list[Agreement]:
    """Every engine's first round against the reference's, batch by batch. Empty if the reference did not run."""
    if reference not in reports:
        return []
    expected = reports[reference][0].batches
    return [
        compare_batch(engine, batch, other)
        for engine, rounds in reports.items()
        if engine != reference
        for batch, other in zip(rounds[0].batches, expected, strict=True)
    ]


def compare_batch(engine: str, batch: BatchReport, expected: BatchReport) -> Agreement:
    differences = {}
    for index, (row, other) in enumerate(zip(batch.token_ids, expected.token_ids, strict=True)):
        parted = [place for place, (a, b) in enumerate(zip(row, other, strict=True)) if a != b]
        if parted:
            differences[index] = parted[0]
    return Agreement(engine, batch.batch_size, batch.batch_size - len(differences), differences)
