"""Many requests: what to run in each step, and what the caller gets back.

Knows requests, text and cache blocks, and no device; a runner does the computing.
Importing this room imports none of its modules, so that the front doors start fast.
"""
