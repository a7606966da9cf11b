"""A bundle: one zip file with everything about a run that a bug report needs, and nothing that is private.

It holds the recording with addresses as places, the model's config, findings of an audit, and only on request prompts
and weights.
"""

from __future__ import annotations

from compiled_engine_debug.bundle.archive import BundleError
from compiled_engine_debug.bundle.reading import Bundle, extract_weights, is_bundle, read_bundle
from compiled_engine_debug.bundle.writing import write_bundle

__all__ = ["Bundle", "BundleError", "extract_weights", "is_bundle", "read_bundle", "write_bundle"]
