"""This engine beside transformers' ``generate`` and continuous batching, vLLM and llama.cpp.

    python benchmarks/peers.py --engines compiled_engine llama.cpp --rounds 3

``side_by_side.py`` says what is measured and how, ``catalogue.py`` which engines there are.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent / "engines"))

from catalogue import ENGINES
from side_by_side import main

if __name__ == "__main__":
    sys.exit(main("peers", list(ENGINES), rounds=5))
