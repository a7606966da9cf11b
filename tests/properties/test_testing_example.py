"""The example of compiled_engine.testing: an attention layer of one's own, tested in a few lines."""

from __future__ import annotations

import torch

from compiled_engine.context import CacheLayer, KVCacheSpec, StaticForwardContext
from compiled_engine.testing import ContextRunner, KVBindingMachine


class MyAttention(CacheLayer):
    """An attention layer that stores K and V in its own way."""

    def store(self, block: int, offset: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.kv_cache[block, offset] = torch.stack((key, value))


def make_runner() -> ContextRunner:
    context = StaticForwardContext()
    for name, target in (("layers.0.attn", None), ("layers.1.attn", None), ("layers.2.attn", "layers.0.attn")):
        context.register(name, MyAttention(name, KVCacheSpec(4, 2, 8, torch.float32, shares_with=target)))
    context.seal()
    return ContextRunner(context, write=MyAttention.store)


TestMyAttention = KVBindingMachine.for_runner(make_runner).TestCase
