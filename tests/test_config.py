"""Settings: what a device makes of them, and those of a TPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compiled_engine.config import GRAPH_MODES, EngineConfig
from compiled_engine.errors import ConfigError


@pytest.mark.parametrize(
    ("device", "device_type", "graph_mode"),
    [
        ("cpu", "cpu", "none"),
        ("cuda", "cuda", "full_and_piecewise"),
        ("cuda:11", "cuda", "full_and_piecewise"),
        ("tpu", "tpu", "none"),
    ],
)
def test_devices(device: str, device_type: str, graph_mode: str) -> None:
    config = EngineConfig(device=device)
    assert (config.device_type, config.resolved_graph_mode) == (device_type, graph_mode)
    assert config.captures_graphs == (graph_mode != "none")


@pytest.mark.parametrize("device", ["", "gpu", "tpu:0", "tpus", "cputpu", "cuda:", "cuda:x", "TPU", None, 0])
def test_devices_that_are_none(device: Any) -> None:
    with pytest.raises(ConfigError, match=r"device is .*: choose one of cpu, cuda, cuda:N, tpu"):
        EngineConfig(device=device)


@pytest.mark.parametrize("mode", GRAPH_MODES)
def test_a_tpu_has_no_graph_mode(mode: str) -> None:
    if mode == "none":
        assert not EngineConfig(device="tpu", graph_mode=mode).captures_graphs
        return
    with pytest.raises(ConfigError, match=f"graph_mode is '{mode}' and device is 'tpu'.*: leave graph_mode out"):
        EngineConfig(device="tpu", graph_mode=mode)
    assert EngineConfig(device="cuda", graph_mode=mode).captures_graphs


@pytest.mark.parametrize(
    "setting",
    [{"quantization": "int8"}, {"quantization": "int4"}, {"graphs": "bundle"}, {"require_precompiled": True}],
    ids=str,
)
def test_settings_that_a_tpu_cannot_honour(setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(ConfigError, match=f"{name} is .* and device is 'tpu', but .*: leave {name} out"):
        EngineConfig(device="tpu", **setting)
    EngineConfig(device="cpu", **setting)


@pytest.mark.parametrize("name", ["graph_sizes", "token_buckets", "request_buckets"])
def test_lists_of_sizes(name: str) -> None:
    assert getattr(EngineConfig(), name) is None
    given: tuple[Any, ...] = ([32, 16], (32, 16), iter([32, 16]))
    for sizes in given:
        assert getattr(EngineConfig(**{name: sizes}), name) == (32, 16)
    wrong: tuple[Any, ...] = ("16,32", 16)
    for sizes in wrong:
        with pytest.raises(ConfigError, match=f"^{name} is .*: give whole numbers"):
            EngineConfig(**{name: sizes})
    wrong = ([0], [16, -1], [1.0], ["16"], [True], [None], np.array([1.0]))
    for sizes in wrong:
        with pytest.raises(ConfigError, match=f"one of {name} is .*: give a whole number of at least 1"):
            EngineConfig(**{name: sizes})


def test_bucket_gap() -> None:
    assert (EngineConfig().bucket_gap, EngineConfig(bucket_gap=64).bucket_gap) == (0, 64)
    wrong: tuple[Any, ...] = (-1, 1.0, "16", True, None)
    for gap in wrong:
        with pytest.raises(ConfigError, match="bucket_gap is .*: give a number of tokens, or 0"):
            EngineConfig(bucket_gap=gap)
