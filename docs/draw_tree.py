"""Draws the picture of the source tree in README.md and CONTRIBUTING.md from the tree itself.

    .venv/bin/python docs/draw_tree.py

README gets the layers; CONTRIBUTING gets every folder with its files and what the folder is for,
which is the docstring of its `__init__.py`. It replaces what stands between the marks.
"""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "expert"
LAYERS = (
    ("cli",),
    ("jobs",),
    ("run",),
    ("training", "answer"),
    ("data", "model", "parallel", "telemetry", "judging", "insight"),
    ("planning",),
    ("manifest",),
    ("core",),
)
"""From the top: each folder imports itself and the lines below its own."""
BEGIN = "<!-- tree: drawn by docs/draw_tree.py, do not edit -->"
END = "<!-- end of tree -->"
WIDTH = 110


def purpose(folder: Path) -> str:
    """The docstring of a folder's `__init__.py`, on one line."""
    tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    return " ".join((ast.get_docstring(tree) or "").split())


def names_in(folder: Path) -> list[str]:
    """Subfolders with a slash, then files, each in alphabetical order."""
    folders = [f"{each.name}/" for each in sorted(folder.iterdir()) if _is_package(each)]
    files = [each.stem for each in sorted(folder.glob("*.py")) if each.stem != "__init__"]
    return folders + files


def _is_package(path: Path) -> bool:
    return (path / "__init__.py").is_file()


def layers() -> str:
    """One line for each folder of the first level, with its purpose."""
    lines = []
    for number, folders in enumerate(LAYERS):
        level = f"L{len(LAYERS) - 1 - number}"
        for folder in folders:
            lines.append(f"{level:4}{folder:11}{purpose(SOURCE / folder)}")
            level = ""
    return "\n".join(lines)


def whole() -> str:
    """Every folder with its purpose and its files."""
    lines = []
    for folder in (name for names in LAYERS for name in names):
        lines += _described(SOURCE / folder, folder)
        for each in sorted((SOURCE / folder).rglob("__init__.py")):
            if each.parent != SOURCE / folder:
                lines += _described(each.parent, str(each.parent.relative_to(SOURCE)), "  ")
    return "\n".join(lines)


def _described(folder: Path, name: str, indent: str = "") -> list[str]:
    files = " · ".join(names_in(folder))
    body = textwrap.wrap(
        files, WIDTH, initial_indent=f"{indent}    ", subsequent_indent=f"{indent}    "
    )
    return [f"{indent}{name}/  {purpose(folder)}", *body]


def document(text: str, picture: str) -> str:
    """The document with the picture between its marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"no marks: {BEGIN} … {END}")
    return f"{before}{BEGIN}\n```\n{picture}\n```\n{END}{after}"


PICTURES = {"README.md": layers, "CONTRIBUTING.md": whole}


def main() -> None:
    for name, draw in PICTURES.items():
        path = ROOT / name
        path.write_text(document(path.read_text(encoding="utf-8"), draw()), encoding="utf-8")


if __name__ == "__main__":
    main()
