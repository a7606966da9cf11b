"""Debugging of graph capture from outside the engine: read what it recorded, wrap it, compare it.

The command is ``compiled-engine-debug``; ``read_recording`` reads what ``LLM(record=FILE)`` wrote. The engine never
imports this package.
"""

from __future__ import annotations
