"""All tests of the kernels once more, with kernels under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SANITIZE = "SANITIZE_KERNELS"


@pytest.mark.slow
@pytest.mark.skipif(bool(os.environ.get(SANITIZE)), reason="this is the run under sanitizers")
def test_the_kernels_are_clean_under_sanitizers() -> None:
    """A read or write outside an array, a misaligned access or an overflow ends the process with a report."""
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        pytest.fail(f"{compiler} is missing: the engine cannot run without it")
    runtimes = [_runtime(compiler, name) for name in ("libasan.so", "libubsan.so")]
    if None in runtimes:
        pytest.skip(f"{compiler} has no sanitizer runtimes")
    environment = os.environ | {
        SANITIZE: "1",
        "LD_PRELOAD": ":".join(map(str, runtimes)),
        # Python frees little at its end, and torch is built without the sanitizers' view of its containers.
        "ASAN_OPTIONS": "detect_leaks=0:detect_container_overflow=0",
        "HYPOTHESIS_PROFILE": "quick",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, f"{finished.stdout[-4000:]}\n{finished.stderr[-8000:]}"
    assert " passed" in finished.stdout


def _runtime(compiler: str, name: str) -> Path | None:
    printed = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = Path(printed.stdout.strip())
    return path.resolve() if path.is_absolute() and path.exists() else None
