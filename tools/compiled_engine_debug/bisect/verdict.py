"""Judging a rung by what it was compared with."""

from __future__ import annotations

from dataclasses import dataclass

from compiled_engine_debug.bisect.compare import Measured, Watch
from compiled_engine_debug.bisect.outcome import Verdict


@dataclass(frozen=True)
class Below:
    """The rung just below, where that is not clean. ``first``: where it diverged."""

    watch: Watch
    first: Measured | None


@dataclass(frozen=True)
class Judgement:
    """``watch``: whose first differences are to be reported; None for a rung without any of its own."""

    verdict: Verdict
    watch: Watch | None = None


def judge(oracle: Watch, clean: Watch, below: Below | None, *, by_oracle: bool) -> Judgement:
    """``oracle`` and ``clean`` saw the differences from transformers and from the last clean rung, which may be one.

    ``below`` None: the rung just below is that clean one. ``by_oracle`` False: being far from transformers is no fault.
    """
    if not by_oracle and clean is oracle:
        return Judgement(Verdict.NOT_JUDGED)
    if not clean.agrees:
        if below is None:
            return Judgement(Verdict.DIVERGES, clean)
        if below.watch.agrees:
            return Judgement(Verdict.INHERITS)
        first = clean.first_places[0]
        inherited = below.first is not None and first.place == below.first.place
        return Judgement(Verdict.DIVERGES, below.watch if inherited else clean)
    if by_oracle and not oracle.agrees:
        return Judgement(Verdict.DRIFTS, oracle)
    return Judgement(Verdict.CLEAN)
