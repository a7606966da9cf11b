"""Recorded runs, as the file that the engine wrote or in a bundle."""

from __future__ import annotations

from pathlib import Path

from compiled_engine_debug.bundle import is_bundle, read_bundle
from compiled_engine_debug.recording import Recording, read_recording


def read_run(path: Path) -> Recording:
    """The recording in ``path``, which is one or a bundle. Raises ``RecordingError`` or ``BundleError``."""
    return read_bundle(path).recording if is_bundle(path) else read_recording(path)
