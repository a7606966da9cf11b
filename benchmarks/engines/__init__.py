"""One file for each engine that is measured: ``open_engine(task)`` starts it.

Each file runs in its engine's own environment and imports that engine, ``task`` and the standard library.
"""
