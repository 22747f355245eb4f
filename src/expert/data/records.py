"""What walks the line from a file to tokens: rows, examples, segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from expert.core.errors import ExpertError
from expert.manifest.schema.message_names import Role

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class DataError(ExpertError):
    """Data that cannot be used as a whole: where, what, and what to do."""


class DataNotHere(DataError):
    """What is not on this machine: not made yet, or to be fetched from where nothing is reached."""


class FilesNotHere(DataNotHere):
    """Files that were to be on this machine, none of which is: somebody has yet to make them."""


class UnfitRow(Exception):
    """Why a row gives no example; it becomes a BadRow where file and line are known."""


@dataclass(frozen=True, slots=True)
class Row:
    """One record of a data set and where it stands."""

    values: Mapping[str, Any]
    file: str
    line: int
    """Line of a text file, or number of the row where a format has no lines; from 1. Below 0 it is
    the number of the row in a file whose lines hold several: -17 is the seventeenth."""

    @property
    def place(self) -> str:
        return place_of(self.file, self.line)


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used, where it stands, and why. It travels as a value: the reader of
    the rows decides whether it stops the run or is counted."""

    file: str
    line: int
    reason: str
    raw: str = ""
    """The beginning of the row, for rejects.jsonl."""

    def __str__(self) -> str:
        return f"{place_of(self.file, self.line)}: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        """As rejects.jsonl has it."""
        number = {"line": self.line} if self.line > 0 else {"row": -self.line}
        return {"file": self.file, **number, "reason": self.reason, "raw": self.raw}


UNREAD = Row({}, "", 0)
"""Stands for a row that was passed over without reading it."""
Unread = Callable[[], int]
"""How many of the rows that come next nobody needs; whoever reads them may put UNREAD there."""


def place_of(file: str, line: int) -> str:
    """Where a row stands, in words: `rows.jsonl:17`, `rows.json: row 17`."""
    return f"{file}:{line}" if line > 0 else f"{file}: row {-line}"


@dataclass(frozen=True)
class Dropped:
    """A row that a check of the manifest leaves out, and which one."""

    reason: str


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side says in a conversation."""

    role: Role
    text: str
    learn: bool = True
    """Of an answer: whether it is trained on."""
    extra: str = ""
    """Further fields of the message as JSON: the calls of an answer, which call a tool answers."""


@dataclass(frozen=True, slots=True)
class Example:
    """A row understood: a conversation, or plain text that is trained on as a whole."""

    turns: tuple[Turn, ...] = ()
    text: str = ""
    tools: str = ""
    """The tools that the model is offered, as JSON."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the text that is fed to the model, and whether it is trained on."""

    text: str
    learn: bool

    @property
    def size(self) -> int:
        """Characters, by which the memory that tokenising takes is bounded."""
        return len(self.text)


@dataclass(frozen=True, slots=True)
class TokenSegment(Segment):
    """A stretch of tokens that were made elsewhere; it has no text."""

    ids: npt.NDArray[np.int32]

    @property
    def size(self) -> int:
        return len(self.ids)


Made = list[Segment] | BadRow | Dropped
"""What becomes of a row."""
