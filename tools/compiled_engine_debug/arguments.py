"""Values of command line options, for argparse's ``type``."""

from __future__ import annotations

import argparse


def positive_number(text: str) -> int:
    """A whole number of at least 1. Raises ``ArgumentTypeError`` for another text."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return number
