"""Where this installation of Expert came from, so that extras are installed from the same place.

The distribution is `expert-trainer`. `expert-cli` on PyPI is an unrelated package; here that is
only the second name of the command.
"""

from __future__ import annotations

import json
import os
import shlex
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

NAME = "expert-trainer"


class Origin(NamedTuple):
    """What pip installed Expert from."""

    kind: Literal["checkout", "folder", "url", "index", "unknown"]
    """`checkout`: editable, runs from the folder. `folder`: copied from a folder."""
    source: str
    """A folder, a URL as written after `@` in a requirement, or the name in an index."""


@cache
def origin() -> Origin:
    return origin_of(Path(__file__).resolve().parents[1])


def origin_of(package: Path) -> Origin:
    """Where the package in this folder came from: a checkout around it, or pip's record."""
    clone = package.parents[1]
    if package.parent.name == "src" and _is_our_project(clone / "pyproject.toml"):
        return Origin("checkout", str(clone))
    return _recorded(package.parent) or Origin("unknown", "")


def pip_install(*extras: str, of: Origin | None = None, windows: bool = os.name == "nt") -> str:
    """The command that adds extras to this installation: `pip install 'expert-trainer[quant]'`."""
    kind, source = of or origin()
    more = f"[{','.join(extras)}]" if extras else ""
    if kind == "unknown":
        return f"in a clone of Expert: pip install -e {_quoted('.' + more, windows)}"
    what = f"{NAME}{more} @ {source}" if kind == "url" else source + more
    return f"pip install {'-e ' if kind == 'checkout' else ''}{_quoted(what, windows)}"


def install_hint(of: Origin | None = None) -> str:
    """Installation instructions for other people, in Markdown: no local folder, no wrong index."""
    source = of or origin()
    public = source.kind == "url" and "://" in source.source and "file://" not in source.source
    if source.kind == "index" or public:
        return f"`{pip_install(of=source, windows=False)}`"
    return "`pip install -e .` in a clone of its repository"


def _is_our_project(file: Path) -> bool:
    import tomllib

    try:
        project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
    except (OSError, ValueError):  # tomllib's errors are ValueErrors
        return False
    return isinstance(project, dict) and project.get("name") == NAME


def _recorded(site: Path) -> Origin | None:
    """What pip recorded beside the package (PEP 610); None if pip did not install it."""
    from importlib import metadata

    for distribution in metadata.distributions(name=NAME, path=[str(site)]):
        try:
            text = distribution.read_text("direct_url.json")
        except OSError:
            return None
        return Origin("index", NAME) if text is None else _direct(text)
    return None


def _direct(text: str) -> Origin | None:
    from urllib.parse import urlsplit, urlunsplit
    from urllib.request import url2pathname

    try:
        record: Any = json.loads(text)
        url = urlsplit(record["url"])
        if not url.scheme:
            return None
        folder = record.get("dir_info")
        if folder is not None and url.scheme == "file":
            editable = bool(folder.get("editable"))
            return Origin("checkout" if editable else "folder", url2pathname(url.path))
        host = url.netloc.rpartition("@")[2]  # PEP 610 forbids passwords; not every tool complies
        plain = urlunsplit((url.scheme, host, url.path, url.query, ""))
        version = record.get("vcs_info")
        if version:
            plain = f"{version['vcs']}+{plain}@{version['commit_id']}"
        below = record.get("subdirectory")
        return Origin("url", plain + (f"#subdirectory={below}" if below else ""))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _quoted(word: str, windows: bool) -> str:
    if not windows:
        return shlex.quote(word)
    return f'"{word}"' if word != NAME else word  # cmd.exe has no single quotes
