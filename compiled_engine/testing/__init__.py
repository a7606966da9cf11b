"""For the tests of others: hypothesis strategies and a state machine for cache binding.

Draw contexts, caches and corruptions of caches with ``layer_names``, ``kv_cache_specs``, ``static_forward_contexts``,
``kv_caches_for`` and ``corruptions``. Run ``KVBindingMachine`` on an engine of your own, or on attention layers alone::

    class MyAttention(CacheLayer):
        def store(self, block, offset, key, value):
            self.kv_cache[block, offset, 0], self.kv_cache[block, offset, 1] = key, value

    def make_runner():
        context = StaticForwardContext()
        for name in ("layers.0.attn", "layers.1.attn"):
            context.register(name, MyAttention(name, KVCacheSpec(4, 2, 8, torch.float32)))
        context.seal()
        return ContextRunner(context, write=MyAttention.store)

    TestMyAttention = KVBindingMachine.for_runner(make_runner).TestCase

pytest then tries random sequences of allocating, binding, writing, unbinding and closing, right and wrong, on two
runners side by side, and shrinks what fails to the shortest sequence. Needs the extra ``test``.
"""

from __future__ import annotations

try:
    import hypothesis  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "hypothesis":
        raise
    raise ModuleNotFoundError(
        "compiled_engine.testing needs hypothesis, which is in the extra `test`: pip install 'compiled-engine[test]'",
        name="hypothesis",
    ) from error

from .corruptions import Corruption, CorruptionKind, corruptions
from .machine import KVBindingMachine
from .runner import BindableRunner, ContextRunner
from .snapshot import ContextSnapshot, StorageContents
from .strategies import kv_cache_specs, kv_caches_for, layer_names, static_forward_contexts

__all__ = [
    "BindableRunner",
    "ContextRunner",
    "ContextSnapshot",
    "Corruption",
    "CorruptionKind",
    "KVBindingMachine",
    "StorageContents",
    "corruptions",
    "kv_cache_specs",
    "kv_caches_for",
    "layer_names",
    "static_forward_contexts",
]
