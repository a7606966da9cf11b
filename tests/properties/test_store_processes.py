"""Several processes on one graph store: races for one key, damage met by all at once, and killing with SIGKILL."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compiled_engine.compile import store_files
from compiled_engine.compile.store import GraphStore, StoredModel
from compiled_engine.errors import StoreError
from store_faults import flip
from store_models import all_files, make_key, make_model, same

PROCESSES = 5
PATIENCE = 120.0
"""Seconds after which a process counts as hanging."""

KEY = make_key()
CONTEXT = multiprocessing.get_context("fork")


def in_processes(work: Callable[[int], Any]) -> list[Any]:
    """What ``work(number)`` gives in processes that start together."""
    barrier, answers = CONTEXT.Barrier(PROCESSES), CONTEXT.SimpleQueue()

    def run(number: int) -> None:
        barrier.wait(PATIENCE)
        try:
            answers.put((number, work(number), None))
        except BaseException as error:
            answers.put((number, None, f"{type(error).__name__}: {error}"))

    processes = [CONTEXT.Process(target=run, args=(number,), daemon=True) for number in range(PROCESSES)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + PATIENCE
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.1))
    hanging = [process for process in processes if process.is_alive()]
    for process in hanging:
        process.kill()
    assert not hanging, f"{len(hanging)} processes hang"
    found = sorted(answers.get() for _ in processes)
    assert [error for _, _, error in found if error] == []
    return [answer for _, answer, _ in found]


@pytest.fixture
def models(tmp_path: Path) -> list[StoredModel]:
    """One a process: the same plan, packages that differ, as two compilations do."""
    return [make_model(tmp_path / "packages" / str(seed), seed) for seed in range(PROCESSES)]


@pytest.fixture
def store(tmp_path: Path) -> GraphStore:
    return GraphStore(tmp_path / "store")


def which(loaded: StoredModel | None, models: list[StoredModel]) -> int:
    """The number of the model that was loaded."""
    assert loaded is not None
    (number,) = [number for number, model in enumerate(models) if same(loaded, model)]
    return number


def check_tidy(store: GraphStore) -> None:
    assert store.verify().faults == ()
    assert list((store.root / "scratch").iterdir()) == []


def test_processes_race_to_save_one_key(store: GraphStore, models: list[StoredModel]) -> None:
    def work(number: int) -> int:
        store.save(KEY, models[number])
        return which(store.load(KEY), models)

    winners = set(in_processes(work))
    assert winners == {which(store.load(KEY), models)}
    assert len(store.entries()) == 1
    assert list((store.root / "quarantine").iterdir()) == []
    check_tidy(store)


@pytest.mark.parametrize("name", ["manifest.json", "plan.json", "constants.safetensors", "package"])
def test_processes_that_meet_damage_replace_it_once(store: GraphStore, models: list[StoredModel], name: str) -> None:
    store.save(KEY, models[0])
    path = all_files(store.root)[0] if name == "package" else store.root / "plans" / KEY.digest / name
    flip(path, 0.5, 1)

    def work(number: int) -> tuple[bool, int]:
        loaded = store.load(KEY)
        if loaded is not None:
            return False, which(loaded, models)
        store.save(KEY, models[number])
        return True, which(store.load(KEY), models)

    answers = in_processes(work)
    assert any(missed for missed, _ in answers)
    assert {winner for _, winner in answers} == {which(store.load(KEY), models)}
    plans = [path for path in (store.root / "quarantine").iterdir() if path.name.startswith(KEY.digest)]
    assert len(plans) == 1
    assert len(store.entries()) == 1
    check_tidy(store)


@pytest.mark.parametrize("seed", range(3))
def test_nobody_reads_anything_wrong_while_others_save_damage_and_clear(
    store: GraphStore, models: list[StoredModel], seed: int
) -> None:
    keys = [KEY, make_key(model__weights="4" * 64)]

    def work(number: int) -> int:
        chance, loads = random.Random(seed * 100 + number), 0
        for _ in range(40):
            key, action = chance.choice(keys), chance.random()
            if action < 0.35:
                try:
                    store.save(key, models[number])
                except StoreError as error:
                    if "shared is gone" not in str(error):
                        raise
            elif action < 0.85:
                loaded = store.load(key)
                if loaded is not None:
                    # Its packages may be cleared away by now, but what is there is right.
                    seeds = [seed for seed, model in enumerate(models) if _constants_agree(loaded, model)]
                    assert len(seeds) == 1
                    loads += 1
            elif action < 0.93:
                _damage_one_file(store, chance)
            else:
                store.clear()
        return loads

    assert sum(in_processes(work)) > 0
    for key in keys:
        store.load(key)
        store.save(key, models[0])
        assert store.load(key) is not None
    assert list((store.root / "scratch").iterdir()) == []


def _constants_agree(loaded: StoredModel, model: StoredModel) -> bool:
    return int(loaded.constants["scalar"]) == int(model.constants["scalar"])


def _damage_one_file(store: GraphStore, chance: random.Random) -> None:
    files = all_files(store.root)
    if not files:
        return
    path = chance.choice(files)
    try:
        content = path.read_bytes()
        with open(path, "r+b") as stream:
            stream.write(bytes([content[0] ^ 1]))
    except (FileNotFoundError, IndexError):
        return  # another process was faster


@pytest.mark.parametrize("seed", range(6))
def test_a_writer_killed_with_sigkill_leaves_nothing_behind(
    store: GraphStore, models: list[StoredModel], seed: int
) -> None:
    started = CONTEXT.Event()

    def save_for_ever() -> None:
        for number in range(10**6):
            store.save(make_key(model__weights=str(number)), models[number % PROCESSES])
            started.set()

    process = CONTEXT.Process(target=save_for_ever, daemon=True)
    process.start()
    assert started.wait(PATIENCE)
    time.sleep(random.Random(seed).random() * 0.1)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGKILL
    saved = len(store.entries())
    assert saved > 0
    assert store.verify().faults == ()
    for number in range(saved):
        assert which(store.load(make_key(model__weights=str(number))), models) == number % PROCESSES
    assert store.load(make_key(model__weights=str(saved))) is None
    store.save(KEY, models[0])
    assert which(store.load(KEY), models) == 0
    check_tidy(store)


def test_the_scratch_of_a_living_process_is_left_alone(store: GraphStore, models: list[StoredModel]) -> None:
    store.save(KEY, models[0])
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with store_files.scratch_folder(store.root / "scratch", store.root):
            os.write(writer, b"ready")
            time.sleep(PATIENCE)
    try:
        assert os.read(reader, 5) == b"ready"
        store.save(make_key(model__weights="8" * 64), models[1])
        assert len(list((store.root / "scratch").iterdir())) == 1
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    store.clear()
    assert list((store.root / "scratch").iterdir()) == []


def test_waiting_for_the_lock_ends(
    store: GraphStore, models: list[StoredModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(KEY, models[0])
    monkeypatch.setattr(store_files, "LOCK_SECONDS", 0.2)
    with store_files.locked(store.root):
        assert store.load(KEY) is not None
        with pytest.raises(StoreError, match="held the lock"):
            store.save(make_key(a="b"), models[1])
    store.save(make_key(a="b"), models[1])
