"""Commands over a run folder from someone else, any file of which may be damaged by a seed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
import sys
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expert.__main__ import main
from expert.core.errors import EXIT_INTERNAL, EXIT_MEANINGS

ESCAPES = "\x1b[2J\x1b]0;owned\x07\x9b31m\x9d0;x\x9c\u202egnp\u2066<script>alert(1)</script>\r\x08"
"""CSI, OSC and C1 sequences, marks that reverse the direction of writing, HTML."""
DEEP = 50_000
SECONDS = 60
"""A command over a tiny run takes a few; one that is still at it then waits for something."""
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1e308, 10**400, 2**70, float("nan"), float("inf"), "", "nan"),
    *(ESCAPES, "x" * 100_000, [], {}, [None], {"": None}, [1, "a", {}], {"a": {"b": [1]}}),
    *("../../../etc/passwd", "\x00", "\ud800", "9" * 5000),
)
_SIGNALS = (signal.SIGALRM, signal.SIGINT, signal.SIGTERM)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)


def _change_fields(path: Path, change: Callable[[list[tuple[Any, Any]]], None]) -> None:
    """Change some of the values of a JSON file, or of the lines of one."""
    text = path.read_text(encoding="utf-8")
    parts = list(map(json.loads, text.splitlines() if path.suffix == ".jsonl" else [text]))
    change(list(_places(parts)))
    path.write_text("\n".join(map(json.dumps, parts)) + "\n", encoding="utf-8")


def _another_value(path: Path, draw: random.Random) -> None:
    def change(places: list[tuple[Any, Any]]) -> None:
        for holder, key in draw.sample(places, min(len(places), draw.choice((1, 1, 3)))):
            holder[key] = draw.choice(VALUES)

    _change_fields(path, change)


def _escapes(path: Path, draw: random.Random) -> None:
    """Every text of the file becomes escape sequences."""

    def change(places: list[tuple[Any, Any]]) -> None:
        for holder, key in places:
            if isinstance(holder[key], str) and key != "event":
                holder[key] += ESCAPES

    _change_fields(path, change)


def _replaced(make: Callable[[Path], object]) -> Callable[[Path, random.Random], None]:
    def apply(path: Path, draw: random.Random) -> None:
        path.unlink()
        make(path)

    return apply


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 3 * 2**30)


NESTED = b'{"event":"step","time":1,"step":1,"loss":' + b"[" * DEEP + b"]" * DEEP + b"}\n"
HOWS: dict[str, Callable[[Path, random.Random], object]] = {
    "another value": _another_value,
    "escapes": _escapes,
    "deleted": lambda path, draw: path.unlink(),
    "truncated": lambda path, draw: os.truncate(path, draw.randrange(path.stat().st_size or 1)),
    "binary": lambda path, draw: path.write_bytes(draw.randbytes(2000)),
    "a folder": _replaced(Path.mkdir),
    "a pipe": _replaced(os.mkfifo),
    "a link to itself": _replaced(lambda path: path.symlink_to(path.name)),
    "nested": _replaced(lambda path: path.write_bytes(NESTED)),
    "3 GB": _replaced(_sparse),
    "a list": lambda path, draw: path.write_text("[1, 2]\n"),
    "null": lambda path, draw: path.write_text("null\n"),
}


def damages(run: Path, count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Files and what is done to them; those that every command reads four times as often."""
    draw = random.Random(seed)
    there = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())
    files = [file for file in there for _ in range(1 if "/" in file else 4)]
    for file in draw.choices(files, k=count):
        has_fields = file.endswith((".json", ".jsonl", "DONE"))
        hows = list(HOWS)[0 if has_fields else 2 :]
        changed = has_fields and draw.random() < 0.6
        yield file, "another value" if changed else draw.choice(hows)


@dataclass(frozen=True)
class Outcome:
    code: int | None
    """None where the command did not end."""
    text: str

    @property
    def fault(self) -> str:
        """Why this is not how a command may end; "" where it is."""
        if self.code is None:
            return "it did not end"
        if self.code == EXIT_INTERNAL or self.code not in EXIT_MEANINGS:
            return f"exit code {self.code}: {self.text[-600:]}"
        if "Traceback (most recent call last)" in self.text:
            return f"a traceback: {self.text[-600:]}"
        raw = {c for c in self.text if c not in "\n\t" and is_unseen(c)}
        if raw:
            return f"raw {sorted(map(hex, map(ord, raw)))}: {self.text[-600:]!r}"
        return "" if self.code == 0 or self.text.strip() else f"exit code {self.code}, no word"


def is_unseen(character: str) -> bool:
    """Whether a terminal may act upon it, written without the code that is tested."""
    if character in "\u200c\u200d":
        return False
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")


class _TooLong(BaseException):
    pass


def ended(*words: str) -> Outcome:
    """How a command ended, and all that it wrote."""
    stream = io.StringIO()

    def give_up(*_: object) -> None:
        raise _TooLong

    argv_before, handlers = sys.argv, {s: signal.getsignal(s) for s in _SIGNALS}
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(SECONDS)
    code: int | None = 0
    try:
        sys.argv = ["expert", *words]
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except _TooLong:
        code = None
    finally:
        signal.alarm(0)
        sys.argv = argv_before
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Outcome(code, stream.getvalue())
