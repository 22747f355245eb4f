"""A conversation with an expert in a terminal: a line, an answer, until Ctrl-D."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from expert.core.errors import ExpertError

if TYPE_CHECKING:
    from expert.jobs.sample.sample import Sample

NEW = "/new"
MARK = "> "


class Answers(Protocol):
    """Who is talked to."""

    @property
    def remembers(self) -> bool: ...
    def anew(self) -> None: ...
    def ask(
        self, prompt: str, *, begin: Callable[[str, bool], None], tell: Callable[[str], None]
    ) -> Sample: ...


class Writes(Protocol):
    """Where answers go as they come."""

    def begin(self, prompt: str, plain: bool) -> None: ...
    def tell(self, piece: str) -> None: ...
    def end(self) -> None: ...


def read_line() -> str:
    """A line that somebody types; EOFError where nothing more comes."""
    with suppress(ImportError):
        import readline  # noqa: F401 - input() edits lines with it once it is imported
    return input(MARK)


def talk(
    conversation: Answers,
    writer: Writes,
    say: Callable[[str], None],
    read: Callable[[], str] = read_line,
) -> None:
    """Answer line after line. What cannot be answered is told, and the next line may be."""
    say(f"{_kept(conversation)}; Ctrl-D ends")
    while True:
        try:
            line = read().strip()
        except EOFError:
            writer.tell("\n")
            return
        if line == NEW:
            conversation.anew()
            say("begun anew")
        elif line:
            try:
                said = conversation.ask(line, begin=writer.begin, tell=writer.tell)
            except ExpertError as error:
                say(str(error))
                continue
            finally:
                writer.end()
            if said.note:
                say(said.note)


def _kept(conversation: Answers) -> str:
    if conversation.remembers:
        return f"what is said is kept: {NEW} begins anew"
    return "every line is continued by itself"
