"""One command that checks and measures the engine on a GPU: ``python tools/gpu_check.py``.

``command`` reads the command line and runs the sections, one file each; ``report`` is what they hand back; ``lab`` is
what they share. The rest of the engine's tests need no GPU: here is what only a GPU can show.
"""
