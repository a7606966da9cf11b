"""``compiled-engine bindings``: which layer gets which cache, without weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compiled_engine import cli
from compiled_engine.models import Checkpoint
from compiled_engine.runners import bindings
from tiny_models import WINDOW, write_tiny_model


@pytest.fixture(scope="module")
def sharing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("gemma3n"), "gemma3n")


def test_bindings_of_a_hybrid_model_that_shares(
    sharing_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six layers, the last three without a cache of their own; sliding and full layers are two groups."""
    monkeypatch.setattr(Checkpoint, "read", lambda *args, **kwargs: pytest.fail("a weight was read"))
    assert cli.main(["bindings", str(sharing_model), "--json", "--block-size", "8"]) == 0
    data = json.loads(capsys.readouterr().out)
    layers = {layer["layer"]: layer for layer in data["layers"]}
    names = [f"model.layers.{index}.self_attn" for index in range(6)]
    assert list(layers) == names
    assert [layers[name]["sliding_window"] for name in names] == [WINDOW, WINDOW, None] * 2
    assert [layers[name]["shares_with"] for name in names] == [None] * 3 + [names[1], names[1], names[2]]
    assert [layers[name]["group"] for name in names] == [1, 1, 0] * 2
    addresses = [layers[name]["address"] for name in names]
    assert addresses[3:] == [addresses[1], addresses[1], addresses[2]]
    assert len(set(addresses)) == 3
    assert all(layers[name]["state"] == "bound" and layers[name]["shape"][1] == 8 for name in names)


def test_bindings_table(sharing_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bindings", str(sharing_model), "--kv-cache-memory", "1MiB"]) == 0
    title, header, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("6 layers, ")
    assert header.split()[:3] == ["layer", "kind", "group"]
    assert len(rows) == 6


def test_bindings_for_a_tpu_are_those_of_a_cpu(
    sharing_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bindings, "available_memory", lambda: 2**30)
    described = {}
    for device in ("cpu", "tpu"):
        assert cli.main(["bindings", str(sharing_model), "--json", "--dtype", "float32", "--backend", device]) == 0
        described[device] = json.loads(capsys.readouterr().out)["layers"]
        for layer in described[device]:
            del layer["address"]
    assert len(described["tpu"]) == 6
    assert described["tpu"] == described["cpu"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["/nowhere"], cli.EXIT_NO_START, "does not exist"),
        (["a", "--model", "b"], cli.EXIT_USAGE, "named twice"),
        (["--block-size", "0"], cli.EXIT_USAGE, "block_size"),
    ],
)
def test_bindings_errors(arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bindings", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
