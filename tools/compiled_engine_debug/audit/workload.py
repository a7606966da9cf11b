"""The standard workload, served by an engine, and short enough for every step to be looked at from all sides."""

from __future__ import annotations

from compiled_engine.engine.core import Engine
from compiled_engine_debug.workload import standard_workload

_MAX_TOKENS = 8


def run_workload(engine: Engine) -> None:
    """Serve the standard workload to its end, without token 0: that is padding's, which an audit tells apart."""
    workload = standard_workload(engine.limits, max_tokens=_MAX_TOKENS)
    for prompt, params in zip(workload.prompts, workload.params, strict=True):
        engine.add_request([max(1, token) for token in prompt if isinstance(token, int)], params)
    while engine.has_unfinished():
        engine.step()
