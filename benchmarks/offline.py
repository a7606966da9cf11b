"""This engine beside transformers' ``generate``: the short form of ``peers.py``, which needs no further environment.

``side_by_side.py`` says what is measured and how.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent / "engines"))

from catalogue import OURS, REFERENCE
from side_by_side import main

if __name__ == "__main__":
    sys.exit(main("offline", [OURS, REFERENCE], rounds=3))
