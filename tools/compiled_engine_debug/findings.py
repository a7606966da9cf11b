"""What a debugging tool has found wrong: one sentence, and the exact place as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Finding:
    """One fault. ``detector`` is the stable identifier of what found it; ``message`` says it in one sentence.

    The other fields name the place, as far as it has one: ``step`` counts the steps of the run from 0, ``layer`` is a
    layer's name, ``request`` a request's id, ``slot`` a cache slot (block * block size + offset), ``key`` a graph's
    name, ``node`` anything else that has a name (a weight, an input array, a launch).
    """

    detector: str
    message: str
    step: int | None = None
    layer: str | None = None
    request: str | None = None
    slot: int | None = None
    key: str | None = None
    node: str | None = None

    def to_json(self) -> dict[str, str | int | None]:
        """All fields, as JSON can hold them."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.detector}: {self.message}"
