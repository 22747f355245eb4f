"""A run folder from someone else: every file of a real run, damaged by a seed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expert.__main__ import main
from expert.core.errors import EXIT_INTERNAL, EXIT_MEANINGS
from expert.core.files import sha256_of
from expert.core.publish import DONE

ESCAPES = "\x1b[2J\x1b]0;owned\x07\x9b31m\x9d0;x\x9c\u202egnp\u2066<script>alert(1)</script>\r\x08"
"""CSI, OSC and C1 sequences, marks that reverse the direction of writing, HTML."""
DEEP = 50_000
SECONDS = 60
"""A command over a tiny run takes a few; one that is still at it then waits for something."""
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1e308, -1e308, 10**400, 2**70, float("nan"), float("inf"), "", "nan"),
    *(ESCAPES, "x" * 100_000, [], {}, [[]], [None], {"": None}, [1, "a", {}], {"a": {"b": [1]}}),
    *("../../../etc/passwd", "\x00", "\ud800", "0" * 400, "9" * 5000),
)
COMMANDS: dict[str, list[str]] = {
    "report": ["report", "RUN", "--to", "OUT/report"],
    "compare": ["report", "RUN", "--compare", "SOUND", "--to", "OUT/compared"],
    "watch": ["watch", "RUN"],
    "status": ["watch", "RUN", "--json"],
    "diagnose": ["diagnose", "RUN", "--no-timing"],
    "sample": ["sample", "RUN", "--prompt", "say red", "--max-tokens", "2", "--device", "cpu"],
    "export": ["export", "RUN", "--to", "OUT/exported", "--device", "cpu", "--allow-failed"],
    "validate": ["validate", "RUN", "--limit", "2", "--device", "cpu"],
    "resume": ["train", "--resume", "RUN", "--device", "cpu", "-m", "MANIFEST"],
}
READERS = ("report", "compare", "watch", "status", "diagnose")
"""Those that load no model."""


@dataclass(frozen=True)
class Damage:
    """What is done to one file of a run folder."""

    file: str
    how: str
    seed: int

    def __str__(self) -> str:
        return f"{self.file}: {self.how}, seed {self.seed}"

    def apply(self, run: Path) -> None:
        path = run / self.file
        draw = random.Random(f"{self.file} {self.how} {self.seed}")
        _HOWS[self.how](path, draw)
        if path.name != DONE and (path.parent / DONE).is_file() and draw.random() < 0.7:
            _seal_again(path)


def damages(run: Path, count: int, seed: int) -> list[Damage]:
    """Drawn over all files, those that every command reads four times as often as weights; those
    with fields are damaged in a field most of the time."""
    draw = random.Random(seed)
    there = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())
    files = [file for file in there for _ in range(1 if "/" in file else 4)]
    draw.shuffle(files)
    whole = [how for how in _HOWS if not how.startswith("field")]
    fields = [how for how in _HOWS if how.startswith("field")]
    found = []
    for number in range(count):
        file = files[number % len(files)]
        has_fields = file.endswith((".json", ".jsonl", "DONE"))
        hows = fields if has_fields and draw.random() < 0.6 else whole
        found.append(Damage(file, draw.choice(hows), draw.randrange(10**6)))
    return found


def _parts(path: Path) -> list[Any]:
    """The values of a JSON file, or of the lines of one."""
    text = path.read_text(encoding="utf-8")
    return list(map(json.loads, text.splitlines() if path.suffix == ".jsonl" else [text]))


def _write(path: Path, parts: list[Any]) -> None:
    path.write_text("\n".join(map(json.dumps, parts)) + "\n", encoding="utf-8")


def _field(path: Path, draw: random.Random) -> None:
    """One value somewhere in the file becomes another."""
    parts = _parts(path)
    places = list(_places(parts))
    for holder, key in draw.sample(places, min(len(places), draw.choice((1, 1, 3)))):
        holder[key] = draw.choice(VALUES)
    _write(path, parts)


def _field_gone(path: Path, draw: random.Random) -> None:
    parts = _parts(path)
    holder, key = draw.choice([place for place in _places(parts) if isinstance(place[0], dict)])
    del holder[key]
    _write(path, parts)


def with_escapes(path: Path, index: int | None = None) -> None:
    """Every text of the file, or one of them, becomes escape sequences."""
    parts = _parts(path)
    for number, (holder, key) in enumerate(_texts(parts)):
        if index in (None, number):
            holder[key] += ESCAPES
    _write(path, parts)


def text_places(run: Path) -> Iterator[tuple[str, int]]:
    """Every text in the files of a run, by file and number; of events one of each kind."""
    for path in sorted(run.rglob("*")):
        if path.is_file() and (path.suffix in (".json", ".jsonl") or path.name == DONE):
            seen: set[Any] = set()
            for number, (holder, key) in enumerate(_texts(_parts(path))):
                kind = (holder["event"], key) if "event" in holder else number
                if kind not in seen and path.name != "tokenizer.json":
                    seen.add(kind)
                    yield str(path.relative_to(run)), number


def _texts(parts: list[Any]) -> list[tuple[Any, Any]]:
    places = list(_places(parts))
    return [(h, k) for h, k in places if isinstance(h[k], str) and k != "event"]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)


def _replaced(make: Callable[[Path], None]) -> Callable[[Path, random.Random], None]:
    def apply(path: Path, draw: random.Random) -> None:
        path.unlink()
        make(path)

    return apply


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _nested(path: Path) -> None:
    inner = b"[" * DEEP + b"]" * DEEP
    path.write_bytes(b'{"event":"step","time":1,"step":1,"loss":' + inner + b"}\n")


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 3 * 2**30)


_HOWS: dict[str, Callable[[Path, random.Random], object]] = {
    "field": _field,
    "field again": _field,
    "field gone": _field_gone,
    "fields of escapes": lambda path, draw: with_escapes(path),
    "deleted": lambda path, draw: path.unlink(),
    "truncated": lambda path, draw: os.truncate(path, draw.randrange(path.stat().st_size or 1)),
    "empty": lambda path, draw: os.truncate(path, 0),
    "binary": lambda path, draw: path.write_bytes(draw.randbytes(2000)),
    "a flipped byte": lambda path, draw: _flip(path, draw),
    "a folder": _replaced(Path.mkdir),
    "a pipe": _replaced(lambda path: os.mkfifo(path)),
    "a link to itself": _replaced(_loop),
    "a link out": _replaced(lambda path: path.symlink_to("/dev/zero")),
    "nested": _replaced(_nested),
    "3 GB": _replaced(_sparse),
    "a list": lambda path, draw: path.write_text("[1, 2]\n"),
    "null": lambda path, draw: path.write_text("null\n"),
}


def _flip(path: Path, draw: random.Random) -> None:
    raw = bytearray(path.read_bytes())
    if raw:
        raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    path.write_bytes(raw)


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


def _seal_again(path: Path) -> None:
    """List the damaged file with its present hash, as anyone who made the folder could."""
    done = path.parent / DONE
    listed = json.loads(done.read_text(encoding="utf-8"))
    listed.pop(path.name, None)
    if path.is_file() and path.stat().st_size < 2**30 and not path.is_symlink():
        listed[path.name] = {"size": path.stat().st_size, "sha256": sha256_of(path)}
    done.write_text(json.dumps(listed), encoding="utf-8")


class _TooLong(BaseException):
    pass


def command(name: str, *, run: Path, sound: Path, manifest: Path, out: Path) -> Outcome:
    """Run a command over a run folder in this process."""
    shutil.rmtree(out, ignore_errors=True)
    places = {"RUN": run, "SOUND": sound, "MANIFEST": manifest}
    words = [str(places.get(word, word)).replace("OUT", str(out)) for word in COMMANDS[name]]
    outcome = ended("expert", *words)
    written = list(out.rglob("*.md")) if out.is_dir() else []
    text = "".join(path.read_text(encoding="utf-8") for path in written)
    return Outcome(outcome.code, outcome.text + text)


def ended(*argv: str) -> Outcome:
    """How a command ended, and all that it wrote."""
    stream = io.StringIO()

    def give_up(*_: object) -> None:
        raise _TooLong

    argv_before, handlers = sys.argv, {s: signal.getsignal(s) for s in _SIGNALS}
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(SECONDS)
    code: int | None = 0
    try:
        sys.argv = list(argv)
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


_SIGNALS = (signal.SIGALRM, signal.SIGINT, signal.SIGTERM)
