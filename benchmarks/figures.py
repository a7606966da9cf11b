"""One measured quantity of several engines, for tables and charts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One measured quantity of all engines. ``more_is_better`` says which way a ratio is good."""

    label: str
    unit: str
    more_is_better: bool
    values: dict[str, float | None]


def number(value: float | None) -> str:
    """``value`` with about three digits; a dash for none."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
