"""A state machine in which every layer's cache content is known: hashes in place of a model's keys and values.

Scheduler, block pools, static forward context, attention op and CPU kernels run together. The K/V that is written for
position i of a request is a hash of (layer, first i + 1 tokens), and so is its query. After every step everything that
any layer of any running request can see, everything that is published for later requests, and the result of every
attention is compared with what these hashes say.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial

import numpy as np
import torch
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from compiled_engine.context import (
    CacheLayer,
    ForwardContext,
    StaticForwardContext,
    bind_kv_cache,
    set_forward_context,
    token_slots,
    unbind_kv_cache,
)
from compiled_engine.engine.kv_cache_manager import KVCacheManager
from compiled_engine.engine.prefix_index import hash_block
from compiled_engine.engine.request import Request
from compiled_engine.engine.scheduler import Scheduler
from compiled_engine.errors import RequestError
from compiled_engine.ops.attention import AttentionSpec, PagedAttention
from compiled_engine.ops.cpu import CpuAttention
from compiled_engine.ops.cpu.build import load_kernels
from compiled_engine.runners.base import CacheGroupLimits
from compiled_engine.runners.caches import allocate_cache_groups, register_attention_layers
from compiled_engine.runners.inputs import StepInputs, build_step_inputs
from kernel_folder import KERNELS

HEADS, HEAD_DIM = 2, 2
BASE = [0, 1, 1, 0, 1, 0, 0, 1, 1, 0]
prompts = st.builds(
    lambda shared, own: BASE[:shared] + own,
    st.integers(0, len(BASE)),
    st.lists(st.integers(0, 1), min_size=1, max_size=3),
)


def two_bits(parent_hash: int, token_ids: tuple[int, ...]) -> int:
    return hash_block(parent_hash, token_ids) & 3


@lru_cache(maxsize=50_000)
def hashed(what: str, prefix: tuple[int, ...], *shape: int) -> np.ndarray:
    """The oracle: numbers from -1 to 1 that stand for ``what`` after ``prefix``, exact in float32."""
    digest = hashlib.blake2b(f"{what} {prefix}".encode()).digest()
    count = int(np.prod(shape))
    numbers = [int.from_bytes(digest[3 * place : 3 * place + 3], "little") for place in range(count)]
    return (np.array(numbers, dtype=np.float32) / 2**23 - 1).reshape(shape)


def next_token(prefix: list[int], completion: int) -> int:
    return int(hashed(f"next token of completion {completion}", tuple(prefix), 1)[0] > 0)


def layer_specs(window: int) -> list[AttentionSpec]:
    """Two full layers, one with a sliding window, and for each kind one that reads another's cache."""

    def layer(index, num_kv_heads, window=None, shares_with=None):
        return AttentionSpec(
            f"layers.{index}", HEADS, num_kv_heads, HEAD_DIM, 1.0, sliding_window=window, shares_with=shares_with
        )

    return [
        layer(0, 1),
        layer(1, 2, window),
        layer(2, 1, shares_with="layers.0"),
        layer(3, 1),
        layer(4, 2, window, shares_with="layers.1"),
    ]


Attend = Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A layer's attention by name, over queries, keys and values of a step."""


def attend_by_name(name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """By the op that graphs call."""
    out = torch.empty_like(query)
    torch.ops.compiled_engine.attention(query, key, value, out, name)
    return out


class ContentMachine(RuleBasedStateMachine):
    """Requests come, share, grow, are set back and go; ``check_*`` compare with the oracle."""

    # What is looked at. The tests of planted faults close some of these eyes, to see that each finds faults alone.
    eyes = frozenset({"counts", "attention", "content"})

    @initialize(
        full_blocks=st.integers(3, 9),
        sliding_blocks=st.integers(2, 9),
        window=st.integers(1, 6),
        block_size=st.integers(2, 4),
        rows=st.integers(1, 4),
        budget=st.integers(1, 9),
        caching=st.sampled_from([True, True, False]),
    )
    def start(self, full_blocks, sliding_blocks, window, block_size, rows, budget, caching):
        self.limits = (CacheGroupLimits(full_blocks), CacheGroupLimits(sliding_blocks, window))
        self.block_size = block_size
        self.context = StaticForwardContext()
        self.specs = {spec.layer_name: spec for spec in layer_specs(window)}
        self.register_layers()
        bind_kv_cache(self.new_caches(), self.context)
        self.cache = KVCacheManager(self.limits, block_size, enable_prefix_caching=caching, hash_block=two_bits)
        self.scheduler = Scheduler(self.cache, max_num_seqs=rows, max_num_batched_tokens=budget)
        self.requests: dict[int, Request] = {}
        self.completions: dict[int, int] = {}
        self.arrivals = 0

    # Operations.

    @rule(prompt=prompts, output=st.integers(1, 8), n=st.integers(1, 3))
    def add(self, prompt, output, n):
        for completion in range(n):
            request = Request(
                str(self.arrivals), prompt, arrival=self.arrivals, max_output_tokens=output, num_cache_groups=2
            )
            try:
                self.scheduler.add(request)
            except RequestError:
                event("refused")
                return
            self.requests[self.arrivals] = request
            self.completions[self.arrivals] = completion
            self.arrivals += 1

    @rule(work=st.lists(st.tuples(prompts, st.integers(1, 8), st.integers(1, 2)), min_size=1, max_size=4))
    def add_several_and_step(self, work):
        for prompt, output, n in work:
            self.add(prompt, output, n)
        self.steps(8)

    @rule(times=st.integers(1, 10))
    def steps(self, times):
        for _ in range(times):
            self.step()

    @rule(place=st.integers(0, 5))
    def abort(self, place):
        for arrival in sorted(self.requests)[place : place + 1]:
            self.scheduler.finish(self.requests.pop(arrival))
            self.check()

    @rule(how=st.sampled_from(["reset prefix cache", "abort all", "new caches"]))
    def forget(self, how):
        if how == "reset prefix cache":
            self.cache.forget_contents()
        else:
            self.scheduler.abort_all()
            self.requests.clear()
        if how == "new caches":
            unbind_kv_cache(self.context)
            bind_kv_cache(self.new_caches(), self.context)
        self.check()

    def step(self):
        preemptions = sum(request.num_preemptions for request in self.requests.values())
        waiting = set(self.scheduler.waiting)
        scheduled = self.scheduler.schedule()
        assert bool(scheduled) == bool(self.requests)
        if not scheduled:
            return
        if sum(request.num_preemptions for request in self.requests.values()) > preemptions:
            event("preempted")
        if any(item.request in waiting and item.request.num_computed_tokens for item in scheduled):
            event("hit")
        self.forward(scheduled)
        sampling = [item.request for item in scheduled if item.samples]
        self.scheduler.update(scheduled)
        for request in sampling:
            request.append(next_token(request.token_ids, self.completions[request.arrival]))
            if request.num_output_tokens == request.max_output_tokens:
                self.scheduler.finish(request)
                del self.requests[request.arrival]
        self.check()

    # A model's step, with hashes in place of computing.

    def forward(self, scheduled):
        rows = [item.as_row(self.block_size) for item in scheduled]
        inputs = self.stage(build_step_inputs(rows, self.block_size, self.min_tokens))
        prefixes = [
            tuple(item.request.token_ids[: position + 1])
            for item in scheduled
            for position in range(item.request.num_computed_tokens, item.request.num_computed_tokens + item.num_tokens)
        ]
        with self.attention_of(inputs) as attend:
            for name, spec in self.specs.items():
                # Padding is nan: whoever reads block 0, where it goes, shows it.
                rows = np.full((inputs.num_padded_tokens, 2, spec.num_kv_heads, HEAD_DIM), np.nan, np.float32)
                rows[: len(prefixes)] = [self.key_value(name, prefix) for prefix in prefixes]
                query = np.zeros((inputs.num_padded_tokens, HEADS, HEAD_DIM), np.float32)
                query[: len(prefixes)] = [self.query(name, prefix) for prefix in prefixes]
                key, value = torch.from_numpy(rows).unbind(1)
                out = attend(self.called(name), torch.from_numpy(query), key, value)
                if "attention" in self.eyes:
                    self.check_attention(spec, prefixes, out)

    # The attention that is tested; another machine may have another.

    min_tokens = 2

    def register_layers(self):
        self.backend = CpuAttention(torch.float32, load_kernels(KERNELS))
        make_layer = partial(PagedAttention, backend=self.backend)
        register_attention_layers(self.context, self.specs.values(), self.block_size, torch.float32, make_layer)

    def new_caches(self) -> dict[str, torch.Tensor]:
        return allocate_cache_groups(self.context, self.limits)

    @contextmanager
    def attention_of(self, inputs: StepInputs) -> Iterator[Attend]:
        metadata = [
            self.backend.build_metadata(inputs.query_start_loc, inputs.seq_lens, table) for table in inputs.block_tables
        ]
        context = ForwardContext(
            static_context=self.context,
            attention_metadata=tuple(metadata),
            slot_mapping=inputs.slot_mappings,
            num_tokens=inputs.num_tokens,
            num_padded_tokens=inputs.num_padded_tokens,
        )
        with set_forward_context(context):
            yield attend_by_name

    def slots(self, layer: CacheLayer) -> np.ndarray:
        """What is in the layer's cache, by slot."""
        return token_slots(layer.kv_cache).numpy()

    def stage(self, inputs: StepInputs) -> StepInputs:
        return inputs

    def called(self, name: str) -> str:
        """The name by which the graph calls the layer."""
        return name

    def query(self, name, prefix):
        return hashed(f"{name} query", prefix, HEADS, HEAD_DIM)

    def key_value(self, name, prefix):
        return hashed(f"{name} key and value", prefix, 2, self.specs[name].num_kv_heads, HEAD_DIM)

    def stored_by(self, name) -> str:
        """The layer whose keys and values are in the cache of layer ``name``."""
        return self.specs[name].shares_with or name

    # What must hold.

    def check_attention(self, spec, prefixes, out):
        """The op's result is dense attention over the oracle's keys and values of the visible positions."""
        for prefix, found in zip(prefixes, out.double().numpy(), strict=False):
            first = 0 if spec.sliding_window is None else max(0, len(prefix) - spec.sliding_window)
            seen = [
                self.key_value(self.stored_by(spec.layer_name), prefix[: position + 1])
                for position in range(first, len(prefix))
            ]
            keys, values = np.stack(seen, 1).astype(np.float64).repeat(HEADS // spec.num_kv_heads, axis=2)
            scores = np.einsum("hd,lhd->hl", self.query(spec.layer_name, prefix).astype(np.float64), keys)
            weights = np.exp(scores)
            expected = np.einsum("hl,lhd->hd", weights / weights.sum(1, keepdims=True), values)
            np.testing.assert_allclose(found, expected, atol=1e-5, err_msg=f"attention of {spec.layer_name}")

    def check(self):
        if "counts" in self.eyes:
            self.cache.check_integrity(self.requests.values())
        for name, layer in self.context.items() if "content" in self.eyes else ():
            slots = self.slots(layer)
            self.check_running(name, layer, slots)
            self.check_published(name, layer, slots)

    def check_running(self, name, layer, slots):
        """Everything computed that the next token of a running request sees is its own prefix's."""
        window = layer.spec.sliding_window
        for request in self.scheduler.running:
            end = request.num_computed_tokens
            start = 0 if window is None else max(0, end - window + 1)
            table, positions = request.block_ids[layer.group], np.arange(start, end)
            places = np.array(table)[positions // self.block_size] * self.block_size + positions % self.block_size
            self.check_content(name, slots[places], request.token_ids, start, end)

    def check_published(self, name, layer, slots):
        """Every block that a later request could take holds the prefix under which it is found."""
        pool, size = self.cache.pools[layer.group], self.block_size
        for block in range(1, pool.num_blocks):
            prefix = pool.content(block)
            if prefix is not None:
                tokens = prefix.all_token_ids()
                found = slots[block * size : (block + 1) * size]
                self.check_content(name, found, tokens, len(tokens) - size, len(tokens))

    def check_content(self, name, found, tokens, start, end):
        owner = self.stored_by(name)
        for content, position in zip(found, range(start, end), strict=True):
            expected = self.key_value(owner, tuple(tokens[: position + 1]))
            assert content.tobytes() == expected.tobytes(), f"{name} has other content at {position} of {tokens}"

    def teardown(self):
        if hasattr(self, "scheduler"):
            for _ in range(2000):
                if not self.requests:
                    break
                self.step()
            assert not self.requests
            self.context.close()
