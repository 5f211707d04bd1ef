"""Tables on the console: ruled and coloured in a terminal, plain columns in a pipe or a file."""

import re

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 10_000
"""A pipe has no edge at which to wrap: each row of a table stays one line."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
"""Characters that could move a terminal's cursor or change its colours, or that HTML does not allow."""


def build_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def print_table(console: Console, head: list[str], rows: list[list[str]], *, left: int = 1) -> None:
    """The first `left` columns are words, the others numbers; nothing in a cell is taken for markup."""
    table = Table(box=box.ROUNDED if console.is_terminal else None, header_style="bold cyan", pad_edge=False)
    for place, name in enumerate(head):
        table.add_column(Text(visible(name)), justify="left" if place < left else "right")
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    console.print(table)


def print_line(console: Console, text: str, style: str = "") -> None:
    """One line, with nothing in it taken for markup."""
    console.print(Text(visible(text), style=style), soft_wrap=True)


def visible(text: str) -> str:
    """Control characters as the pictures that Unicode has for them, and half characters as their codes."""
    text = _CONTROL.sub(lambda found: chr(0x2400 + ord(found[0])) if found[0] != "\x7f" else "␡", text)
    return text.encode("utf-8", "backslashreplace").decode()
