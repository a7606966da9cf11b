"""Runs the Triton kernels of this folder's tests in Triton's interpreter, which must be chosen before its import."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
