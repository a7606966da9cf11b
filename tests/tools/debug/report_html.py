"""A report's HTML read back: what its elements say, for tests."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

_VOID = {"meta", "link", "input", "br"}


@dataclass
class Element:
    """One element; ``text``: all text in it."""

    tag: str
    attributes: dict[str, str]
    text: str = ""


@dataclass
class Page(HTMLParser):
    """All elements of a page in the order in which they begin, and what was not closed as it was opened."""

    elements: list[Element] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._open: list[Element] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.elements.append(element)
        if tag not in _VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open[-1].tag != tag:
            self.faults.append(f"</{tag}> closes {self._open[-1].tag if self._open else None}")
            return
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def with_attribute(self, name: str, value: str | None = None) -> list[Element]:
        """Elements that have the attribute ``name``, equal to ``value`` where that is given."""
        return [item for item in self.elements if name in item.attributes and value in (None, item.attributes[name])]

    def number(self, name: str, value: str) -> float:
        """The exact number of the one element whose attribute ``name`` is ``value``."""
        (element,) = self.with_attribute(name, value)
        return float(element.attributes["data-value"])

    def data(self, name: str) -> Any:
        """The plain data that the page has for its script under the id ``name``."""
        (element,) = self.with_attribute("id", name)
        return json.loads(element.text)


def read_page(html: str) -> Page:
    """``html`` as elements. Asserts that every element is closed in its place."""
    page = Page()
    page.feed(html)
    page.close()
    assert page.faults == []
    return page
