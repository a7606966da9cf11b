"""Bundles: what they keep, what they leave out, and files that are none."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_recordings import binding, cache, graph, step, weight, write_recording

from compiled_engine.compile.graphs.bindings import Role
from compiled_engine.compile.ledger import Phase
from compiled_engine.compile.records import CompileRecord, MemoryRecord, ScheduledShare
from compiled_engine.config import EngineConfig
from compiled_engine.models import Checkpoint, find_model
from compiled_engine_debug.bundle import Bundle, BundleError, extract_weights, is_bundle, read_bundle, write_bundle
from compiled_engine_debug.bundle.regions import Region, RegionMap, regions_of
from compiled_engine_debug.bundle.scrub import scrub_model_config, scrub_text
from compiled_engine_debug.findings import Finding
from compiled_engine_debug.recording import Recording, read_recording
from tiny_models import write_tiny_model

BASE = 0x7F00_1234_5000
CACHE = "model.layers.0.self_attn"


def places(recording: Recording) -> list[tuple[int | None, int]]:
    """Every address in a recording, in order, with the bytes that are known to lie there."""
    found: list[tuple[int | None, int]] = [(item.address, item.num_bytes) for item in recording.caches]
    found += [(item.address, item.num_bytes) for item in recording.weights]
    for item in recording.graphs:
        for bound in item.bindings:
            known = bound.role not in (Role.CACHE.value, Role.WEIGHT.value)
            found.append((bound.address, bound.num_bytes if known else 1))
    return found


def without_places(recording: Recording) -> Recording:
    """The recording with nothing in it that a bundle may change."""
    header = replace(recording.header, config={**recording.header.config, "record": None})
    return replace(
        recording,
        path=Path(),
        header=header,
        caches=tuple(replace(item, address=None) for item in recording.caches),
        weights=tuple(replace(item, address=None) for item in recording.weights),
        graphs=tuple(
            replace(item, bindings=tuple(replace(bound, address=0) for bound in item.bindings))
            for item in recording.graphs
        ),
        steps=list(recording.steps),  # type: ignore[arg-type]
    )


def parts(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write_parts(path: Path, contents: dict[str, bytes], **how: Any) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in contents.items():
            archive.writestr(name, data, **how)
    return path


# Few of them, so that tensors coincide and overlap.
ADDRESSES = st.builds(
    lambda block, offset: BASE + 64 * block + offset, st.integers(0, 40), st.sampled_from([0, 8, 100])
)
SIZES = st.sampled_from([0, 4, 64, 256])
SHARES = st.lists(
    st.builds(ScheduledShare, st.sampled_from("abc"), st.integers(0, 90), st.integers(1, 9), st.booleans()),
    max_size=3,
).map(tuple)
TEXTS = st.none() | st.text(max_size=12).filter(lambda text: scrub_text(text) == text)
BINDINGS = st.builds(
    binding,
    st.sampled_from([role.value for role in Role]),
    st.sampled_from(["a", "b+0x1", CACHE]),
    st.just(0) | ADDRESSES,
    SIZES,
)


@st.composite
def record_lists(draw: st.DrawFn) -> list[Any]:
    """Records of everything, in no particular order of addresses."""
    layers = draw(st.lists(st.sampled_from(["l.0", "l.1", "l.2 +x"]), unique=True))
    records: list[Any] = [
        cache(name, draw(st.none() | ADDRESSES), draw(SIZES), shares_with=draw(st.none() | st.just("l.0")))
        for name in layers
    ]
    for name in draw(st.lists(st.sampled_from(["w", "v", "packed(cat(w, v))"]), unique=True)):
        records.append(weight(name, draw(st.none() | ADDRESSES), draw(SIZES)))
    for index in range(draw(st.integers(0, 2))):
        records.append(graph(f"key {index}", *draw(st.lists(BINDINGS, max_size=4))))
    if draw(st.booleans()):
        records.append(MemoryRecord(1, 2, 3, 4, None, draw(st.none() | st.just(5)), None))
    records += [Phase("load", 0.1, draw(st.floats(0, 9)), None, draw(TEXTS), 1)]
    records += [CompileRecord("f", draw(TEXTS), draw(TEXTS), 1.5, 0.25, draw(st.booleans()))]
    records += [
        step(index, reason=draw(TEXTS), requests=draw(SHARES), seconds=draw(st.floats(0, 1)))
        for index in range(draw(st.integers(0, 3)))
    ]
    return records


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all examples of a test."""
    return tmp_path_factory.mktemp("bundles")


@pytest.fixture(scope="module")
def recording(folder: Path) -> Recording:
    """One of each kind of line."""
    records = [
        cache(CACHE, BASE),
        cache("model.layers.1.self_attn", BASE + 4096),
        weight("lm_head.weight", BASE + 8192),
        graph("full decode 2 requests", binding(Role.CACHE.value, CACHE, BASE + 64), binding("input", "ids", BASE * 2)),
        CompileRecord("f", None, None, 0.5, 0.5, False),
        *(step(index, requests=(ScheduledShare("0", index, 1, True),)) for index in range(50)),
    ]
    return read_recording(write_recording(folder / "run.jsonl", *records))


@pytest.fixture
def bundle_file(recording: Recording, tmp_path: Path) -> Path:
    """A bundle with every part but weights."""
    file = tmp_path / "b.zip"
    write_bundle(
        file,
        recording,
        model_config={"model_type": "llama", "hidden_size": 64},
        findings=[Finding("address-changed", "it moved", layer=CACHE)],
        prompts="Once upon a time",
    )
    return file


@given(records=record_lists(), is_cut=st.booleans())
def test_a_bundle_gives_back_the_recording(records: list[Any], is_cut: bool, folder: Path) -> None:
    file = write_recording(folder / "made.jsonl", *records)
    if is_cut:
        file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))
    recording = read_recording(file)
    write_bundle(folder / "made.zip", recording)
    found = read_bundle(folder / "made.zip")

    assert without_places(found.recording) == without_places(recording)
    assert found.recording.path == folder / "made.zip"
    assert (found.model_config, found.findings, found.prompts, found.num_weight_files) == (None, None, None, 0)
    check_places(places(recording), places(found.recording))


def check_places(before: Sequence[tuple[int | None, int]], after: Sequence[tuple[int | None, int]]) -> None:
    """Addresses differ, and all that they say of each other is the same."""
    assert len(before) == len(after)
    for (old, size), (new, new_size) in zip(before, after, strict=True):
        assert (old is None, old == 0, size) == (new is None, new == 0, new_size)
        for (other_old, other_size), (other_new, _) in zip(before, after, strict=True):
            if not old or not new or not other_old or not other_new:
                continue
            assert new % 256 == old % 256
            if old < other_old + max(1, other_size) and other_old < old + max(1, size):
                assert new - other_new == old - other_old
            else:
                assert new >= other_new + max(1, other_size) or other_new >= new + max(1, size)


@given(records=record_lists())
def test_bundling_a_bundle_changes_nothing(records: list[Any], folder: Path) -> None:
    write_bundle(folder / "one.zip", read_recording(write_recording(folder / "made.jsonl", *records)))
    write_bundle(folder / "two.zip", read_bundle(folder / "one.zip").recording)

    assert (folder / "one.zip").read_bytes() == (folder / "two.zip").read_bytes()


def test_addresses_are_places_in_the_file(bundle_file: Path) -> None:
    lines = [json.loads(line) for line in parts(bundle_file)["recording.jsonl"].splitlines()]
    bindings = [item["address"] for line in lines if line["kind"] == "graph" for item in line["bindings"]]

    assert next(line["address"] for line in lines if line["kind"] == "cache") == f"cache:{CACHE}+0x0"
    assert bindings == [f"cache:{CACHE}+0x40", "input:ids+0x0"]


def test_a_cache_that_moved_after_capture_is_in_no_known_region(folder: Path) -> None:
    records = [
        cache(CACHE, BASE),
        graph("one", binding(Role.CACHE.value, CACHE, BASE + (1 << 20)), binding("input", "ids", BASE + (2 << 20))),
        graph("two", binding(Role.CACHE.value, CACHE, BASE), binding("input", "ids", BASE + (3 << 20))),
    ]
    regions = regions_of(read_recording(write_recording(folder / "moved.jsonl", *records)))

    assert [region.name for region in regions.regions] == [f"cache:{CACHE}", "unknown-1", "input:ids", "unknown-2"]


def test_regions_refuse_what_is_in_none() -> None:
    regions = RegionMap.laid_out([Region("a", 64, 8), Region("b", 1, 0)])

    assert regions.address("a+0x3f") - regions.address("a+0x0") == 0x3F
    with pytest.raises(ValueError, match="in no region"):
        regions.place(regions.address("a+0x0") + 64)
    for text in ("c+0x0", "a", "a+zz", ""):
        with pytest.raises(ValueError, match=r"no place|invalid literal"):
            regions.address(text)
    with pytest.raises(ValueError, match="one name"):
        RegionMap.laid_out([Region("a", 1, 0), Region("a", 1, 0)])


def test_nothing_private_is_in_a_bundle(tmp_path: Path) -> None:
    private = "/home/ann/secret-project"
    private_config = {
        "_name_or_path": private,
        "auto_map": {"AutoConfig": "x"},
        "id2label": {"0": "hidden"},
        "data": [f"{private}/d"],
        "nested": [{"note": "hidden"}],
        "adapter": "secret-project",
        "model_type": "llama",
    }
    config = EngineConfig(model=f"{private}/weights-7b", graphs=f"{private}/graphs", record=f"{private}/hidden.jsonl")
    records = [
        cache(CACHE, BASE),
        weight("lm_head.weight", BASE + 4096),
        graph("one", binding("input", "ids", BASE + 9999)),
        Phase("graphs", 0.0, 1.0, note=f"miss in {private}/store"),
        CompileRecord(f"f ({private}/a.py:1)", f"{private}/b.py", f"x from {private}/c.py", 0.0, 1.0, True),
        step(0, reason=f"see {private}/log"),
    ]
    file = write_recording(tmp_path / "run.jsonl", *records, config=config)
    write_bundle(
        tmp_path / "b.zip",
        read_recording(file),
        model_config={**private_config, "text_config": private_config, "size": 3},
        findings=[
            Finding(f"{private}/a", f"{private}/a.py at {BASE:#x}", 0, *([f"{private}/a"] * 2), 0, f"{private}/a")
        ],
    )

    everything = b"".join(parts(tmp_path / "b.zip").values())
    for secret in ("ann", "secret-project", "hidden", "auto_map", str(BASE), f"{BASE:x}", str(BASE + 9999)):
        assert secret.encode() not in everything
    bundle = read_bundle(tmp_path / "b.zip")
    assert bundle.model_config == {"model_type": "llama", "text_config": {"model_type": "llama"}, "size": 3}
    assert bundle.recording.header.config["model"] == "weights-7b"
    assert bundle.recording.compiles[0].what == "f (a.py:1)"


def test_a_bundle_holds_what_was_asked_for(bundle_file: Path, tmp_path: Path) -> None:
    bundle = read_bundle(bundle_file)

    assert bundle.prompts == "Once upon a time"
    assert bundle.findings == (Finding("address-changed", "it moved", layer=CACHE),)
    assert bundle.model_config == {"model_type": "llama", "hidden_size": 64}
    with pytest.raises(BundleError, match="no weights"):
        extract_weights(bundle, tmp_path)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2", "qwen3"])
def test_a_models_config_keeps_what_builds_the_model(kind: str, tmp_path: Path) -> None:
    config = json.loads((write_tiny_model(tmp_path, kind) / "config.json").read_text())

    assert scrub_model_config({**config, "_name_or_path": "/home/jane/m"}) == config


@pytest.mark.parametrize("shard_size", ["5GB", "40KB"])
def test_weights_come_back_as_a_checkpoint(shard_size: str, recording: Recording, tmp_path: Path) -> None:
    model = find_model(str(write_tiny_model(tmp_path / "model", max_shard_size=shard_size)))
    write_bundle(tmp_path / "b.zip", recording, weight_files=model.weight_files)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    extract_weights(read_bundle(tmp_path / "b.zip"), tmp_path / "out")

    back = find_model(str(tmp_path / "out"))
    assert len(back.weight_files) == len(model.weight_files) > (shard_size == "40KB")
    with Checkpoint(model) as before, Checkpoint(back) as after:
        assert list(before) == list(after)
        assert all(before.read(name).equal(after.read(name)) for name in before)


@given(place=st.integers(0, 10**9), value=st.integers(1, 255))
def test_one_changed_byte_is_seen_or_changes_nothing(
    place: int, value: int, recording: Recording, folder: Path
) -> None:
    whole, damaged = folder / "whole.zip", folder / "damaged.zip"
    if not whole.exists():
        write_bundle(whole, recording, model_config={"a": 1}, findings=[], prompts="text")
    data = bytearray(whole.read_bytes())
    data[place % len(data)] ^= value
    damaged.write_bytes(data)
    found = read_or_error(damaged)
    if isinstance(found, BundleError):
        assert str(damaged) in str(found)
    else:
        sound = read_bundle(whole)
        assert without_places(found.recording) == without_places(sound.recording)
        assert replace(found, path=whole, recording=sound.recording) == sound


def read_or_error(path: Path) -> Bundle | BundleError:
    try:
        return read_bundle(path)
    except BundleError as error:
        return error


@given(share=st.floats(0, 0.9999))
def test_a_file_that_was_cut_off_is_refused(share: float, recording: Recording, folder: Path) -> None:
    whole, cut = folder / "uncut.zip", folder / "cut.zip"
    if not whole.exists():
        write_bundle(whole, recording)
    data = whole.read_bytes()
    cut.write_bytes(data[: int(share * len(data))])

    with pytest.raises(BundleError, match="cut"):
        read_bundle(cut)


def manifest(**changes: Any) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    """An edit of a bundle's parts: the manifest with ``changes``."""
    return lambda found: {
        **found,
        "manifest.json": json.dumps({**json.loads(found["manifest.json"]), **changes}).encode(),
    }


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda found: {**found, "../evil.py": b"x"}, r"part \.\./evil\.py: no part of a bundle has this name"),
        (lambda found: {**found, "/etc/x": b"x"}, "part /etc/x: no part"),
        (lambda found: {**found, "weights/../../x.safetensors": b"x"}, "no part"),
        (lambda found: {**found, "weights/0.safetensors": b"x"}, "is not named in the manifest"),
        (lambda found: {name: data for name, data in found.items() if name != "manifest.json"}, "some other zip"),
        (lambda found: {name: data for name, data in found.items() if name != "model.json"}, "model.json: it is missi"),
        (lambda found: {name: data for name, data in found.items() if name != "recording.jsonl"}, "missing"),
        (lambda found: {**found, "model.json": b'{"hidden_size": 65}'}, "part model.json: damaged .*manifest"),
        (lambda found: {**found, "recording.jsonl": b""}, "part recording.jsonl: damaged"),
        (lambda found: {**found, "manifest.json": b"[]"}, "no manifest"),
        (lambda found: {**found, "manifest.json": b"{"}, "part manifest.json: damaged"),
        (lambda found: {**found, "manifest.json": b"[" * 100_000}, "part manifest.json: damaged"),
        (manifest(version=2), "version 2, this tool reads 1"),
        (manifest(format="other"), "no manifest"),
        (manifest(parts={"recording.jsonl": 3}), "part manifest.json: damaged"),
    ],
)
def test_what_is_no_bundle_is_refused(
    edit: Callable[[dict[str, bytes]], dict[str, bytes]], says: str, bundle_file: Path, tmp_path: Path
) -> None:
    changed = write_parts(tmp_path / "changed.zip", edit(parts(bundle_file)))

    with pytest.raises(BundleError, match=says) as caught:
        read_bundle(changed)
    assert str(changed) in str(caught.value)


def rewritten(bundle_file: Path, target: Path, part: str, data: bytes) -> Path:
    """A bundle whose ``part`` is another one, and right by the manifest."""
    found = {**parts(bundle_file), part: data}
    entries = json.loads(found["manifest.json"])["parts"]
    entries[part] = {"sha256": hashlib.sha256(data).hexdigest(), "num_bytes": len(data)}
    return write_parts(target, manifest(parts=entries)(found))


@pytest.mark.parametrize(
    ("part", "data", "says"),
    [
        ("recording.jsonl", b'{"kind":"step"}\n', "recording.jsonl: .*no header"),
        ("recording.jsonl", b'{"address": "cache:elsewhere+0x0"}\n', "no place in a known region"),
        ("regions.json", b'[{"name": "a"}]', "regions.json"),
        ("regions.json", b"[]", "recording.jsonl: .*no place"),
        ("findings.json", b'[{"detector": "x"}]', "findings.json"),
        ("findings.json", b'[{"detector": "x", "message": 5}]', "findings.json: .*'message' of a finding is 5"),
        ("model.json", b"[]", "model.json"),
        ("prompts.txt", b"\xff\xfe", "prompts.txt"),
    ],
)
def test_parts_that_say_nonsense_are_named(
    part: str, data: bytes, says: str, bundle_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(BundleError, match=says):
        read_bundle(rewritten(bundle_file, tmp_path / "x.zip", part, data))


def test_a_part_that_unpacks_to_too_much_is_not_unpacked(bundle_file: Path, tmp_path: Path) -> None:
    bomb = rewritten(bundle_file, tmp_path / "x.zip", "model.json", b" " * (1 << 21))
    with pytest.raises(BundleError, match="model.json: it unpacks to 2097152 bytes, and at most 1048576"):
        read_bundle(bomb)


def test_a_part_that_lies_about_its_size_is_refused(bundle_file: Path, tmp_path: Path) -> None:
    packed = write_parts(tmp_path / "x.zip", parts(bundle_file), compress_type=zipfile.ZIP_DEFLATED)
    data = bytearray(packed.read_bytes())
    entry = data.rindex(b"recording.jsonl")
    # In the directory, the unpacked size stands 22 bytes before the name.
    data[entry - 22 : entry - 18] = struct.pack("<I", 100)
    packed.write_bytes(data)

    with pytest.raises(BundleError, match="recording.jsonl"):
        read_bundle(packed)


def test_weights_may_not_be_compressed(bundle_file: Path, tmp_path: Path) -> None:
    found = {**parts(bundle_file), "weights/0.safetensors": b"0" * 1000}
    packed = write_parts(tmp_path / "x.zip", found, compress_type=zipfile.ZIP_DEFLATED)
    with pytest.raises(BundleError, match="must not be compressed"):
        read_bundle(packed)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compression_is_refused(method: int, bundle_file: Path, tmp_path: Path) -> None:
    packed = write_parts(tmp_path / "x.zip", parts(bundle_file), compress_type=method)
    with pytest.raises(BundleError, match="compressed by method"):
        read_bundle(packed)


def test_a_part_that_is_there_twice_is_refused(bundle_file: Path) -> None:
    with zipfile.ZipFile(bundle_file, "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        archive.writestr("model.json", "{}")
    with pytest.raises(BundleError, match="part model.json: it is there twice"):
        read_bundle(bundle_file)


@pytest.mark.parametrize("data", [b"", b"PK", b"no zip file at all", b'{"kind":"header"}\n'])
def test_other_files_are_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(data)
    with pytest.raises(BundleError, match="no zip file"):
        read_bundle(tmp_path / "x.zip")


def test_files_that_cannot_be_opened_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.zip", tmp_path):
        assert not is_bundle(path)
        with pytest.raises(BundleError, match="give a file that `bundle` wrote"):
            read_bundle(path)


def test_a_bundle_is_told_from_a_recording(bundle_file: Path, recording: Recording) -> None:
    assert is_bundle(bundle_file)
    assert not is_bundle(recording.path)


def test_a_bundle_that_cannot_be_written_leaves_nothing(recording: Recording, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cannot be written"):
        write_bundle(tmp_path / "absent" / "b.zip", recording)
    (tmp_path / "b.zip").write_bytes(b"older")
    with pytest.raises(BundleError, match="more than"):
        write_bundle(tmp_path / "b.zip", recording, model_config={"model_type": "y" * (1 << 20)})
    assert (tmp_path / "b.zip").read_bytes() == b"older"
    assert os.listdir(tmp_path) == ["b.zip"]
