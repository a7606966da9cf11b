"""The order of layers by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable


def layer_order(names: Iterable[str]) -> list[str]:
    """``names`` in ascending layer order. The result depends on the names alone, never on the order they come in.

    * The layer index is the first component between dots that is a whole number (``model.layers.7.self_attn`` -> 7),
      as ``int`` reads it. A name without one is split at slashes too (``target/7.attn`` -> 7).
    * Layers with an index come first, ascending; gaps are allowed.
    * Ties (several caches of one layer, further numbers in a name) and names without a number are ordered by name,
      component by component, with numbers compared as numbers: ``attn``, ``attn.2``, ``attn.10``.
    """
    return sorted(names, key=_order_key)


def layer_index(name: str) -> int | None:
    """The layer index in ``name`` (see ``layer_order``); None where there is none."""
    for components in (name.split("."), re.split(r"[./]", name)):
        for component in components:
            if (number := _whole_number(component)) is not None:
                return number
    return None


def _whole_number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _order_key(name: str) -> tuple[bool, int, list[tuple[bool, int, str]], str]:
    index = layer_index(name)
    components = []
    for component in re.split(r"[./]", name):
        number = _whole_number(component)
        components.append((number is None, number or 0, "" if number is not None else component))
    return (index is None, index or 0, components, name)
