"""Named text corpora: `shakespeare`, from the user or downloaded once, and `python-stdlib`."""

from __future__ import annotations

import hashlib
import os
import sysconfig
import urllib.request
from pathlib import Path

from expert.core.files import read_bytes, read_text, write_text_atomically
from expert.data.read.streams import data_error, data_not_found

SHAKESPEARE_ADDRESS = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
_SHAKESPEARE_FILE = "shakespeare.txt"
_GIVE_IT = (
    f"put the text at corpora/{_SHAKESPEARE_FILE} beside the manifest, "
    f"or at $EXPERT_CORPORA/{_SHAKESPEARE_FILE}"
)
# Tests, and packages installed next to the standard library.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def user_shakespeare(folder: Path) -> Path | None:
    """The user's file in $EXPERT_CORPORA, or in corpora/ beside the manifest."""
    named = os.environ.get("EXPERT_CORPORA")
    folders = [*([Path(named).expanduser()] if named else []), folder / "corpora"]
    files = (place / _SHAKESPEARE_FILE for place in folders)
    return next((file for file in files if file.is_file()), None)


def download_shakespeare() -> Path:
    """The corpus in the user's cache, downloaded if missing."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(cache) / "expert" / "corpora" / _SHAKESPEARE_FILE
    if path.is_file() and hashlib.sha256(read_bytes(path)).hexdigest() == SHAKESPEARE_SHA256:
        return path
    try:
        with urllib.request.urlopen(SHAKESPEARE_ADDRESS, timeout=30) as answer:
            content: bytes = answer.read(4 * 2**20)
    except OSError as error:  # no network, unknown host, refused, timeout, HTTP errors
        why = getattr(error, "reason", None) or error
        what = f"it could not be fetched from {SHAKESPEARE_ADDRESS}: {why}"
        raise data_not_found("shakespeare", what, _GIVE_IT) from error
    if hashlib.sha256(content).hexdigest() != SHAKESPEARE_SHA256:
        what = f"the file downloaded from {SHAKESPEARE_ADDRESS} has a wrong checksum"
        raise data_error("shakespeare", what, _GIVE_IT)
    write_text_atomically(path, content.decode())
    return path


def python_stdlib_text(max_chars: int | None = None, library: Path | None = None) -> str:
    """The sources of Python's standard library, sorted by name, the same on every machine."""
    root = library or Path(sysconfig.get_paths()["stdlib"])
    names = []
    for place, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        here = Path(place).relative_to(root)
        names += [(here / name).as_posix() for name in files if name.endswith(".py")]
    parts: list[str] = []
    size = 0
    for name in sorted(names):
        try:
            text = read_text(root / name)
        except UnicodeDecodeError:
            continue
        parts.append(text if text.endswith("\n") else text + "\n")
        size += len(parts[-1])
        if max_chars is not None and size >= max_chars:
            break
    if not parts:
        what = f"no sources of the standard library below {root}"
        raise data_error("python-stdlib", what, "name a text file")
    return "".join(parts)[:max_chars]
