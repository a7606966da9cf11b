"""Tables on standard output: drawn on a terminal, plain columns elsewhere, so that other programs can cut them."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# So wide that no line of plain text is folded.
_PLAIN_WIDTH = 4000


@dataclass(frozen=True)
class Column:
    """Numbers stand to the right."""

    name: str
    right: bool = False


def columns(*names: str, right: Iterable[str] = ()) -> tuple[Column, ...]:
    """Columns with these names, of which those named in ``right`` hold numbers."""
    numbers = frozenset(right)
    return tuple(Column(name, name in numbers) for name in names)


def print_table(title: str, header: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, and an empty line after it. Texts are shown as they are, without markup."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    plain = not console.is_terminal
    table = Table(box=None if plain else box.ROUNDED, pad_edge=not plain)
    for column in header:
        table.add_column(column.name, justify="right" if column.right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    if not plain:
        console.print(Text(title, "bold"), table, sep="\n")
        return
    text = io.StringIO()
    Console(file=text, width=_PLAIN_WIDTH, color_system=None).print(table)
    print("\n".join([title, *(line.rstrip() for line in text.getvalue().splitlines())]), end="\n\n")
