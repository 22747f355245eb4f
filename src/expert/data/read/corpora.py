"""Named text corpora: `shakespeare`, given by the user or fetched once, and `python-stdlib`."""

from __future__ import annotations

import hashlib
import os
import sysconfig
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from expert.core.files import write_text_atomically
from expert.data.read.streams import not_here, unusable

SHAKESPEARE_ADDRESS = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
_SHAKESPEARE_FILE = "shakespeare.txt"
_FETCH_SECONDS = 30
_FETCH_BYTES = 4 * 2**20
# Neither the tests nor what was installed beside the standard library belong to it.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def given_shakespeare(folder: Path) -> Path | None:
    """The user's own file: in $EXPERT_CORPORA, or in corpora/ beside the manifest."""
    named = os.environ.get("EXPERT_CORPORA")
    places = [Path(named).expanduser()] if named else []
    places.append(folder / "corpora")
    return next((p / _SHAKESPEARE_FILE for p in places if (p / _SHAKESPEARE_FILE).is_file()), None)


def fetched_shakespeare() -> Path:
    """The corpus in the user's cache, fetched where it is not there yet."""
    path = _cache_folder() / _SHAKESPEARE_FILE
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == SHAKESPEARE_SHA256:
        return path
    content = _fetch(SHAKESPEARE_ADDRESS)
    if hashlib.sha256(content).hexdigest() != SHAKESPEARE_SHA256:
        raise unusable(
            "shakespeare",
            f"what came from {SHAKESPEARE_ADDRESS} is not the known file: wrong checksum",
            _give_it(),
        )
    write_text_atomically(path, content.decode())
    return path


def _fetch(address: str) -> bytes:
    try:
        with urllib.request.urlopen(address, timeout=_FETCH_SECONDS) as answer:
            content: bytes = answer.read(_FETCH_BYTES)
    except OSError as error:  # no network, no such name, refused, too slow, HTTP errors
        reason = getattr(error, "reason", None) or error
        raise not_here(
            "shakespeare", f"it could not be fetched from {address}: {reason}", _give_it()
        ) from error
    return content


def _give_it() -> str:
    return (
        f"put the text at corpora/{_SHAKESPEARE_FILE} beside the manifest, "
        f"or at $EXPERT_CORPORA/{_SHAKESPEARE_FILE}"
    )


def _cache_folder() -> Path:
    home = "LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME"
    named = os.environ.get(home)
    return (Path(named) if named else Path.home() / ".cache") / "expert" / "corpora"


def python_stdlib_text(max_chars: int | None = None, library: Path | None = None) -> str:
    """The sources of the running Python's standard library, one after the other."""
    root = library or Path(sysconfig.get_paths()["stdlib"])
    parts: list[str] = []
    size = 0
    for path in _sources_below(root):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        parts.append(text if text.endswith("\n") else text + "\n")
        size += len(parts[-1])
        if max_chars is not None and size >= max_chars:
            break
    if not parts:
        raise unusable(
            "python-stdlib", f"no sources of the standard library below {root}", "name a text file"
        )
    return "".join(parts)[:max_chars]


def _sources_below(root: Path) -> Iterator[Path]:
    """Its .py files in the order of their names, the same on every machine."""
    found = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = (path for path in found if not _LEFT_OUT.intersection(path.parts))
    return (root / name for name in sorted(path.as_posix() for path in kept))
