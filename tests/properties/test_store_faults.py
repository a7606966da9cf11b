"""Whatever happens to a graph store, it gives back what was saved, or nothing, or a clear error; and it heals."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from compiled_engine.compile.store import GraphStore, StoredModel
from compiled_engine.errors import StoreDamagedError, StoreError, StoreWriteError
from store_faults import DAMAGES, FaultyOs, Killed, faulty
from store_models import all_files, make_key, make_model, same

Result = TypeVar("Result")

# In memory: a store waits for the disk after every file.
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
KEY, OTHER = make_key(), make_key(model__config__hidden_size="96", model__weights="5" * 64)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[StoredModel, ...]:
    """Models of one plan and with a package in common, and a third of another plan."""
    folder = tmp_path_factory.mktemp("packages")
    pieces = (("first", "middle", "head"),) * 2 + (("first", "head"),)
    made = [make_model(folder / str(seed), seed, names) for seed, names in enumerate(pieces)]
    shared = next(iter(made[0].packages))
    made[1].packages[shared].write_bytes(made[0].packages[shared].read_bytes())
    return tuple(made)


@contextmanager
def new_store() -> Iterator[GraphStore]:
    """A store of its own for every example."""
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        yield GraphStore(Path(folder) / "store")


def quarantined_plans(store: GraphStore) -> int:
    folder = store.root / "quarantine"
    return sum(path.name.startswith((KEY.digest, OTHER.digest)) for path in folder.iterdir()) if folder.exists() else 0


def check_heals(store: GraphStore, model: StoredModel) -> None:
    """After any fault: a healthy process can save and load, and nothing is left lying about."""
    store.save(KEY, model)
    loaded = store.load(KEY)
    assert loaded is not None
    assert not [fault for fault in store.verify().faults if KEY.digest in fault]
    assert list((store.root / "scratch").iterdir()) == []


def attempt(action: Callable[[], Result]) -> tuple[Result | None, StoreError | None]:
    """What ``action`` gives, or the store's error; no other error is expected."""
    try:
        return action(), None
    except StoreError as error:
        return None, error


damages = st.lists(
    st.tuples(st.sampled_from(DAMAGES), st.integers(0, 11), st.floats(0, 1), st.integers(1, 255)),
    min_size=1,
    max_size=3,
)
"""Damage to do, number of the file, place in it, value."""


def do_damage(store: GraphStore, plan: list[tuple[Callable[[Path, float, int], None], int, float, int]]) -> None:
    for damage, number, place, value in plan:
        if files := all_files(store.root):
            damage(files[number % len(files)], place, value)


@given(plan=damages)
def test_damage_is_a_miss_and_is_replaced_exactly_once(models: tuple[StoredModel, ...], plan: list) -> None:
    model, replacement, other = models
    with new_store() as store:
        store.save(KEY, model)
        do_damage(store, plan)
        unharmed = store.verify().faults == () and (store.root / "plans" / KEY.digest).exists()
        loaded = store.load(KEY)
        if loaded is not None:
            assert unharmed
            assert same(loaded, model)
            return
        assert not unharmed
        assert quarantined_plans(store) <= 1
        assert store.load(KEY) is None
        store.save(KEY, replacement)
        for _ in range(2):
            again = store.load(KEY)
            assert again is not None
            assert same(again, replacement)
        assert quarantined_plans(store) <= 1
        check_heals(store, other)


@pytest.mark.parametrize("number", range(6))
def test_a_flipped_byte_and_a_cut_are_seen_wherever_they_are(models: tuple[StoredModel, ...], number: int) -> None:
    with new_store() as store:
        store.save(KEY, models[0])
        path, bundle = all_files(store.root)[number], GraphStore(store.root, read_only=True)
        content = path.read_bytes()
        for place in range(0, len(content), 1 if len(content) < 1000 else 5):
            flipped = bytes([content[place] ^ (1 << place % 8)])
            for damaged in (content[:place] + flipped + content[place + 1 :], content[:place]):
                path.write_bytes(damaged)
                with pytest.raises(StoreDamagedError):
                    bundle.load(KEY)
        path.write_bytes(content)
        loaded = bundle.load(KEY)
        assert loaded is not None
        assert same(loaded, models[0])


@given(first=st.integers(0, 5), second=st.integers(0, 5))
def test_files_in_each_others_places_are_not_used(models: tuple[StoredModel, ...], first: int, second: int) -> None:
    assume(first != second)
    with new_store() as store:
        store.save(KEY, models[0])
        one, other = (all_files(store.root)[number] for number in (first, second))
        contents = one.read_bytes(), other.read_bytes()
        one.write_bytes(contents[1])
        other.write_bytes(contents[0])
        assert store.load(KEY) is None


def test_a_plan_under_another_keys_name_is_not_used(models: tuple[StoredModel, ...]) -> None:
    with new_store() as store:
        store.save(KEY, models[0])
        (store.root / "plans" / KEY.digest).rename(store.root / "plans" / OTHER.digest)
        assert store.load(OTHER) is None
        assert quarantined_plans(store) == 1


@given(plan=damages)
def test_damage_in_a_store_that_is_only_read_is_an_error(models: tuple[StoredModel, ...], plan: list) -> None:
    with new_store() as store:
        store.save(KEY, models[0])
        do_damage(store, plan)
        missing = not (store.root / "plans" / KEY.digest).exists()
        before = sorted(store.root.rglob("*"))
        loaded, error = attempt(lambda: GraphStore(store.root, read_only=True).load(KEY))
        if error is not None:
            assert isinstance(error, StoreDamagedError)
            assert str(store.root) in str(error)
        else:
            assert missing if loaded is None else same(loaded, models[0])
        assert sorted(store.root.rglob("*")) == before


def test_a_writer_may_be_killed_at_any_call(models: tuple[StoredModel, ...]) -> None:
    model, replacement, _ = models
    for number in itertools.count():
        with new_store() as store:
            store.save(OTHER, replacement)
            with faulty(FaultyOs(fail_at=number)) as fake:
                try:
                    store.save(KEY, model)
                except Killed:
                    assert fake.dead
            loaded = store.load(KEY)
            assert loaded is None or same(loaded, model)
            other = store.load(OTHER)
            assert other is not None
            assert same(other, replacement)
            assert quarantined_plans(store) == 0
            check_heals(store, model)
            if not fake.dead:
                assert number > 60
                return


def test_a_process_may_be_killed_at_any_call_while_it_sets_damage_aside(models: tuple[StoredModel, ...]) -> None:
    for number in itertools.count():
        with new_store() as store:
            store.save(KEY, models[0])
            (store.root / "plans" / KEY.digest / "plan.json").write_bytes(b"{}")
            with faulty(FaultyOs(fail_at=number)) as fake:
                try:
                    assert store.load(KEY) is None
                except Killed:
                    assert fake.dead
            assert store.load(KEY) is None
            assert quarantined_plans(store) == 1
            check_heals(store, models[1])
            if not fake.dead:
                assert number > 20
                return


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_an_error_of_the_disk_at_any_call_of_save(models: tuple[StoredModel, ...], error: int) -> None:
    for number in itertools.count():
        with new_store() as store:
            with faulty(FaultyOs(fail_at=number, error=error)) as fake:
                _, refusal = attempt(lambda: store.save(KEY, models[0]))
            if refusal is not None:
                assert os.strerror(error) in str(refusal)
                assert "Way out" in str(refusal)
            loaded = store.load(KEY)
            assert loaded is None or same(loaded, models[0])
            check_heals(store, models[0])
            if fake.calls <= number:
                assert number > 60
                return


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES, errno.EROFS])
def test_an_error_of_the_disk_at_any_call_of_load(models: tuple[StoredModel, ...], error: int, damaged: bool) -> None:
    for number in itertools.count():
        with new_store() as store:
            store.save(KEY, models[0])
            if damaged:
                (store.root / "plans" / KEY.digest / "plan.json").write_bytes(b"{}")
            with faulty(FaultyOs(fail_at=number, error=error)) as fake:
                loaded, refusal = attempt(lambda: store.load(KEY))
            if refusal is not None:
                assert os.strerror(error) in str(refusal)
            else:
                assert loaded is None if damaged else loaded is not None and same(loaded, models[0])
            check_heals(store, models[0])
            if fake.calls <= number:
                return


@given(quota=st.integers(0, 6000))
def test_a_full_disk_is_an_error_and_leaves_nothing(models: tuple[StoredModel, ...], quota: int) -> None:
    with new_store() as store:
        with faulty(FaultyOs(quota=quota)) as disk:
            _, error = attempt(lambda: store.save(KEY, models[0]))
            loaded = store.load(KEY)
        assert disk.written <= quota
        if error is None:
            assert loaded is not None
            assert same(loaded, models[0])
        else:
            assert isinstance(error, StoreWriteError)
            assert "free some space" in str(error)
            assert loaded is None
            assert all_files(store.root) == []
            assert list((store.root / "scratch").iterdir()) == []
        check_heals(store, models[0])


def test_the_quotas_above_reach_from_nothing_to_all(models: tuple[StoredModel, ...]) -> None:
    with new_store() as store, faulty(FaultyOs(quota=10**9)) as disk:
        store.save(KEY, models[0])
        assert 3000 < disk.written < 6000


class StoreMachine(RuleBasedStateMachine):
    """Two keys, three models, any order of saving, losing, moving and killing.

    What a load may give: for each key the models saved under it since it was last known to be gone, and whether
    nothing can have harmed the entry since.
    """

    keys = Bundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=FAST))
        self.models = [
            make_model(self.folder / "packages" / str(seed), seed, names)
            for seed, names in enumerate([("first", "head"), ("first", "head"), ("middle", "head")])
        ]
        self.store = GraphStore(self.folder / "store 0")
        self.moves = 0
        self.possible: dict[str, list[StoredModel]] = {KEY.digest: [], OTHER.digest: []}
        self.certain: set[str] = set()

    @initialize(target=keys)
    def first_key(self):
        return KEY

    @initialize(target=keys)
    def second_key(self):
        return OTHER

    @rule(key=keys, number=st.integers(0, 2))
    def save(self, key, number):
        self.store.save(key, self.models[number])
        self.possible[key.digest].append(self.models[number])
        self.certain.add(key.digest)

    @rule(key=keys, number=st.integers(0, 2), call=st.integers(0, 90))
    def save_and_die(self, key, number, call):
        self.possible[key.digest].append(self.models[number])
        with faulty(FaultyOs(fail_at=call)) as fake:
            try:
                self.store.save(key, self.models[number])
                self.certain.add(key.digest)
            except Killed:
                assert fake.dead

    @rule(key=keys, number=st.integers(0, 2), quota=st.integers(0, 4000))
    def save_on_a_full_disk(self, key, number, quota):
        with faulty(FaultyOs(quota=quota)):
            try:
                self.store.save(key, self.models[number])
            except StoreWriteError:
                return
        self.possible[key.digest].append(self.models[number])
        self.certain.add(key.digest)

    @rule(key=keys)
    def load(self, key):
        loaded = self.store.load(key)
        if loaded is None:
            assert key.digest not in self.certain
            self.possible[key.digest] = []
        else:
            assert any(same(loaded, model) for model in self.possible[key.digest])
            self.possible[key.digest] = [model for model in self.possible[key.digest] if same(loaded, model)]
            self.certain.add(key.digest)

    @rule(key=keys)
    def nearest(self, key):
        nearest = self.store.nearest(key)
        if nearest is not None:
            assert nearest.entry.digest in self.possible
            assert (nearest.differences == ()) == (nearest.entry.digest == key.digest)
        elif self.certain:
            raise AssertionError("there is an entry, and nearest finds none")

    @rule(plan=damages)
    def damage(self, plan):
        do_damage(self.store, plan)
        self.certain.clear()

    @rule()
    def move(self):
        self.moves += 1
        if self.store.root.exists():
            shutil.move(self.store.root, self.folder / f"store {self.moves}")
        self.store = GraphStore(self.folder / f"store {self.moves}")

    @rule(key=keys)
    def clear_one(self, key):
        try:
            self.store.clear(key.digest)
        except StoreError:
            assert key.digest not in self.certain
        self.certain.discard(key.digest)
        if not (self.store.root / "plans" / key.digest).exists():
            self.possible[key.digest] = []

    @rule()
    def clear_all(self):
        self.store.clear()
        self.certain.clear()
        self.possible = {KEY.digest: [], OTHER.digest: []}
        assert all_files(self.store.root) == []

    @invariant()
    def what_is_certain_verifies(self):
        faults = self.store.verify().faults
        assert not [fault for fault in faults for digest in self.certain if digest in fault]

    def teardown(self):
        shutil.rmtree(self.folder)


TestStoreMachine = StoreMachine.TestCase
