"""Rows as the model sees them: trained text in colour, or in brackets without colours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from expert.cli.show.display import show
from expert.core.text import counted, visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from expert.data.inspect.shown_rows import ShownRow

BRACKETS = ("⟦", "⟧")
"""Around trained text, with words where they occur in a row."""
TRAINED, CONTEXT, SPECIAL, LOST, NOTE_STYLE = "black on green", "", "bold cyan", "red strike", "dim"
SEEN_MARGIN, LOST_MARGIN, NOTE_MARGIN = "  │ ", "  ✂ ", "  ┊ "
"""Margins of what the model sees, of what it does not see, and of notes."""
NEW_LINE = "↵"


def show_rows(rows: Sequence[ShownRow], console: Console) -> None:
    """The rows one below the other, with a legend."""
    from rich.text import Text

    if not rows:
        return
    colour = console.is_terminal and not console.no_color and console.color_system is not None
    marks = None if colour else _brackets(rows)
    legend = Text("\nrows as the model sees them; ")
    if marks is None:
        legend.append("trained on", style=TRAINED).append(", ")
        legend.append("special token", style=SPECIAL)
    else:
        legend.append(f"{marks[0]}trained on{marks[1]}")
    console.print(legend.append(f", {NEW_LINE} is a line break"))
    for row in rows:
        show(console, _head(row), "bold")
        for note in row.notes:
            show(console, f"  {visible(note)}", NOTE_STYLE)
        for line in _lines(row, marks):
            console.print(line)


def _brackets(rows: Sequence[ShownRow]) -> tuple[str, str]:
    texts = "".join(text for row in rows for one in row.segments for text in (one.text, one.after))
    return BRACKETS if {*BRACKETS}.isdisjoint(texts) else ("⟦trained:", ":trained⟧")


def _head(row: ShownRow) -> str:
    """The row's location, why it is shown, and its tokens."""
    place = f"{visible(row.place, keep='')} ({row.split}, {row.because})"
    parts = []
    if row.tokens is not None:
        counts = "trained on" if row.split == "train" else "counted in the loss"
        parts.append(f"{counted(row.tokens, 'token')}, {row.trained_tokens or 0:,} {counts}")
        if row.special_tokens:
            listed = [f"{text} ×{many}" for text, many in row.special_tokens.items()]
            parts.append(f"special tokens {', '.join(map(visible, listed))}")
        if row.pieces > 1:
            parts.append(f"split into {row.pieces:,} sequences")
    if row.left_out:
        parts.append(f"not trained on: {visible(row.left_out, keep='')}")
    return f"{place}: {'; '.join(parts)}" if parts else place


class _Page:
    """A row in lines, written from left to right, each after a bar; cut text after scissors."""

    def __init__(self, marks: tuple[str, str] | None) -> None:
        self.marks = marks
        self.lines: list[Text] = []
        self._margin, self._inside = SEEN_MARGIN, False
        self._line = self._new_line()

    def _new_line(self) -> Text:
        from rich.text import Text

        return Text.assemble((self._margin, NOTE_STYLE))

    def margin(self, margin: str) -> None:
        """Continue with this margin on a new line; an open bracket is closed first."""
        if margin != self._margin:
            self.mark(False)
            if len(self._line) > len(self._margin):
                self.lines.append(self._line)
            self._margin = margin
            self._line = self._new_line()

    def note(self, text: str) -> None:
        """A note between lines of the row."""
        margin = self._margin
        self.margin(NOTE_MARGIN)
        self._line.append(text, style=NOTE_STYLE)
        self.margin(margin)

    def write(self, text: str, style: str) -> None:
        for number, part in enumerate(text.split("\n")):
            if number:
                self._line.append(NEW_LINE, style=style)
                self.lines.append(self._line)
                self._line = self._new_line()
            self._line.append(visible(part, keep=""), style=style)

    def mark(self, trained: bool) -> None:
        if self.marks is not None and trained != self._inside:
            self._line.append(self.marks[0] if trained else self.marks[1])
        self._inside = trained


def _lines(row: ShownRow, marks: tuple[str, str] | None) -> list[Text]:
    page, seen, piece = _Page(marks), True, 0
    for one in row.segments:
        if seen and not one.seen and not row.left_out:
            page.note(
                f"{row.lost_because}: {counted(row.lost_tokens, 'token')} lost, "
                f"{row.lost_answer_tokens:,} of them would be trained on"
            )
        elif one.piece != piece and one.seen:
            page.note(f"sequence {one.piece + 1:,} of {row.pieces:,} starts here")
        page.margin(SEEN_MARGIN if one.seen or row.left_out else LOST_MARGIN)
        seen, piece = one.seen, one.piece
        style = TRAINED if one.trained else SPECIAL if one.special else CONTEXT
        style = f"bold {TRAINED}" if one.trained and one.special else style
        style = style if one.seen else LOST
        page.mark(one.trained)
        page.write(one.text, style)
        if one.not_shown:
            page.note(f"{counted(one.not_shown, 'token')} not shown: --full shows all")
            page.mark(one.trained and bool(one.after))
            page.write(one.after, style)
    page.margin("")  # ends the last line
    return page.lines
