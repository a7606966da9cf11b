"""``python -m compiled_engine`` is the command ``compiled-engine``."""

from __future__ import annotations

import sys

from compiled_engine.cli import main

if __name__ == "__main__":
    sys.exit(main())
