"""``python -m gpu_checks.first_token SETTINGS``: start an engine, write a few tokens, print a line of JSON.

SETTINGS: fields of ``EngineConfig`` as JSON. The line has ``seconds`` from the start of the process to the end of the
first answer, ``token_ids``, ``phases`` of the start, and ``triton_compiled`` and ``triton_found``: kernels that Triton
compiled and that it found in its cache, null where it does not tell.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

from compiled_engine import LLM, SamplingParams


def main() -> None:
    """See the module."""
    kernels = _count_kernels()
    with LLM(**json.loads(sys.argv[1])) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        outputs = llm.generate([[5, 6, 7], [8, 9]], params, use_tqdm=False)
        said: dict[str, Any] = {
            "seconds": llm.ledger.now,
            "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
            "phases": llm.ledger.to_json()["phases"],
            "triton_compiled": None if kernels is None else kernels["compiled"],
            "triton_found": None if kernels is None else kernels["found"],
        }
    print(json.dumps(said))


def _count_kernels() -> Counter[str] | None:
    """Counts kernels from now on; None where Triton is missing or has no place for listeners."""
    try:
        from triton import knobs
    except ImportError:
        return None
    counts: Counter[str] = Counter()

    def listener(*_: Any, cache_hit: bool, **__: Any) -> None:
        counts["found" if cache_hit else "compiled"] += 1

    knobs.compilation.listener = listener
    return counts


if __name__ == "__main__":
    main()
