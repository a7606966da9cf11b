"""Which memory a captured CUDA graph really uses, proven from the arguments of its nodes.

A graph's declared bindings (``compiled_engine.compile.graphs.bindings``) are what the engine believes it uses. Here the
graph itself is read: ``driver`` walks its nodes, ``parameters`` finds addresses in their arguments, ``prove`` compares
the two, ``watch`` notes during a capture which launch made which node.
"""

from __future__ import annotations
