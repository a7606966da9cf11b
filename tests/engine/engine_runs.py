"""What the engine's tests share: running to the end, checking that nothing is left, and small caches to run on."""

from __future__ import annotations

from hypothesis import strategies as st

from compiled_engine.engine.core import Engine
from compiled_engine.engine.outputs import RequestOutput
from compiled_engine.engine.sampling_params import SamplingParams
from compiled_engine.runners.base import CacheGroupLimits

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)

pools = st.fixed_dictionaries(
    {
        "block_size": st.integers(1, 4),
        "max_num_seqs": st.integers(1, 5),
        "max_num_batched_tokens": st.integers(1, 12),
        "max_model_len": st.integers(4, 30),
        "cache_groups": st.lists(
            st.builds(CacheGroupLimits, st.integers(2, 16), st.none() | st.integers(1, 8)), min_size=1, max_size=2
        ).filter(lambda groups: any(group.sliding_window != 1 for group in groups)),
    }
)


def finish(engine: Engine) -> dict[str, RequestOutput]:
    """Run until nothing is left; at most a generous number of steps."""
    outputs: dict[str, RequestOutput] = {}
    for _ in range(20_000):
        if not engine.has_unfinished():
            return outputs
        outputs |= {output.request_id: output for output in engine.step()}
    raise AssertionError("the engine does not come to an end")


def check_nothing_is_held(engine: Engine) -> None:
    cache = engine._scheduler.cache
    cache.check_integrity([])
    assert all(pool.num_free_blocks == pool.num_usable_blocks for pool in cache.pools)


def least_blocks(group: CacheGroupLimits, num_tokens: int, block_size: int) -> int:
    """Blocks of ``group`` that a request needs which computes token by token."""
    window = group.sliding_window or num_tokens
    seen = [range(max(0, position - window + 1), position + 1) for position in range(num_tokens)]
    return max(len({place // block_size for place in places}) for places in seen)
