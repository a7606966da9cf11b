"""The content oracle over attention that takes caches by value, on torch_xla's CPU device, with donated caches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from by_value_machine import ByValueMachine, by_value_machine, check_it_is_found, swapped_caches, swapped_layers
from compiled_engine.runners.torch_xla_platform import TorchXlaPlatform

EXAMPLES = settings(max_examples=10, deadline=None, database=None)


@pytest.fixture(scope="module")
def machine() -> type[ByValueMachine]:
    return by_value_machine(TorchXlaPlatform())


def test_caches_hold_what_was_computed(machine: type[ByValueMachine]) -> None:
    """Whatever layers and caches come and go, one graph for each layer is enough, and nothing runs outside of them."""
    before = machine.platform.counts()
    run_state_machine_as_test(machine, settings=EXAMPLES)
    warm = machine.platform.counts()
    assert warm.graphs - before.graphs <= len(machine.compiled)
    run_state_machine_as_test(machine, settings=EXAMPLES)
    assert machine.platform.counts() == warm


@pytest.mark.parametrize("plant", [swapped_layers, swapped_caches])
def test_planted_faults_are_found(
    machine: type[ByValueMachine], plant: Callable[[type[ByValueMachine]], type[ByValueMachine]]
) -> None:
    check_it_is_found(plant(machine))
