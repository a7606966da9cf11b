"""The manifest of a stored plan is read strictly: its own text, to the byte, or nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.compile.store_manifest import (
    MalformedManifest,
    Manifest,
    package_name,
    parse_package_name,
)
from store_models import piece_key

SHA = "ab" * 32


def manifest(**changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "components": {"torch.version": "2.13.0"},
        "class_name": "Tiny",
        "max_position": 512,
        "weight_names": {"a": "b"},
        "created": 1,
        "plan_sha256": SHA,
        "constants_sha256": SHA,
        "pieces": {piece_key("a"): package_name(piece_key("a"), SHA, SHA)},
    }
    return Manifest(**{**values, **changes})


names = st.dictionaries(st.text(), st.text(), max_size=3)


@given(components=names, weight_names=names, class_name=st.text(), position=st.none() | st.integers(1, 2**70))
def test_bytes_give_an_equal_manifest_back(
    components: dict[str, str], weight_names: dict[str, str], class_name: str, position: int | None
) -> None:
    made = manifest(components=components, weight_names=weight_names, class_name=class_name, max_position=position)
    assert Manifest.from_bytes(made.to_bytes()) == made


@given(place=st.floats(0, 1), value=st.integers(1, 255))
def test_any_changed_byte_is_seen(place: float, value: int) -> None:
    content = bytearray(manifest().to_bytes())
    content[int(place * (len(content) - 1))] ^= value
    with pytest.raises(MalformedManifest):
        Manifest.from_bytes(bytes(content))


@given(cut=st.floats(0, 1))
def test_any_cut_is_seen(cut: float) -> None:
    content = manifest().to_bytes()
    with pytest.raises(MalformedManifest):
        Manifest.from_bytes(content[: int(cut * (len(content) - 1))])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(value=json_values, name=st.sampled_from([*json.loads(manifest().to_bytes())]))
def test_another_value_anywhere_is_refused(value: Any, name: str) -> None:
    data = json.loads(manifest().to_bytes())
    data[name] = value
    with pytest.raises(MalformedManifest):
        Manifest.from_bytes(json.dumps(data).encode())


@given(content=st.binary(max_size=50) | json_values.map(lambda value: json.dumps(value).encode()))
def test_what_is_no_manifest_is_refused(content: bytes) -> None:
    with pytest.raises(MalformedManifest):
        Manifest.from_bytes(content)


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"version": ' + b"9" * 10_000 + b"}", b'{"version": NaN}', "\u00e4".encode()]
)
def test_what_breaks_parsers_is_refused(content: bytes) -> None:
    with pytest.raises(MalformedManifest):
        Manifest.from_bytes(content)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_position": True},
        {"max_position": 0},
        {"max_position": 1.5},
        {"created": -1},
        {"created": "1"},
        {"class_name": None},
        {"components": {"a": 1}},
        {"components": []},
        {"weight_names": {"a": None}},
        {"plan_sha256": "AB" * 32},
        {"plan_sha256": SHA + "\n"},
        {"constants_sha256": SHA[1:]},
        {"pieces": {piece_key("a"): package_name(piece_key("b"), SHA, SHA)}},
        {"pieces": {piece_key("a"): "../" + package_name(piece_key("a"), SHA, SHA)}},
        {"pieces": {piece_key("a"): "/" + package_name(piece_key("a"), SHA, SHA)}},
        {"pieces": {piece_key("a"): package_name(piece_key("a"), SHA, SHA) + "/.."}},
        {"pieces": {"..": "..-" + package_name(piece_key("a"), SHA, SHA)}},
        {"pieces": {piece_key("a"): 3}},
        {"pieces": [piece_key("a")]},
    ],
)
def test_wrong_types_and_names_that_lead_elsewhere_are_refused(changes: dict[str, Any]) -> None:
    """Each has a right checksum, as only an attacker or a mistake of ours would write it."""
    with pytest.raises(MalformedManifest, match=next(iter(changes))):
        Manifest.from_bytes(manifest(**changes).to_bytes())


@pytest.mark.parametrize("drop", [*json.loads(manifest().to_bytes())])
def test_a_missing_or_further_entry_is_refused(drop: str) -> None:
    data = json.loads(manifest().to_bytes())
    with pytest.raises(MalformedManifest):
        Manifest.from_bytes(json.dumps({**data, drop + "2": data[drop]}, indent=1, sort_keys=True).encode() + b"\n")
    del data[drop]
    with pytest.raises(MalformedManifest):
        Manifest.from_bytes(json.dumps(data, indent=1, sort_keys=True).encode() + b"\n")


@given(name=st.text() | st.from_regex(r"[0-9a-f]{64}-[0-9a-f]{16}-[0-9a-f]{64}\.pt2"))
def test_names_of_packages_hold_no_path(name: str) -> None:
    parsed = parse_package_name(name)
    if parsed is not None:
        assert package_name(*parsed) == name
        assert set(name) <= set("0123456789abcdef-.pt")
        assert "/" not in name
        assert ".." not in name
