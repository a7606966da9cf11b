"""``python -m compiled_engine_debug``: the same as the command ``compiled-engine-debug``."""

from __future__ import annotations

import sys

from compiled_engine_debug.cli import main

if __name__ == "__main__":
    sys.exit(main())
