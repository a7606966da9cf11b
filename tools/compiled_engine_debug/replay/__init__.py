"""Replaying a bundle: a model of the same shapes, the same steps, and whether the findings come back.

Weights and tokens are random, so that a fault can be worked on without what its reporter must not give away.
"""

from __future__ import annotations

from compiled_engine_debug.replay.outcome import Fate, Verdict
from compiled_engine_debug.replay.session import ReplayReport, replay

__all__ = ["Fate", "ReplayReport", "Verdict", "replay"]
