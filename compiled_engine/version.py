"""The version of this package, for modules that must not import the package's front."""

from __future__ import annotations

__version__ = "0.1.0"
