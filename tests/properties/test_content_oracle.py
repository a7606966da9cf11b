"""What every layer reads from its paged cache is what was computed for that very prefix, whatever happened before.

Scheduler, block pools, static forward context, attention op and CPU kernels run together. The K/V that is written for
position i of a request is a hash of (layer, first i + 1 tokens), and so is its query. After every step everything that
any layer of any running request can see, everything that is published for later requests, and the result of every
attention is compared with what these hashes say. The faults at the end show that it would be noticed.
"""

from __future__ import annotations

import dataclasses
import hashlib
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from compiled_engine.context import (
    CacheLayer,
    ForwardContext,
    StaticForwardContext,
    bind_kv_cache,
    set_forward_context,
    token_slots,
    unbind_kv_cache,
)
from compiled_engine.engine.block_pool import BlockPool
from compiled_engine.engine.kv_cache_manager import KVCacheManager
from compiled_engine.engine.prefix_index import PrefixBlock, hash_block
from compiled_engine.engine.request import Request
from compiled_engine.engine.scheduler import Scheduler
from compiled_engine.errors import BlockPoolError, RequestError
from compiled_engine.ops.attention import AttentionSpec
from compiled_engine.ops.cpu import CpuAttention
from compiled_engine.runners.base import CacheGroupLimits
from compiled_engine.runners.caches import allocate_cache_groups, register_attention_layers
from compiled_engine.runners.inputs import StepInputs, build_step_inputs

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
        self.backend = CpuAttention(torch.float32)
        self.context = StaticForwardContext()
        self.specs = {spec.layer_name: spec for spec in layer_specs(window)}
        register_attention_layers(self.context, self.specs.values(), block_size, torch.float32, self.backend)
        bind_kv_cache(allocate_cache_groups(self.context, self.limits), self.context)
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
            bind_kv_cache(allocate_cache_groups(self.context, self.limits), self.context)
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
        inputs = self.stage(build_step_inputs([item.as_row(self.block_size) for item in scheduled], self.block_size, 2))
        prefixes = [
            tuple(item.request.token_ids[: position + 1])
            for item in scheduled
            for position in range(item.request.num_computed_tokens, item.request.num_computed_tokens + item.num_tokens)
        ]
        metadata = [
            self.backend.build_metadata(
                inputs.query_start_loc, inputs.seq_lens, table, self.block_size, (group.sliding_window,)
            )
            for table, group in zip(inputs.block_tables, self.limits, strict=True)
        ]
        context = ForwardContext(
            static_context=self.context,
            attention_metadata=tuple(metadata),
            slot_mapping=inputs.slot_mappings,
            num_tokens=inputs.num_tokens,
            num_padded_tokens=inputs.num_padded_tokens,
        )
        with set_forward_context(context):
            for name, spec in self.specs.items():
                out = torch.empty(inputs.num_padded_tokens, HEADS, HEAD_DIM)
                # Padding is nan: whoever reads block 0, where it goes, shows it.
                rows = np.full((inputs.num_padded_tokens, 2, spec.num_kv_heads, HEAD_DIM), np.nan, np.float32)
                rows[: len(prefixes)] = [self.key_value(name, prefix) for prefix in prefixes]
                query = np.zeros((inputs.num_padded_tokens, HEADS, HEAD_DIM), np.float32)
                query[: len(prefixes)] = [self.query(name, prefix) for prefix in prefixes]
                key, value = torch.from_numpy(rows).unbind(1)
                torch.ops.compiled_engine.attention(torch.from_numpy(query), key, value, out, self.called(name))
                if "attention" in self.eyes:
                    self.check_attention(spec, prefixes, out)

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
            slots = token_slots(layer.kv_cache).numpy()
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


TestContentOracle = ContentMachine.TestCase


# Planted faults: each is a subclass or a patch that breaks one thing, and must be found.


class SwappedLayers(ContentMachine):
    """The graph calls two layers by each other's name, so each writes into the other's cache."""

    def called(self, name):
        return {"layers.0": "layers.3", "layers.3": "layers.0"}.get(name, name)


class CachesSwappedOnRebinding(ContentMachine):
    """Two layers of one shape change caches while requests run, as when a list is bound in another order."""

    def step(self):
        super().step()
        first, second = self.context["layers.0"], self.context["layers.3"]
        first._kv_cache, second._kv_cache = second._kv_cache, first._kv_cache


class SlotOffByOne(ContentMachine):
    """K/V is written one slot too far, in either group."""

    def stage(self, inputs):
        sizes = [group.num_blocks * self.block_size for group in self.limits]
        shifted = [(slots + 1) % size for slots, size in zip(inputs.slot_mappings, sizes, strict=True)]
        return dataclasses.replace(inputs, slot_mappings=tuple(shifted))


class StaleBlockTableColumn(ContentMachine):
    """A block table that stays from step to step, of which a column is not rewritten when a row gets a new request."""

    column = 0

    def stage(self, inputs):
        before = getattr(self, "tables", inputs.block_tables)
        self.tables = tuple(table.copy() for table in inputs.block_tables)
        for table, old, group in zip(self.tables, before, self.limits, strict=True):
            rows = min(len(table), len(old))
            if group.sliding_window is None and min(table.shape[1], old.shape[1]) > self.column:
                kept = old[:rows, self.column]
                table[:rows, self.column] = np.where(kept != 0, kept, table[:rows, self.column])
        return dataclasses.replace(inputs, block_tables=self.tables)


def free_twice(patch):
    """A request that ends gives its blocks back twice; blocks it shared are taken from the others."""
    release = KVCacheManager.release

    def faulty(self, request):
        tables = [list(table) for table in request.block_ids]
        release(self, request)
        for pool, table in zip(self.pools, tables, strict=True):
            pool.free([block for block in table if block and pool.reference_count(block)])

    patch.setattr(KVCacheManager, "release", faulty)


def free_twice_unshared(patch):
    """The same, of blocks that nobody else holds: the pool itself refuses."""
    release = KVCacheManager.release

    def faulty(self, request):
        tables = [list(table) for table in request.block_ids]
        release(self, request)
        for pool, table in zip(self.pools, tables, strict=True):
            pool.free([block for block in table if block])

    patch.setattr(KVCacheManager, "release", faulty)


def free_too_early(patch):
    """A window is taken for one position shorter than it is when blocks are left behind."""
    first_visible = KVCacheManager._first_visible

    def faulty(self, window, position):
        return first_visible(self, window if window is None else max(1, window - 1), position)

    patch.setattr(KVCacheManager, "_first_visible", faulty)


def free_while_held(patch):
    """A running request's first block falls free and is handed to another, while its table still names it."""
    record_computed = KVCacheManager.record_computed

    def faulty(self, request, num_computed_before):
        record_computed(self, request, num_computed_before)
        if num_computed_before == 0:
            self.pools[0].free(request.block_ids[0][:1])

    patch.setattr(KVCacheManager, "record_computed", faulty)
    patch.setattr(BlockPool, "free", lambda self, blocks, free=BlockPool.free: free(self, held(self, blocks)))


def held(pool, blocks):
    return [block for block in dict.fromkeys(blocks) if pool.reference_count(block)]


def sharer_that_writes(patch):
    """A layer that shares another's cache stores its own keys and values there."""
    patch.setattr(CacheLayer, "writes_cache", property(lambda self: self.spec is not None))


def hit_of_an_uncomputed_block(patch):
    """All full blocks of a prompt are published as soon as it is admitted."""
    admit, publish = KVCacheManager.admit, BlockPool.publish

    def faulty(self, request, num_cached_tokens, num_new_tokens):
        count = admit(self, request, num_cached_tokens, num_new_tokens)
        if count and self.enable_prefix_caching:
            prefixes = self._prefixes(request, request.num_tokens // self.block_size)
            for pool, table in zip(self.pools, request.block_ids, strict=True):
                for block, prefix in zip(table, prefixes, strict=False):
                    if block:
                        pool.publish(block, prefix)
        return count

    patch.setattr(KVCacheManager, "admit", faulty)
    patch.setattr(
        BlockPool, "publish", lambda self, block, prefix: self.content(block) is None and publish(self, block, prefix)
    )


def collision_accepted(patch):
    """What the hash finds is taken without a look at the tokens."""
    patch.setattr(PrefixBlock, "continues", lambda self, parent, token_ids: True)


def parent_not_compared(patch):
    """Only the last block's tokens are looked at, not what comes before them."""
    patch.setattr(PrefixBlock, "continues", lambda self, parent, token_ids: self.token_ids == token_ids)


def hit_of_all_tokens(patch):
    """A prompt that is cached as a whole is taken as a whole, and nothing is left to compute."""
    find_cached = KVCacheManager.find_cached

    def faulty(self, request):
        request.token_ids.append(0)
        try:
            return find_cached(self, request)
        finally:
            request.token_ids.pop()
            del request.prefixes[request.num_tokens // self.block_size :]

    patch.setattr(KVCacheManager, "find_cached", faulty)


def content_survives_reuse(patch):
    """A block that is handed out again can still be found under what it held before."""
    take = BlockPool._take

    def faulty(self):
        before = dict(self._published)
        block = take(self)
        self._published.update((prefix, other) for prefix, other in before.items() if other == block)
        return block

    patch.setattr(BlockPool, "_take", faulty)


FAULTS = [
    (SwappedLayers, None, "attention content"),
    (CachesSwappedOnRebinding, None, "attention content"),
    (SlotOffByOne, None, "attention content"),
    (StaleBlockTableColumn, None, "attention"),
    (ContentMachine, free_twice, "counts"),
    (ContentMachine, free_twice_unshared, "counts"),
    (ContentMachine, free_too_early, "attention content"),
    (ContentMachine, free_while_held, "counts attention content"),
    (ContentMachine, sharer_that_writes, "attention content"),
    (ContentMachine, hit_of_an_uncomputed_block, "attention content"),
    (ContentMachine, collision_accepted, "attention content"),
    (ContentMachine, parent_not_compared, "attention content"),
    (ContentMachine, hit_of_all_tokens, ""),
    (ContentMachine, content_survives_reuse, "counts attention content"),
]


def run_with(machine: type[ContentMachine], eyes: str) -> None:
    """Run ``machine`` until it fails, at most 200 times, looking with these of its eyes."""
    quick = settings(
        max_examples=200,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        print_blob=False,
    )
    seeing = type(machine.__name__, (machine,), {"eyes": frozenset(eyes.split())})
    run_state_machine_as_test(seeing, settings=quick)


@pytest.mark.parametrize(
    ("machine", "plant", "eyes"),
    [
        pytest.param(machine, plant, eyes, id=f"{plant.__name__ if plant else machine.__name__}-{eyes or 'progress'}")
        for machine, plant, finders in FAULTS
        for eyes in finders.split() or [""]
    ],
)
def test_planted_faults_are_found(machine, plant, eyes, monkeypatch):
    """By each way of looking that must find them, with the others closed. The pools refuse some by themselves; and a
    step that schedules nothing although requests are unfinished is a fault to all."""
    if plant is not None:
        plant(monkeypatch)
    with pytest.raises((AssertionError, BlockPoolError)):
        run_with(machine, eyes)
