"""The audit: run a model on a workload and look before, inside and after every step for what capture gets wrong.

A detector is one small module. ``AuditedRunner`` wraps the engine's runner and asks the detectors; ``run_audit`` does
the whole of it for the command line.
"""

from __future__ import annotations
