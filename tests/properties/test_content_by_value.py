"""The content oracle over attention that takes caches by value, compiled for the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from by_value_machine import ByValueMachine, by_value_machine, check_it_is_found, swapped_caches, swapped_layers
from tpu_runners import InductorPlatform

EXAMPLES = settings(max_examples=15, deadline=None)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_caches_hold_what_was_computed(backend: str) -> None:
    """Whatever layers and caches come and go, one graph for each layer is enough."""
    machine = by_value_machine(InductorPlatform(backend))
    run_state_machine_as_test(machine, settings=EXAMPLES)
    assert machine.platform.counts().graphs == len(machine.compiled)


@pytest.mark.parametrize("plant", [swapped_layers, swapped_caches])
def test_planted_faults_are_found(plant: Callable[[type[ByValueMachine]], type[ByValueMachine]]) -> None:
    check_it_is_found(plant(by_value_machine(InductorPlatform("eager"))))
