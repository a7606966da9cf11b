"""Numbers as people read them. The page holds every exact number beside its text."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_engine.compile.ledger import format_bytes

UNKNOWN = "unknown"
_MOST_LISTED = 6


def count_text(number: int) -> str:
    """``number`` with separators: "12,345"."""
    return f"{number:,}"


def counted(number: int, noun: str) -> str:
    """``number`` and ``noun``, in the plural where that is right: "1 step", "2 steps"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def bytes_text(num_bytes: int | None) -> str:
    """``num_bytes`` with a binary unit; None is unknown."""
    return UNKNOWN if num_bytes is None else format_bytes(num_bytes)


def seconds_text(seconds: float) -> str:
    """``seconds`` to three digits, with the unit that fits: "1.23 s", "45.6 ms", "789 us"."""
    size = abs(seconds)
    if size >= 0.9995:
        return f"{seconds:,.0f} s" if size >= 99.95 else f"{seconds:.1f} s" if size >= 9.995 else f"{seconds:.2f} s"
    milliseconds = seconds * 1e3
    if size >= 0.9995e-3:
        return f"{milliseconds:.0f} ms" if size >= 0.09995 else f"{milliseconds:.1f} ms"
    return f"{seconds * 1e6:.0f} us"


def share_text(part: float, whole: float) -> str:
    """``part`` of ``whole`` in per cent: "12.5%". Nothing of nothing is 0%; what is there is never shown as 0%."""
    if not part or not whole:
        return "0%"
    percent = 100 * part / whole
    return "< 0.1%" if percent < 0.1 else f"{percent:.1f}%"


def shape_text(shape: tuple[int | str, ...]) -> str:
    """``shape`` in brackets: "[4, s0, 64]"."""
    return f"[{', '.join(map(str, shape))}]"


def address_text(address: int | None) -> str:
    """``address`` in hexadecimal; None: the device does not tell it."""
    return "no address" if address is None else f"{address:#x}"


def listed(texts: Sequence[str]) -> str:
    """The first of ``texts``, and how many more there are: "a; b; and 3 more"."""
    more = len(texts) - _MOST_LISTED
    return "; ".join(texts[:_MOST_LISTED]) + (f"; and {more:,} more" if more > 0 else "")
