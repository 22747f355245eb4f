"""Everything a person sees: tables in a terminal, plain lines anywhere else."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Row = Sequence[str]


@dataclass
class Sheet:
    """A table: columns, and rows in sections that a line sets apart."""

    columns: tuple[str, ...]
    sections: Sequence[Sequence[Row]] = ()
    title: str = ""
    dim: tuple[str, ...] = ()
    """Columns that stand back."""

    def rows(self) -> list[Row]:
        return [row for section in self.sections for row in section]


def make_console(*, error: bool = False) -> Console:
    """A console on standard output, or on standard error for problems.

    When the reader of a pipe leaves it falls silent (`quiet`), and the command goes on to its own
    end and exit code: rich would end it with 1, a run in the midst of training too.
    """
    from rich.console import Console

    class QuietlyLeft(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True
            say_no_more(self.file)

    return QuietlyLeft(stderr=error, highlight=False, soft_wrap=True)


def say_no_more(stream: IO[str]) -> None:
    """Let what is still written to a pipe without a reader go nowhere."""
    with contextlib.suppress(OSError, ValueError):  # a stream in memory has no descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def show_sheet(sheet: Sheet, console: Console) -> None:
    """A ruled table in a terminal; aligned columns, never cut, elsewhere."""
    if not console.is_terminal:
        for line in plain_lines(sheet):
            console.out(line, highlight=False)
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=sheet.title or None)
    table.title_justify = "left"
    for position, column in enumerate(sheet.columns):
        style = "dim" if column in sheet.dim else ("bold" if position == 0 else None)
        table.add_column(column, style=style, overflow="fold", no_wrap=position == 0)
    for section in sheet.sections:
        for row in section:
            table.add_row(*map(Text, row))  # Text, so that brackets in a value are not markup
        table.add_section()
    console.print(table, soft_wrap=False)


def plain_lines(sheet: Sheet) -> list[str]:
    """The table as text lines with aligned columns."""
    rows = [[cell.replace("\n", "; ") for cell in row] for row in sheet.rows()]
    widths = [max(map(len, column)) for column in zip(sheet.columns, *rows, strict=True)]
    lines = [sheet.title] if sheet.title else []
    for row in [list(sheet.columns), *rows]:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def show_bars(parts: Sequence[tuple[str, float, str]], whole: float, console: Console) -> None:
    """Horizontal bars: name, share of `whole`, and the value in words."""
    from rich.text import Text

    names = max((len(name) for name, _, _ in parts), default=0)
    for name, size, words in parts:
        bar = bar_of(size / whole if whole else 0.0)
        console.print(Text.assemble(f"  {name.ljust(names)}  ", (bar, "cyan"), f"  {words}"))


def bar_of(share: float, width: int = 40) -> str:
    """A bar of `width` cells, filled to an eighth of a cell."""
    eighths = round(8 * width * min(1.0, max(0.0, share)))
    full, rest = divmod(eighths, 8)
    filled = "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")
    return filled.ljust(width, "·")


def show_problems(text: str, *, error: bool = True) -> None:
    """A problem list or message, on standard error."""
    from rich.text import Text

    console = make_console(error=error)
    first, _, rest = text.partition("\n")
    console.print(Text(first, style="bold red"))
    if rest:
        console.print(Text(rest))


def write_line(text: str) -> None:
    """Machine-readable output: no colours, no wrapping."""
    try:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
    except BrokenPipeError:
        say_no_more(sys.stdout)
