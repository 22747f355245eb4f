"""All terminal output: tables in a terminal, plain lines anywhere else."""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from textwrap import wrap
from typing import IO, Any, cast

from rich import box
from rich.console import Console
from rich.segment import Segment
from rich.status import Status
from rich.table import Table
from rich.text import Text

from expert.core.events import plain
from expert.core.secrets import known_secrets, redacted
from expert.core.text import json_text, visible

Row = Sequence[str]
Line = tuple[str, str]
"""A line of text and its style in a terminal."""
PLAIN_WIDTH = 100
"""Width of a table outside a terminal: what a log or an email shows without wrapping."""
LONG_CELL = 24
"""Columns with longer cells hold sentences."""
GAP = "  "
_COMMAND_AT_END = re.compile(r"(\S.*: |\s*)expert ")
"""Lines to copy, which a line break would cut in two."""
_WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


@dataclass
class Sheet:
    """A table: columns, and rows in sections separated by a line."""

    columns: tuple[str, ...]
    sections: Sequence[Sequence[Row]] = ()
    title: str = ""
    dim: tuple[str, ...] = ()
    """Columns of less importance."""


class _BestEffortStream:
    """A stream for optional output: the first failed write is reported on standard error, later
    output is discarded. A log on a full disk must not end a run of hours."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._ignoring_errors():
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._ignoring_errors():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _ignoring_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            silence(self._stream)
            if not isinstance(error, BrokenPipeError) and self._stream is not sys.stderr:
                show_problems(f"output: {error.strerror}: no more output; the run continues")


def make_console(*, error: bool = False, needed: bool = True) -> Console:
    """A console on standard output, or on standard error for problems.

    Untrusted text shown on it cannot move the cursor, set the window title or reverse the writing
    direction. When the reader of a pipe leaves, it falls silent (`quiet`) and the command continues
    to its own exit code; rich would exit with 1, even in the middle of training. Output that is not
    `needed`, like everything on standard error, may also be lost on a full disk.
    """

    class CleanConsole(Console):
        def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                text = segment.text if segment.control else visible(segment.text, keep="\n\t")
                yield segment if text == segment.text else Segment(text, segment.style)

        def on_broken_pipe(self) -> None:
            self.quiet = True
            silence(self.file)

    stream = sys.stderr if error else sys.stdout
    needed = needed and not error
    file = None if needed or stream is None else cast(IO[str], _BestEffortStream(stream))
    return CleanConsole(file=file, stderr=error, highlight=False, soft_wrap=True)


def silence(stream: IO[str]) -> None:
    """Discard everything else written to a pipe without a reader."""
    # A stream in memory has no descriptor, and a closed one is None.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def reader_has_left(descriptor: int) -> bool:
    """Whether the reader of a pipe has left; assumed if the system cannot tell."""
    watch = select.poll()
    try:
        watch.register(descriptor, 0)
    except (OSError, ValueError):
        return True
    return any(event & select.POLLERR for _, event in watch.poll(0))


def output_descriptors() -> list[int]:
    """Duplicates of standard output and error, to check later whether they are read: rich and typer
    redirect a closed pipe before they exit."""
    found = []
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or in memory
            found.append(os.dup(stream.fileno()))
    return found


def flush_outputs() -> None:
    """Flush buffered output; discard it if the reader left, or Python complains at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # `>&-`, and programs without a console
                stream.flush()
        except OSError as error:
            silence(stream)
            if stream is sys.stdout and not isinstance(error, BrokenPipeError):
                raise


def show_sheet(sheet: Sheet, console: Console) -> None:
    """A table, ruled in a terminal, aligned elsewhere. Where a word would have to be broken to fit
    its column, or three columns hold long sentences, every row is a paragraph."""
    in_terminal = console.is_terminal
    width = console.width if in_terminal else PLAIN_WIDTH
    sections = [[[*map(redacted, row)] for row in section] for section in sheet.sections]
    rows = [row for section in sections for row in section]
    columns = [*zip(sheet.columns, *rows, strict=True)]
    widths = [max(map(len, cells)) for cells in columns]
    words = [max((len(word) for cell in c for word in cell.split()), default=0) for c in columns]
    least = [widths[0], *words[1:]]
    needed = sum(least) + 3 * len(least)
    sentences = sum(widest > LONG_CELL for widest in widths[1:])
    if (sentences > 2 and sum(widths) > width) or (in_terminal and needed > width):
        for line in filter(None, [sheet.title, *_paragraphs(sheet.columns, rows, widths, width)]):
            show(console, line)
        return
    table = Table(box=box.SIMPLE_HEAD if in_terminal else None, pad_edge=False)
    table.padding = (0, 1) if in_terminal else (0, len(GAP), 0, 0)
    for position, column in enumerate(sheet.columns):
        style = "dim" if column in sheet.dim else ("bold" if position == 0 else None)
        table.add_column(
            Text(column),
            style=style,
            overflow="fold",
            min_width=least[position],
            no_wrap=position == 0,
        )
    for section in sections:
        for row in section:
            table.add_row(*map(Text, row))  # Text, so that brackets in a value are not markup
        table.add_section()
    if in_terminal:
        table.title, table.title_justify = sheet.title or None, "left"
        console.print(table, soft_wrap=False)
        return
    paper = Console(file=io.StringIO(), width=max(width, needed), color_system=None)
    with paper.capture() as drawn:
        paper.print(table, crop=False)
    for line in filter(None, [sheet.title, *drawn.get().rstrip().split("\n")]):
        console.out(line.rstrip(), highlight=False)


def _paragraphs(
    names: Row, rows: Sequence[Row], widths: Sequence[int], width: int
) -> Iterator[str]:
    """Every row as a line of its short cells, and its sentences below."""
    for row in rows:
        head, below = row[0].ljust(widths[0]), []
        for name, cell, widest in zip(names[1:], row[1:], widths[1:], strict=True):
            if widest <= LONG_CELL and len(head) + len(GAP) + len(cell) <= width:
                head += GAP + cell.ljust(widest)
            elif cell:
                below.append(f"{name}: {cell}".removeprefix(": ").replace("\n", "; "))
        yield head.rstrip()
        for words in below:
            yield from (f"    {line}" for line in wrap(words, width - 4, **_WHOLE_WORDS))


def show_bars(parts: Sequence[tuple[str, float, str]], whole: float, console: Console) -> None:
    """Horizontal bars: name, share of `whole`, and the value in words."""
    names = max((len(name) for name, _, _ in parts), default=0)
    cells = 40
    if console.is_terminal:
        room = console.width - names - 6 - max((len(words) for _, _, words in parts), default=0)
        cells = max(8, min(cells, room))
    for name, size, words in parts:
        share = min(1.0, max(0.0, size / whole)) if whole else 0.0
        bar = ("█" * round(cells * share)).ljust(cells, "·")
        console.print(Text.assemble(f"  {name.ljust(names)}  ", (bar, "cyan"), f"  {words}"))


def show_problems(text: str) -> None:
    """An error message or a list of problems, on standard error."""
    console = make_console(error=True)
    first, _, rest = text.partition("\n")
    show(console, first, "bold red")
    if rest:
        show(console, rest)


def write_line(text: str, *, needed: bool = True) -> None:
    """Machine-readable output without colours or wrapping, verbatim except in a terminal. Output
    that is also in a file is not `needed` and may be lost on a full disk."""
    if sys.stdout is None:  # `>&-`: nobody wants it
        return
    if sys.stdout.isatty():
        text = visible(text, keep="\n\t")
    stream = sys.stdout if needed else _BestEffortStream(sys.stdout)
    try:
        stream.write(text if text.endswith("\n") else text + "\n")
        if not needed:
            stream.flush()
    except BrokenPipeError:
        silence(sys.stdout)


def write_json(found: Any, *, needed: bool = True) -> None:
    """A result as indented JSON without secrets; dataclasses as objects, paths as text."""
    data = asdict(found) if is_dataclass(found) and not isinstance(found, type) else found
    write_line(json_text(plain(data, known_secrets())), needed=needed)


class Waiting:
    """Shows what is being waited for, one thing after the other: a spinner in a terminal, lines
    elsewhere."""

    def __init__(self, console: Console, what: str = "") -> None:
        self._console = console
        self._spinner: Status | None = None
        self(what)

    def __call__(self, what: str = "") -> None:
        """The next thing; none if `what` is empty."""
        if what and not self._console.is_terminal:
            self._console.out(f"{what} …", highlight=False)
        elif what and self._spinner is not None:
            self._spinner.update(Text(what))
        elif what:
            self._spinner = self._console.status(Text(what))
            self._spinner.start()
        elif self._spinner is not None:
            self._spinner.stop()
            self._spinner = None

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *_: object) -> None:
        self()


def show(console: Console, text: str, style: str = "") -> None:
    """Lines of text, in a terminal broken between words. Brackets in it are not markup."""
    text = redacted(text)
    if console.is_terminal:
        wrapped = [part for line in text.split("\n") for part in _wrapped(line, console.width)]
        console.print(Text("\n".join(wrapped), style=style), soft_wrap=True)
    else:
        console.out(text, highlight=False)


def _wrapped(line: str, width: int) -> list[str]:
    """A line broken between words, under its first one; a command to copy stays whole."""
    if len(line) <= width or _COMMAND_AT_END.match(line):
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + len(GAP))
    return wrap(line, width, subsequent_indent=indent, tabsize=4, **_WHOLE_WORDS)


def show_lines(console: Console, lines: Sequence[Line]) -> None:
    for text, style in lines:
        show(console, text, style)
