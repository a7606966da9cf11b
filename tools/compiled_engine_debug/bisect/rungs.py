"""The rungs of the ladder, and how each is built on the one below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from compiled_engine.config import EngineConfig
from compiled_engine.errors import ConfigError
from compiled_engine.runners.batch import ScheduledBatch
from compiled_engine_debug.bisect import compilers
from compiled_engine_debug.bisect.compilers import CompilerFactory
from compiled_engine_debug.bisect.runners import Adjustment, without_graphs

ORACLE = "transformers"
"""The name of the lowest rung."""

DEFAULT_GRAPH_MODE = "full_and_piecewise"

# What the padded rung captures for, beyond the largest step.
_MORE_REQUESTS, _MORE_TOKENS = 3, 8


@dataclass(frozen=True)
class Rung:
    """One way to run the model.

    ``compiler``: what compiles its pieces; None: it runs those of the rung below. ``captures``: whether steps are
    replayed from captured graphs; ``pads``: whether these are larger than every step. ``adjust``: what is done to its
    runner before it captures, to try a change.
    """

    name: str
    about: str
    compiler: CompilerFactory | None = None
    captures: bool = False
    pads: bool = False
    adjust: Adjustment | None = None


RUNGS = (
    Rung("eager", "the plan, its pieces run operation by operation", compilers.eager),
    Rung("aot_eager", "pieces traced by AOTAutograd and run operation by operation", compilers.aot_eager),
    Rung("inductor", "pieces compiled by Inductor", compilers.inductor),
    Rung("aoti", "pieces compiled ahead of time by AOTInductor", compilers.aoti),
    Rung("graphs", "steps replayed from graphs of their very sizes", captures=True),
    Rung("padding", "steps padded to larger graphs", captures=True, pads=True),
)
"""All rungs above transformers, in order."""


def choose_rungs(names: Sequence[str]) -> tuple[Rung, ...]:
    """The rungs ``names``, in the order of the ladder; transformers, always the lowest, may be named too.

    Raises ``ConfigError`` for another name, and for graphs without a rung that compiles their pieces.
    """
    known = {rung.name: rung for rung in RUNGS}
    if unknown := [name for name in names if name not in known and name != ORACLE]:
        raise ConfigError(f"there is no rung {unknown[0]!r}: choose among {', '.join([ORACLE, *known])}")
    chosen = tuple(rung for rung in RUNGS if rung.name in names)
    if not chosen or chosen[0].compiler is None:
        raise ConfigError("choose a rung that compiles pieces (eager, aot_eager, inductor or aoti), and what is above")
    return chosen


def config_of(rung: Rung, config: EngineConfig, steps: Sequence[ScheduledBatch]) -> EngineConfig:
    """The settings of ``rung``: ``config`` with graphs for the sizes of ``steps``, for larger ones, or none."""
    if not rung.captures:
        return without_graphs(config)
    mode = config.graph_mode if config.captures_graphs else DEFAULT_GRAPH_MODE
    if not rung.pads:
        sizes = tuple(sorted({step.num_scheduled_tokens for step in steps}))
        return replace(config, graph_mode=mode, graph_sizes=sizes, max_graph_size=None)
    tokens = config.max_num_batched_tokens + _MORE_TOKENS
    return replace(
        config,
        graph_mode=mode,
        graph_sizes=(tokens,),
        max_graph_size=None,
        max_num_seqs=config.max_num_seqs + _MORE_REQUESTS,
        max_num_batched_tokens=tokens,
    )
