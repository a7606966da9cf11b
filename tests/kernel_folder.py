"""Where the tests keep the C++ kernels, so that they are built once and not by every test."""

from __future__ import annotations

from pathlib import Path

KERNELS = Path(__file__).parent.parent / ".cache" / "test-kernels"
