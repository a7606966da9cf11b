"""The report: one HTML page that shows a recording to people.

``page.py`` puts the page together. Every other module works out one section as plain values, from a ``Recording`` and
without HTML: ``summary``, ``findings``, ``waterfall``, ``strip``, ``bindings``, ``timeline``, ``key_use`` and
``memory_use``. ``assets/`` holds the templates, the style and the script. Nothing is fetched when the page is looked
at: it works from a mail attachment.
"""

from __future__ import annotations

from compiled_engine_debug.report.page import render_report, write_report

__all__ = ["render_report", "write_report"]
