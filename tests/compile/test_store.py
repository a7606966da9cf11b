"""The store of compiled graphs, used as intended: what goes in comes out, wherever the folder lies."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compiled_engine.compile.key import Difference
from compiled_engine.compile.store import GraphStore, StoredModel
from compiled_engine.config import default_store_root
from compiled_engine.errors import StoreDamagedError, StoreError, StoreWriteError
from store_models import all_files, contents, make_key, make_model, make_plan, piece_key, same

KEY = make_key()


@pytest.fixture
def store(tmp_path: Path) -> GraphStore:
    return GraphStore(tmp_path / "somewhere" / "store")


@pytest.fixture
def model(tmp_path: Path) -> StoredModel:
    return make_model(tmp_path / "packages")


def test_what_was_saved_is_loaded(store: GraphStore, model: StoredModel) -> None:
    assert store.load(KEY) is None
    store.save(KEY, model)
    loaded = store.load(KEY)
    assert loaded is not None
    assert same(loaded, model)
    assert set(loaded.packages) == {piece.key for piece in model.plan.pieces}
    assert all(path.is_relative_to(store.root) for path in loaded.packages.values())


def test_the_caller_may_remove_its_packages(store: GraphStore, model: StoredModel) -> None:
    before = contents(model.packages)
    store.save(KEY, model)
    for path in model.packages.values():
        path.unlink()
    loaded = store.load(KEY)
    assert loaded is not None
    assert contents(loaded.packages) == before


def test_another_key_is_a_miss(store: GraphStore, model: StoredModel) -> None:
    store.save(KEY, model)
    assert store.load(make_key(engine__dtype="bfloat16")) is None
    assert store.load(make_key(model__weights="2" * 64)) is None
    assert store.load(make_key(env__CXX="clang++")) is None


def test_making_a_store_and_asking_it_touch_nothing(store: GraphStore) -> None:
    assert store.load(KEY) is None
    assert store.entries() == ()
    assert store.nearest(KEY) is None
    assert store.find_packages(KEY, [piece_key("first")]) == {}
    assert store.verify().faults == ()
    assert store.clear().num_entries == 0
    assert not store.root.parent.exists()


@pytest.mark.parametrize("move", [os.rename, shutil.copytree, shutil.move])
def test_a_store_may_be_moved_and_copied(store: GraphStore, model: StoredModel, tmp_path: Path, move: object) -> None:
    store.save(KEY, model)
    move(str(store.root), str(tmp_path / "elsewhere"))  # type: ignore[operator]
    moved = GraphStore(tmp_path / "elsewhere", read_only=True).load(KEY)
    assert moved is not None
    assert same(moved, model)
    assert all(path.is_relative_to(tmp_path / "elsewhere") for path in moved.packages.values())


def test_no_file_names_a_path(store: GraphStore, model: StoredModel, tmp_path: Path) -> None:
    store.save(KEY, model)
    assert len(all_files(store.root)) == 6
    for path in all_files(store.root):
        assert str(tmp_path).encode() not in path.read_bytes()


def test_a_relative_root_means_the_folder_it_meant_when_the_store_was_made(
    model: StoredModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = GraphStore(Path("here"))
    monkeypatch.chdir("/")
    store.save(KEY, model)
    assert (tmp_path / "here" / "plans" / KEY.digest).is_dir()


def test_models_share_packages(store: GraphStore, model: StoredModel, tmp_path: Path) -> None:
    store.save(KEY, model)
    other = make_key(model__config__hidden_size="128", model__weights="9" * 64)
    assert other.toolchain == KEY.toolchain
    found = store.find_packages(other, [*model.packages, piece_key("another")])
    assert contents(found) == contents(model.packages)
    store.save(other, replace(model, packages=found, class_name="Other"))
    assert len(list((store.root / "pieces").iterdir())) == 3
    assert store.load(other) is not None
    store.clear(KEY.digest)
    loaded = store.load(other)
    assert loaded is not None
    assert contents(loaded.packages) == contents(model.packages)


def test_packages_of_another_toolchain_are_not_found(store: GraphStore, model: StoredModel) -> None:
    store.save(KEY, model)
    assert store.find_packages(make_key(torch__version="2.14.0"), model.packages) == {}
    assert store.find_packages(make_key(cpu__flags="avx"), model.packages) == {}


def test_a_damaged_package_is_not_found(store: GraphStore, model: StoredModel) -> None:
    store.save(KEY, model)
    damaged = store.find_packages(KEY, model.packages)[piece_key("first")]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert set(store.find_packages(KEY, model.packages)) == set(model.packages) - {piece_key("first")}


def test_a_package_that_vanished_before_it_was_shared_is_an_error(store: GraphStore, model: StoredModel) -> None:
    store.save(KEY, model)
    found = store.find_packages(KEY, model.packages)
    found[piece_key("first")].write_bytes(b"damaged")
    with pytest.raises(StoreError, match="shared is gone"):
        store.save(make_key(model__weights="9" * 64), replace(model, packages=found))
    found[piece_key("head")].unlink()
    with pytest.raises(StoreError, match="not there any more"):
        store.save(make_key(model__weights="9" * 64), replace(model, packages=found))


def test_what_another_process_saved_meanwhile_stays(store: GraphStore, model: StoredModel, tmp_path: Path) -> None:
    store.save(KEY, model)
    before = {path: path.stat().st_ino for path in all_files(store.root)}
    store.save(KEY, make_model(tmp_path / "again", seed=1))
    loaded = store.load(KEY)
    assert loaded is not None
    assert same(loaded, model)
    assert {path: path.stat().st_ino for path in before} == before


def test_saving_replaces_a_damaged_entry(store: GraphStore, model: StoredModel, tmp_path: Path) -> None:
    store.save(KEY, model)
    next((store.root / "pieces").iterdir()).write_bytes(b"")
    again = make_model(tmp_path / "again", seed=1)
    store.save(KEY, again)
    loaded = store.load(KEY)
    assert loaded is not None
    assert same(loaded, again)
    assert len(list((store.root / "quarantine").iterdir())) == 2


def test_an_incomplete_model_is_refused(store: GraphStore, model: StoredModel) -> None:
    some = {piece: path for piece, path in model.packages.items() if piece != piece_key("head")}
    with pytest.raises(StoreError, match=piece_key("head")):
        store.save(KEY, replace(model, packages=some))
    with pytest.raises(StoreError, match="__metadata__"):
        store.save(KEY, replace(model, constants={"__metadata__": torch.zeros(1)}))
    with pytest.raises(StoreError, match="max_position"):
        store.save(KEY, replace(model, max_position=0))
    assert all_files(store.root) == []


def test_constants_may_share_memory_and_have_any_strides(store: GraphStore, model: StoredModel) -> None:
    base = torch.arange(12.0).view(3, 4)
    constants = {"base": base, "part": base[1:, ::2], "turned": base.t(), "number": torch.tensor(True)}
    store.save(KEY, replace(model, constants=constants))
    loaded = store.load(KEY)
    assert loaded is not None
    assert loaded.constants.keys() == constants.keys()
    assert all(torch.equal(loaded.constants[name], constants[name]) for name in constants)


def test_entries_tell_what_is_there(store: GraphStore, model: StoredModel) -> None:
    start = int(time.time())
    store.save(KEY, model)
    (entry,) = store.entries()
    assert entry.digest == KEY.digest
    assert dict(entry.components) == dict(KEY.components)
    assert entry.class_name == "TinyForCausalLM"
    assert start <= entry.created <= time.time()
    assert entry.num_bytes == sum(path.stat().st_size for path in all_files(store.root))
    assert len(entry.packages) == 3


def test_the_nearest_entry_and_what_differs(store: GraphStore, model: StoredModel) -> None:
    store.save(KEY, model)
    store.save(make_key(model__weights="3" * 64, engine__dtype="bfloat16", torch__version="2.9"), model)
    nearest = store.nearest(make_key(engine__dtype="float16", env__CXX="clang++", cpu__flags=None))
    assert nearest is not None
    assert nearest.entry.digest == KEY.digest
    assert nearest.differences == (
        Difference("cpu.flags", "avx avx2 fma", None),
        Difference("engine.dtype", "float32", "float16"),
        Difference("env.CXX", None, "clang++"),
    )
    hit = store.nearest(KEY)
    assert hit is not None
    assert hit.differences == ()


def test_verify_names_what_is_damaged_and_changes_nothing(store: GraphStore, model: StoredModel) -> None:
    store.save(KEY, model)
    report = store.verify()
    assert (report.num_entries, report.num_packages, report.faults, report.unused) == (1, 3, (), ())
    package = next((store.root / "pieces").iterdir())
    package.write_bytes(b"damaged")
    (store.root / "plans" / "stray").mkdir()
    (store.root / "pieces" / "stray.so").write_bytes(b"")
    report = store.verify()
    assert any(package.name in fault and "pieces" in fault for fault in report.faults)
    assert any(KEY.digest in fault for fault in report.faults)
    assert sum("stray" in fault for fault in report.faults) == 2
    assert report.unused == ("stray.so",)
    assert package.exists()
    assert not list((store.root / "quarantine").iterdir())


def test_clear_removes_what_the_store_made_and_nothing_else(store: GraphStore, model: StoredModel) -> None:
    other = make_key(model__weights="7" * 64)
    store.save(KEY, model)
    store.save(other, model)
    (store.root / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match="no plan 'abc'"):
        store.clear("abc")
    assert store.clear(KEY.digest).num_packages == 0
    assert store.load(KEY) is None
    assert store.load(other) is not None
    sizes = sum(path.stat().st_size for path in all_files(store.root))
    report = store.clear()
    assert (report.num_entries, report.num_packages, report.num_bytes) == (1, 3, sizes)
    assert all_files(store.root) == []
    assert (store.root / "notes.txt").read_text() == "mine"
    assert store.load(other) is None


def test_a_read_only_store_is_never_written(store: GraphStore, model: StoredModel) -> None:
    store.save(KEY, model)
    before = sorted(store.root.rglob("*"))
    bundle = GraphStore(store.root, read_only=True)
    assert bundle.load(KEY) is not None
    with pytest.raises(StoreWriteError, match="another folder"):
        bundle.save(KEY, model)
    with pytest.raises(StoreWriteError, match="read"):
        bundle.clear()
    (store.root / "plans" / KEY.digest / "plan.json").write_bytes(b"{}")
    with pytest.raises(StoreDamagedError, match=r"plan\.json.*copy it again"):
        bundle.load(KEY)
    assert sorted(store.root.rglob("*")) == before


def test_something_else_where_a_folder_should_be(store: GraphStore, model: StoredModel) -> None:
    store.root.parent.mkdir()
    store.root.write_text("a file")
    for action in (lambda: store.load(KEY), lambda: store.save(KEY, model), store.entries):
        with pytest.raises(StoreError, match="needs a folder"):
            action()
    store.root.unlink()
    store.root.parent.rmdir()
    store.root.parent.write_text("a file")
    with pytest.raises(StoreError):
        store.load(KEY)


def test_a_pipe_in_the_place_of_a_file_does_not_hang(store: GraphStore, model: StoredModel) -> None:
    store.save(KEY, model)
    for path in all_files(store.root)[:4]:
        path.unlink()
        os.mkfifo(path, 0o600)
        assert store.load(KEY) is None
        store.save(KEY, model)
        assert store.load(KEY) is not None


def test_the_default_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COMPILED_ENGINE_CACHE", str(tmp_path))
    assert default_store_root() == tmp_path / "graphs"


def test_no_pickle_is_written_or_read(store: GraphStore, model: StoredModel) -> None:
    """With pickle broken, everything works; the marker of a pickle is in no file."""
    store.save(KEY, model)
    program = (
        "import sys, pickle, torch\n"
        "def broken(*args, **kwargs): raise AssertionError('pickle')\n"
        "pickle.Unpickler = pickle.load = pickle.loads = pickle.dumps = torch.load = torch.save = broken\n"
        "from pathlib import Path\n"
        "from compiled_engine.compile.store import GraphStore\n"
        "from store_models import make_key, make_model\n"
        "store = GraphStore(Path(sys.argv[1]))\n"
        "assert store.load(make_key()) is not None\n"
        "store.save(make_key(a='b'), make_model(Path(sys.argv[2])))\n"
        "assert store.load(make_key(a='b')) is not None\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run(
        [sys.executable, "-c", program, str(store.root), str(store.root.parent / "p")], check=True, env=environment
    )
    assert make_plan() == model.plan
