"""How Expert and its extras are installed.

The distribution is `expert-trainer`. `expert-cli` on PyPI is an unrelated package; here that is
only the second name of the command.
"""

from __future__ import annotations

import shlex
from functools import cache
from importlib import metadata
from pathlib import Path

NAME = "expert-trainer"
INSTALL_HINT = "`pip install -e .` in a clone of its repository"
"""For other people, in Markdown: no local folder, no wrong index."""


def pip_install(*extras: str, package: Path = Path(__file__).parents[1]) -> str:
    """The command that adds extras to this installation: `pip install 'expert-trainer[quant]'`. pip
    takes the installed package, wherever it came from; a clone need not be installed."""
    folder, more = clone_of(package), f"[{','.join(extras)}]" if extras else ""
    installed = any(metadata.distributions(name=NAME, path=[str(package.parent)]))
    quoted = shlex.quote(f"{folder or (NAME if installed else '.')}{more}")
    # pip would look for a name that is not installed in an index, where it is somebody else's.
    place = "" if folder or installed else "in a clone of Expert: "
    return f"{place}pip install {'' if installed and not folder else '-e '}{quoted}"


@cache
def clone_of(package: Path) -> Path | None:
    """The clone of Expert's repository around its package; None if pip has copied it elsewhere."""
    import tomllib

    clone = package.resolve().parents[1]
    try:
        project = tomllib.loads((clone / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return clone if project["name"] == NAME else None
    except (OSError, ValueError, KeyError, TypeError):  # tomllib's errors are ValueErrors
        return None
