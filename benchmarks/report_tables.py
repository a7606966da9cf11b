"""What the measurements say, as tables for a terminal: every engine's figures, and this engine's divided by them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from catalogue import OURS, REFERENCE
from figures import Figure, number
from summary import Agreement, Summary

MIB = 2**20


def rate_figures(summaries: dict[str, Summary], what: str) -> list[Figure]:
    """One figure for each batch size. what: a field of ``Rates``."""
    sizes = next(iter(summaries.values())).rates
    return [
        Figure(
            f"batch {size}",
            "tokens/s",
            True,
            {engine: getattr(summary.rates[size], what) for engine, summary in summaries.items()},
        )
        for size in sizes
    ]


def single_figures(summaries: dict[str, Summary], long_prompt_tokens: int) -> list[Figure]:
    """Latencies of one request, start-up and memory."""

    def figure(label: str, unit: str, field: str, scale: float) -> Figure:
        values = {engine: getattr(summary, field) for engine, summary in summaries.items()}
        scaled = {engine: None if value is None else value * scale for engine, value in values.items()}
        return Figure(label, unit, False, scaled)

    return [
        figure(f"first token after {long_prompt_tokens}", "ms", "long_prompt_s", 1e3),
        figure("token gap", "ms", "gap_median_s", 1e3),
        figure("token gap p99", "ms", "gap_p99_s", 1e3),
        figure("start-up", "s", "startup_s", 1),
        figure("peak memory", "MiB", "peak_memory", 1 / MIB),
    ]


def show(console: Console, summaries: dict[str, Summary], agreements: Iterable[Agreement], long_tokens: int) -> None:
    console.print(comparison_table("New tokens per second, end to end", rate_figures(summaries, "output")))
    console.print(comparison_table("New tokens per second, decoding alone", rate_figures(summaries, "decoded")))
    console.print(comparison_table("Prompt tokens per second", rate_figures(summaries, "prompt")))
    singles = single_figures(summaries, long_tokens)
    console.print(comparison_table("One request, start and memory: less is better", singles))
    for entry in agreements:
        console.print(agreement_line(entry), highlight=False)


def comparison_table(title: str, figures: Sequence[Figure]) -> Table:
    """A row for each engine, and below each peer's row this engine's values divided by the peer's."""
    table = Table(title=title)
    table.add_column("engine", no_wrap=True)
    for figure in figures:
        table.add_column(f"{figure.label}\n{figure.unit}", justify="right")
    for engine in figures[0].values:
        table.add_row(engine, *(number(figure.values[engine]) for figure in figures))
        if engine != OURS and OURS in figures[0].values:
            ratios = (ratio(figure.values[OURS], figure.values[engine]) for figure in figures)
            table.add_row("  ours / theirs", *ratios, style="dim", end_section=True)
    return table


def ratio(ours: float | None, theirs: float | None) -> str:
    return f"{ours / theirs:.2f}" if ours and theirs else "-"


def agreement_line(entry: Agreement) -> str:
    line = f"{entry.engine}, batch {entry.batch_size}: {entry.equal_texts} of {entry.batch_size} texts as {REFERENCE}"
    if entry.first_differences:
        places = ", ".join(f"{index} at {place}" for index, place in entry.first_differences.items())
        line += f"; first difference (text at token): {places}"
    return line
