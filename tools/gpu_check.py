"""Check the engine on a machine with a GPU: ``python tools/gpu_check.py``. The package need not be installed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu_checks.command import main

if __name__ == "__main__":
    sys.exit(main())
