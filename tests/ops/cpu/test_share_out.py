"""The thread pool under load: every index once, nothing left when it returns, no data race."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from compiled_engine.ops.cpu.build import SOURCE_FOLDER

CHECK = Path(__file__).with_name("share_out_check.cpp")


@pytest.mark.parametrize("sanitizer", [None, "thread", "address,undefined"])
def test_every_index_is_called_once(tmp_path: Path, sanitizer: str | None) -> None:
    program = tmp_path / "check"
    flags = ["-std=c++17", "-O2", "-g1", "-fopenmp", "-pthread", f"-I{SOURCE_FOLDER}"]
    flags += [f"-fsanitize={sanitizer}"] if sanitizer else []
    command = [
        os.environ.get("CXX") or "g++",
        *flags,
        str(CHECK),
        str(SOURCE_FOLDER / "threads.cpp"),
        "-o",
        str(program),
    ]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode and sanitizer and "cannot find" in built.stderr:
        pytest.skip(f"the compiler has no runtime for -fsanitize={sanitizer}")
    assert built.returncode == 0, built.stderr
    # Without the runtime of another sanitizer that this process may run under.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    finished = subprocess.run([str(program)], env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert finished.returncode == 0, finished.stderr[-4000:]
