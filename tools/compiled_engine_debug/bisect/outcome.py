"""What came of a rung, and what is to be reported of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from compiled_engine_debug.bisect.compare import Measured
from compiled_engine_debug.bisect.trace import TensorName
from compiled_engine_debug.bisect.walk import Culprit
from compiled_engine_debug.findings import Finding

_SHOWN_DIGITS = 12


class Verdict(str, Enum):
    """How a rung compares with those below it."""

    CLEAN = "agrees"
    DIVERGES = "DIVERGES"
    """It differs from the last clean rung, and not as the rung just below does."""
    DRIFTS = "DRIFTS"
    """It agrees with the clean rung below, and no longer with transformers."""
    INHERITS = "as below"
    """It agrees with the rung below, which diverged."""
    NOT_JUDGED = "not judged"
    """Its numbers cannot be those of transformers, whose weights are not quantised."""
    FAILED = "FAILED"
    """It raised while it was built or run."""
    SKIPPED = "skipped"
    """What it needs is not installed here."""


@dataclass(frozen=True)
class TokenDifference:
    """A rung chose ``token`` where transformers chose ``expected``, whose logit there is larger by ``gap``."""

    step: int
    request: str
    token: int
    expected: int
    gap: float

    def __str__(self) -> str:
        return (
            f"step {self.step}, request {self.request}: token {self.token} instead of {self.expected}, whose logit in "
            f"transformers is larger by {self.gap:.3g}"
        )


@dataclass(frozen=True)
class Divergence:
    """Where the rung ``rung`` parts with ``reference`` first, and what is to blame."""

    rung: str
    reference: str
    measured: Measured
    culprit: Culprit

    def finding(self) -> Finding:
        """The same as other tools report it. ``key`` is the piece's."""
        place, culprit = self.measured.place, self.culprit
        node = culprit.node
        parts = [
            f"{self.rung} parts with {self.reference} in step {place.step}, request {place.request}, {place.site}",
            f"by {self.measured.difference}" if place.site.tensor is not TensorName.TOKEN else "",
            f"({culprit.reason}",
        ]
        if culprit.piece:
            parts.append(f"; piece {culprit.piece[:_SHOWN_DIGITS]}, which makes {', '.join(culprit.outputs)}")
        if culprit.weights:
            parts.append(f"; weight {', '.join(culprit.weights)}")
        if node is not None:
            parts.append(f"; node {node.name} = {node.operation}")
            if node.source:
                parts.append(f"; source {node.source}")
        message = " ".join(part for part in parts if part).replace(" ;", ";") + ")"
        return Finding(
            detector="bisect",
            message=message,
            step=place.step,
            layer=place.site.layer,
            request=place.request,
            key=culprit.piece or None,
            node=None if node is None else node.name,
        )


@dataclass(frozen=True)
class RungOutcome:
    """``reference``: the rung compared with; ``from_reference``, ``from_oracle``: the largest differences.

    ``note``: why it was skipped, what it raised, or how its steps ran.
    """

    rung: str
    verdict: Verdict
    note: str = ""
    reference: str = ""
    from_reference: Measured | None = None
    from_oracle: Measured | None = None
    divergences: tuple[Divergence, ...] = ()
    tokens: tuple[TokenDifference, ...] = ()
    seconds: float = 0.0

    @property
    def is_clean(self) -> bool:
        """Whether rungs above may be compared with this one."""
        return self.verdict in (Verdict.CLEAN, Verdict.NOT_JUDGED)

    @property
    def is_judged(self) -> bool:
        """Whether it says anything: it was run and compared, or failed at that."""
        return self.verdict not in (Verdict.NOT_JUDGED, Verdict.SKIPPED)

    @property
    def is_wrong(self) -> bool:
        """Whether something is wrong that is this rung's own."""
        return self.verdict in (Verdict.DIVERGES, Verdict.DRIFTS, Verdict.FAILED)
