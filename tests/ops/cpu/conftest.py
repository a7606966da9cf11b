"""The kernels' tests, also under sanitizers (see ``test_sanitizers.py``)."""

from __future__ import annotations

import os

from compiled_engine.ops.cpu import build

SANITIZE = "SANITIZE_KERNELS"
"""Environment variable that ``test_sanitizers.py`` sets to have all kernels of the process built with these flags."""

SANITIZER_FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1", "-O1")

if os.environ.get(SANITIZE):
    build.FLAGS = (*build.FLAGS, *SANITIZER_FLAGS)
