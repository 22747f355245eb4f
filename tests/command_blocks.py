"""Finds the command blocks of documents, and runs them as a reader would.

A block is fenced by ``` or indented by four spaces. It is a command block if a line begins with
`expert`, `python` or `make`, with or without `$ ` in front. If there are `$ ` lines, all others are
the output. Comments directly above a block say what is special about it:

    <!-- not run: the reason -->          the block is shown only
    <!-- slow: the reason -->             it runs in `make slow-test`
    <!-- file: dates/rows.jsonl -->       its text is written to this file
    <!-- exits with 2 -->                 its last command ends with this code
    <!-- output differs: the reason -->   it runs, and what it prints is not compared
    <!-- the same numbers: the reason --> numbers are compared too
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[1]
PROGRAMS = ("expert", "expert-cli", "python", "python3", "make")
SAME_NUMBERS = "the same numbers"
NOTES = ("not run", "slow", "file", "output differs", SAME_NUMBERS)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SET_IN = re.compile(r"^    \S.*\n(?:    .*\n)*", re.MULTILINE)
COMMENT = re.compile(r"<!-- (.*?) -->")
# What may differ between runs and machines: numbers with their units, and bars.
NUMBER = re.compile(r"\d(?:[\d.,:eE+-]*\d)?(?:\s?(?:ms|s|min|h|KiB|MiB|GiB|[MK]|%)(?![\w]))?")
BAR = re.compile(r"[▏▎▍▌▋▊▉█·]+")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of a document, with the comments above it."""

    line: int
    text: str
    notes: dict[str, str] = field(default_factory=dict)
    commands: tuple[str, ...] = ()
    output: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        return int(self.notes.get("exits with", "0"))


def documents() -> list[Path]:
    """Every document that may contain commands."""
    found = [ROOT / "README.md", ROOT / "STATUS.md", ROOT / "CONTRIBUTING.md"]
    found += sorted((ROOT / "docs").glob("*.md"))
    found += sorted((ROOT / "experts").glob("*/README.md"))
    return [path for path in found if path.exists()]


def blocks_of(text: str) -> Iterator[Block]:
    """All command blocks and file blocks, in order."""
    for place, language, body in _bodies(text):
        notes = _notes_above(text[:place])
        line = text.count("\n", 0, place) + 1
        if "file" in notes:
            yield Block(line=line, text=body, notes=notes)
            continue
        commands, output = _commands_in(body)
        if commands and language in ("", "bash", "sh", "console"):
            yield Block(line=line, text=body, notes=notes, commands=commands, output=output)


def _bodies(text: str) -> list[tuple[int, str, str]]:
    """The start, language and text of each block."""
    fenced = [(match.start(), match[1], match[2]) for match in FENCE.finditer(text)]
    rest = FENCE.sub(lambda match: re.sub(r"[^\n]", "-", match[0]), text)
    set_in = [(match.start(), "", dedent(match[0])) for match in SET_IN.finditer(rest)]
    return sorted([*fenced, *set_in])


def _notes_above(before: str) -> dict[str, str]:
    """The comments directly above: `not run: x` -> {"not run": "x"}."""
    notes = {}
    for line in reversed(before.splitlines()):
        match = COMMENT.fullmatch(line.strip())
        if match is None:
            break
        name, _, value = match[1].partition(": ")
        if match[1].startswith("exits with "):
            name, value = "exits with", match[1].removeprefix("exits with ")
        notes[name] = value
    return notes


def _commands_in(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The commands, and their output if it is shown."""
    lines = text.replace("\\\n", " ").splitlines()
    if any(line.startswith("$ ") for line in lines):
        asked = tuple(line[2:] for line in lines if line.startswith("$ "))
        return asked, tuple(line for line in lines if not line.startswith("$ "))
    asked = tuple(line for line in lines if line.strip() and not line.startswith("#"))
    is_shell = any(_program(line) in PROGRAMS for line in asked)
    return (asked if is_shell else ()), ()


def _program(line: str) -> str:
    return line.split(maxsplit=1)[0] if line.split() else ""


def words_of(command: str) -> list[str]:
    return shlex.split(command, comments=True)


def needs_a_shell(command: str) -> bool:
    """Whether it has a pipe, a glob or a second command outside of quotes."""
    bare = re.sub(r"'[^']*'|\"[^\"]*\"", "", command.split(" # ")[0])
    return any(sign in bare for sign in "|>&;*")


def missing_lines(shown: tuple[str, ...], printed: str, *, numbers: bool = False) -> list[str]:
    """Shown lines that were not printed, in order; … matches anything, and any number matches any
    other unless `numbers` must be equal."""
    plain = _words if numbers else _plain
    real = [plain(line) for line in printed.splitlines()]
    missing, place = [], 0
    for line in shown:
        if not line.strip() or line.strip() == "…":
            continue
        pattern = ".*".join(re.escape(part.strip()) for part in plain(line).split("…"))
        hits = (n for n in range(place, len(real)) if re.search(pattern, real[n]))
        hit = next(hits, None)
        if hit is None:
            missing.append(line)
        else:
            place = hit + 1
    return missing


def _plain(line: str) -> str:
    return _words(NUMBER.sub("#", line))


def _words(line: str) -> str:
    return " ".join(BAR.sub("", line).split())
