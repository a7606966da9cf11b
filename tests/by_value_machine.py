"""The content machine with attention that takes caches by value, compiled for a platform of the TPU runner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test

from compiled_engine.compile.own_code import with_own_code
from compiled_engine.context import CacheLayer, token_slots
from compiled_engine.ops.by_value import ByValueLayer, GatherAttention, PagedStep
from compiled_engine.runners.caches import register_attention_layers
from compiled_engine.runners.inputs import StepInputs
from compiled_engine.runners.platforms import XlaPlatform
from content_machine import Attend, ContentMachine

MAX_LENGTH = 24


class ByValueMachine(ContentMachine):
    """Shapes are the same in all examples, so that each layer's attention is compiled once."""

    platform: XlaPlatform
    compiled: dict[str, Callable[..., torch.Tensor]]
    min_tokens = 12

    @initialize(rows=st.integers(1, 4), budget=st.integers(1, 9), caching=st.sampled_from([True, True, False]))
    def start(self, rows, budget, caching):
        super().start(8, 7, window=4, block_size=3, rows=rows, budget=budget, caching=caching)

    def register_layers(self):
        self.attention = GatherAttention(self.block_size, MAX_LENGTH, self.platform.donate)
        register_attention_layers(self.context, self.specs.values(), self.block_size, torch.float32, ByValueLayer)

    def new_caches(self):
        caches = super().new_caches()
        moved = {id(cache): self.platform.to_device([cache])[0] for cache in caches.values()}
        return {name: moved[id(cache)] for name, cache in caches.items()}

    @contextmanager
    def attention_of(self, inputs: StepInputs) -> Iterator[Attend]:
        num_padding = inputs.num_padded_tokens - inputs.num_tokens
        by_group = [
            self.attention.host_inputs(
                PagedStep(inputs.query_start_loc, inputs.seq_lens, block_table, slot_mapping, num_padding),
                group.sliding_window,
            )
            for group, block_table, slot_mapping in zip(
                self.context.groups, inputs.block_tables, inputs.slot_mappings, strict=True
            )
        ]

        def attend(name: str, *rows: torch.Tensor) -> torch.Tensor:
            layer = self.context[name]
            query, key, value, *moved = self.platform.to_device([*rows, *by_group[layer.group]])
            with torch.no_grad():
                return self.compiled[name](self.attention, layer, query, key, value, tuple(moved)).cpu()

        yield attend

    def slots(self, layer: CacheLayer) -> np.ndarray:
        return token_slots(layer.kv_cache.cpu()).numpy()


def by_value_machine(platform: XlaPlatform) -> type[ByValueMachine]:
    """The machine on ``platform``. All examples share the compiled functions, which see new layers in each."""

    def attend(attention: GatherAttention, *args: Any) -> torch.Tensor:
        return attention.attend(*args)

    names = [f"layers.{index}" for index in range(5)]
    compiled = {name: platform.compile(with_own_code(attend)) for name in names}
    return type("ByValueMachine", (ByValueMachine,), {"platform": platform, "compiled": compiled})


def check_it_is_found(machine: type[ByValueMachine]) -> None:
    """A machine with a planted fault fails."""
    until_it_fails = settings(
        max_examples=20,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        print_blob=False,
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=until_it_fails)


def swapped_layers(machine: type[ByValueMachine]) -> type[ByValueMachine]:
    """A planted fault: two layers of one shape are called by each other's name."""
    swapped = {"layers.0": "layers.3", "layers.3": "layers.0"}
    return type("SwappedLayers", (machine,), {"called": lambda self, name: swapped.get(name, name)})


def swapped_caches(machine: type[ByValueMachine]) -> type[ByValueMachine]:
    """A planted fault: two layers of one shape change caches after every step, which compiled code must see."""

    def step(self: ByValueMachine) -> None:
        machine.step(self)
        first, second = self.context["layers.0"], self.context["layers.3"]
        first._kv_cache, second._kv_cache = second._kv_cache, first._kv_cache

    return type("SwappedCaches", (machine,), {"step": step})
