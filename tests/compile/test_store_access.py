"""A store is code: one that others own, or could have written, is refused with the command that mends it."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from compiled_engine.compile.store import GraphStore, StoredModel
from compiled_engine.errors import StoreAccessError
from store_models import make_key, make_model, same

KEY = make_key()
PLACES: dict[str, Callable[[Path], Path]] = {
    "root": lambda root: root,
    "plans": lambda root: root / "plans",
    "pieces": lambda root: root / "pieces",
    "entry": lambda root: root / "plans" / KEY.digest,
    "manifest": lambda root: root / "plans" / KEY.digest / "manifest.json",
    "plan": lambda root: root / "plans" / KEY.digest / "plan.json",
    "constants": lambda root: root / "plans" / KEY.digest / "constants.safetensors",
    "package": lambda root: sorted((root / "pieces").iterdir())[1],
}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture
def model(tmp_path: Path) -> StoredModel:
    return make_model(tmp_path / "packages")


@pytest.fixture
def store(tmp_path: Path, model: StoredModel) -> GraphStore:
    store = GraphStore(tmp_path / "a store's folder")
    store.save(KEY, model)
    return store


def mend(error: StoreAccessError) -> None:
    """Run the command of the message, as a user would."""
    assert error.command in str(error)
    subprocess.run(error.command, shell=True, check=True)


@pytest.mark.parametrize("bits", [0o020, 0o002, 0o022])
@pytest.mark.parametrize("place", PLACES)
def test_what_others_can_write_is_refused(store: GraphStore, model: StoredModel, place: str, bits: int) -> None:
    path = PLACES[place](store.root)
    path.chmod(path.stat().st_mode | bits)
    with pytest.raises(StoreAccessError, match="written by others") as caught:
        store.load(KEY)
    assert caught.value.path == path
    assert "chmod" in caught.value.command
    assert path.exists()
    mend(caught.value)
    loaded = store.load(KEY)
    assert loaded is not None
    assert same(loaded, model)


@needs_root
@pytest.mark.parametrize("place", PLACES)
def test_what_belongs_to_another_user_is_refused(store: GraphStore, model: StoredModel, place: str) -> None:
    path = PLACES[place](store.root)
    os.chown(path, 12345, -1)
    with pytest.raises(StoreAccessError, match="belongs to 12345") as caught:
        store.load(KEY)
    assert caught.value.path == path
    assert "chown" in caught.value.command
    mend(caught.value)
    loaded = store.load(KEY)
    assert loaded is not None
    assert same(loaded, model)


@needs_root
def test_one_command_mends_a_whole_copied_store(store: GraphStore) -> None:
    for path in (store.root, *store.root.rglob("*")):
        os.chown(path, 12345, -1)
        path.chmod(0o777)
    with pytest.raises(StoreAccessError, match="belongs to 12345 and can be written by others") as caught:
        store.load(KEY)
    mend(caught.value)
    assert store.load(KEY) is not None


@needs_root
def test_another_user_may_run_from_a_store_of_root_but_not_from_one_of_a_third_user(model: StoredModel) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        store = GraphStore(Path(folder) / "store")
        store.save(KEY, model)
        assert _load_as(23456, store) == "True"
        os.chown(store.root / "plans", 12345, -1)
        answer = _load_as(23456, store)
        assert "StoreAccessError" in answer
        assert "sudo chown -R 23456" in answer


def _load_as(user: int, store: GraphStore) -> str:
    """Whether ``user`` finds an entry, or the error that it meets instead."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answer = "no answer"
        try:
            os.setuid(user)
            answer = str(store.load(KEY) is not None)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        finally:
            os.write(writer, answer.encode())
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader, "rb") as stream:
        return stream.read().decode()


@pytest.mark.parametrize("action", ["save", "entries", "nearest", "verify", "clear", "find_packages"])
def test_no_method_uses_a_store_that_others_can_write(store: GraphStore, model: StoredModel, action: str) -> None:
    store.root.chmod(0o777)
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: store.save(KEY, model),
        "entries": store.entries,
        "nearest": lambda: store.nearest(KEY),
        "verify": store.verify,
        "clear": store.clear,
        "find_packages": lambda: store.find_packages(KEY, model.packages),
    }
    before = sorted(store.root.rglob("*"))
    with pytest.raises(StoreAccessError):
        calls[action]()
    assert sorted(store.root.rglob("*")) == before


@pytest.mark.parametrize("place", [place for place in PLACES if place != "root"])
def test_links_inside_a_store_are_refused(store: GraphStore, tmp_path: Path, place: str) -> None:
    path, outside = PLACES[place](store.root), tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    with pytest.raises(StoreAccessError, match="symbolic link") as caught:
        store.load(KEY)
    assert outside.exists()
    mend(caught.value)
    assert store.load(KEY) is None
    assert outside.exists()


def test_a_link_to_a_store_may_be_its_root(store: GraphStore, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(store.root)
    assert GraphStore(tmp_path / "link").load(KEY) is not None


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_a_store_does_not_refuse_what_it_wrote_itself(model: StoredModel, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        store = GraphStore(tmp_path / "new" / "store")
        store.save(KEY, model)
        assert store.load(KEY) is not None
    finally:
        os.umask(before)
    assert all(path.stat().st_mode & 0o022 == 0 for path in (store.root, *store.root.rglob("*")))
