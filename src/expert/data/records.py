"""The stages of data from a file to tokens: rows, examples, segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from expert.core.errors import ExpertError
from expert.manifest.schema.message_names import Role

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class DataError(ExpertError):
    """Data that cannot be used at all. The message says where, what is wrong and what to do."""


class DataNotFound(DataError):
    """Data that is not on this machine: not written yet, or on a host that cannot be reached."""


class FilesNotFound(DataNotFound):
    """None of the local files that were named exists."""


class RowError(Exception):
    """Why a row cannot become an example; turned into a BadRow where file and line are known."""


@dataclass(frozen=True, slots=True)
class Row:
    """One record of a data set and its position."""

    values: Mapping[str, Any]
    file: str
    line: int
    """Line in a text file, or row number in a format without lines; counted from 1. Negative: the
    row number in a file that has several rows per line (-17 is row 17)."""

    @property
    def place(self) -> str:
        return place_of(self.file, self.line)


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used, its position, and why. A value, not an exception: the reader of
    the rows decides whether it stops the run or is counted."""

    file: str
    line: int
    reason: str
    raw: str = ""
    """The beginning of the row, for rejects.jsonl."""

    def __str__(self) -> str:
        return f"{place_of(self.file, self.line)}: {self.reason}"

    def within(self, file: str) -> str:
        """The same below a line that names the file."""
        place = f"line {self.line}" if self.line > 0 else f"row {-self.line}"
        return f"{place}: {self.reason}" if file == self.file else str(self)

    def to_json(self) -> dict[str, Any]:
        """The entry in rejects.jsonl."""
        number = {"line": self.line} if self.line > 0 else {"row": -self.line}
        return {"file": self.file, **number, "reason": self.reason, "raw": self.raw}


def place_of(file: str, line: int) -> str:
    """The position of a row for messages: `rows.jsonl:17`, `rows.json: row 17`."""
    return f"{file}:{line}" if line > 0 else f"{file}: row {-line}"


@dataclass(frozen=True)
class Dropped:
    """A row excluded by a check of the manifest."""

    reason: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation."""

    role: Role
    text: str
    learn: bool = True
    """Whether an answer is trained on."""
    extra: str = ""
    """Other fields of the message as JSON, such as tool calls or the id of the call it answers."""
    in_prompt: bool = False
    """An answer inside the request: trained on only where the prompt is."""

    def is_trained(self, *, learn_prompt: bool) -> bool:
        return self.learn and (learn_prompt or not self.in_prompt)


@dataclass(frozen=True, slots=True)
class Example:
    """A parsed row: a conversation, or plain text that is all trained on."""

    turns: tuple[Turn, ...] = ()
    text: str = ""
    tools: str = ""
    """The tools offered to the model, as JSON."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the text given to the model, and whether it is trained on."""

    text: str
    learn: bool


@dataclass(frozen=True, slots=True)
class TokenSegment(Segment):
    """A piece that is already tokenised; it has no text."""

    ids: npt.NDArray[np.int32]


class Branched(list[Segment]):
    """The segments of a row with several answers to one prompt: the prompt, then the answers."""

    def __init__(self, conversations: Sequence[list[Segment]], *, mismatched: bool = False) -> None:
        """`conversations`: each answer after its prompt, as it is tokenised; one without segments
        stands for an answer that the row does not have. `mismatched`: the answer of another row is
        added when the row is tokenised."""
        self.conversations, self.mismatched = conversations, mismatched
        first = next(segments for segments in conversations if segments)
        prompt = [segment for segment in first if not segment.learn]
        answers = [s for segments in conversations for s in segments if s.learn]
        super().__init__([*prompt, *answers])


RowOutcome = list[Segment] | BadRow | Dropped
"""The outcome of a row; its segments may be Branched."""
