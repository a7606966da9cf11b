"""Cores that a process may use, and the limit on spinning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from compiled_engine.threads import limit_spinning, usable_cores


def system(folder: Path, cores: list[tuple[int, int]], **files: str) -> Path:
    """A /sys with (package, core) for each hardware thread, and control group files by their path."""
    for cpu, (package, core) in enumerate(cores):
        topology = folder / f"devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{package}\n")
        (topology / "core_id").write_text(f"{core}\n")
    for name, text in files.items():
        path = folder / "fs/cgroup" / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return folder


@pytest.fixture(autouse=True)
def four_cpus_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})


def test_two_threads_of_one_core_count_once(tmp_path: Path) -> None:
    assert usable_cores(system(tmp_path, [(0, 0), (0, 1), (0, 0), (0, 1)])) == 2


def test_equal_core_numbers_of_two_packages_are_two_cores(tmp_path: Path) -> None:
    assert usable_cores(system(tmp_path, [(0, 0), (0, 1), (1, 0), (1, 1)])) == 4


def test_only_allowed_cores_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 3})
    assert usable_cores(system(tmp_path, [(0, 0), (0, 1), (0, 2), (0, 3)])) == 2


def test_without_a_description_each_allowed_cpu_is_a_core(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 4


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu_dot_max": "200000 100000"}, 2),
        ({"cpu_dot_max": "max 100000"}, 4),
        ({"cpu_dot_max": "50000 100000"}, 1),
        ({"cpu_dot_max": "900000 100000"}, 4),
        ({"cpu__cpu_dot_cfs_quota_us": "300000", "cpu__cpu_dot_cfs_period_us": "100000"}, 3),
        ({"cpu__cpu_dot_cfs_quota_us": "-1", "cpu__cpu_dot_cfs_period_us": "100000"}, 4),
    ],
)
def test_a_control_groups_share_of_time_is_a_limit(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert usable_cores(system(tmp_path, [(0, 0), (0, 1), (0, 2), (0, 3)], **files)) == expected


def test_spinning_is_limited_unless_the_user_has_chosen() -> None:
    environment: dict[str, str] = {}
    limit_spinning(environment)
    assert int(environment["GOMP_SPINCOUNT"]) > 0
    for name, value in (("OMP_WAIT_POLICY", "active"), ("GOMP_SPINCOUNT", "7")):
        environment = {name: value}
        limit_spinning(environment)
        assert environment == {name: value}


def test_importing_the_package_limits_spinning_before_torch_is_there() -> None:
    program = "import sys, os, compiled_engine; print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    printed = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    count, torch_is_there = printed.stdout.split()
    assert int(count) > 0
    assert torch_is_there == "False"
