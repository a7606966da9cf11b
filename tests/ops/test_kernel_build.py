"""Building and loading the C++ kernels: once, only what is ours, never what is damaged."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from compiled_engine.errors import ConfigError, KernelBuildError
from compiled_engine.ops.cpu import build
from compiled_engine.ops.cpu.build import load_kernels
from compiled_engine.ops.cpu.instructions import INSTRUCTION_PATHS, runnable_paths
from kernel_folder import KERNELS

NAMES = [f"write_and_attend_{dtype}" for dtype in ("float32", "bfloat16", "float16")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a library, built once for all tests and copied."""
    load_kernels(KERNELS)
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o700)
    for library in KERNELS.glob(f"{build._key(runnable_paths()[0])}-*.so"):
        shutil.copy2(library, folder)
    return folder


def test_built_once_and_found_again_without_a_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (library,) = folder.iterdir()
    built = library.stat().st_mtime_ns
    monkeypatch.setenv("CXX", "no-such-compiler")
    again = load_kernels(folder)
    assert all(hasattr(again, name) for name in NAMES)
    assert [path.stat().st_mtime_ns for path in folder.iterdir()] == [built]


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelBuildError, match="'no-such-compiler' is not installed"):
        load_kernels(tmp_path / "kernels")


def test_a_source_that_does_not_compile_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "good.cpp").write_text("int answer() { return 42; }")
    (sources / "bad.cpp").write_text("int main( {")
    monkeypatch.setattr(build, "SOURCE_FOLDER", sources)
    with pytest.raises(KernelBuildError, match="error"):
        load_kernels(tmp_path / "kernels")
    assert list((tmp_path / "kernels").iterdir()) == []


def test_an_edit_while_the_compiler_runs_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library would have the name of the new sources and the content of the old ones."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "kernel.cpp").write_text("int answer() { return 42; }")
    monkeypatch.setattr(build, "SOURCE_FOLDER", sources)
    compiled = build._run_all

    def edit_afterwards(commands: Sequence[Sequence[str]]) -> None:
        compiled(commands)
        (sources / "kernel.cpp").write_text("int answer() { return 43; }")

    monkeypatch.setattr(build, "_run_all", edit_afterwards)
    with pytest.raises(KernelBuildError, match="changed while"):
        load_kernels(tmp_path / "kernels")
    assert list((tmp_path / "kernels").iterdir()) == []


def test_every_path_that_the_cpu_runs_can_be_chosen_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runnable_paths(())[0].name == "portable"
    assert runnable_paths({"avx2", "fma", "f16c"})[0].name == "avx2"
    assert runnable_paths(frozenset().union(*(path.needs for path in INSTRUCTION_PATHS))) == INSTRUCTION_PATHS
    monkeypatch.setattr(build, "runnable_paths", lambda: runnable_paths(()))
    with pytest.raises(ConfigError, match="'avx2': choose one of portable"):
        load_kernels(KERNELS, "avx2")


@pytest.mark.slow
@pytest.mark.parametrize("damage", [b"", b"not a library"])
def test_a_damaged_library_is_built_again(folder: Path, damage: bytes) -> None:
    (library,) = folder.iterdir()
    # Another file: this process has the first one mapped.
    library.unlink()
    library.write_bytes(damage)
    library.chmod(0o700)
    assert hasattr(load_kernels(folder), NAMES[0])


@pytest.mark.parametrize("place", ["folder", "library"])
def test_what_others_can_write_is_refused(folder: Path, place: str) -> None:
    path = folder if place == "folder" else next(folder.iterdir())
    path.chmod(0o777)
    with pytest.raises(KernelBuildError, match="chmod go-w"):
        load_kernels(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_belongs_to_another_user_is_refused(folder: Path) -> None:
    os.chown(next(folder.iterdir()), 12345, -1)
    with pytest.raises(KernelBuildError, match="another user"):
        load_kernels(folder)


@pytest.mark.slow
def test_a_folder_that_cannot_be_made_costs_a_build_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert hasattr(load_kernels(blocked / "kernels"), NAMES[0])
    assert "built for this run alone" in caplog.text
