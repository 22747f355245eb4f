"""The shape of the source tree: no circles of files, folders one can look over, a true picture."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.each import each
from tests.source.imports import Imports, imports_in, imports_of
from tests.test_generated_documents import drawing, read

SOURCE = Path(__file__).parents[2] / "src" / "expert"
MOST_FILES = 17
"""In one folder, without subfolders; 5 to 15 is the aim; cli has one for each command."""
LONGEST_FILE = 600
FORBIDDEN_NAMES = {"utils", "helpers", "misc", "common"}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def files() -> dict[str, Path]:
    found = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}
    assert len(found) > 100
    return found


def imported_files(statements: Imports, known: Iterable[str]) -> set[str]:
    """Modules among `known` that a file imports, inside functions and for types too."""
    known, found = set(known), set()
    for node in statements:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & known
        elif node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found |= {full if full in known else node.module} & known
    return found


def circle(imports: Mapping[str, set[str]]) -> list[str]:
    """Files that import each other in a circle; none where there is no circle."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_no_files_import_each_other_in_a_circle():
    known = files()
    imports = {
        name: imported_files(imports_of(path), known) - {name, "expert"}
        for name, path in known.items()
    }
    assert circle(imports) == []


def test_the_check_finds_a_circle_of_three_and_follows_imports_inside_functions():
    known = ("p.a", "p.b", "p.c")
    code = {
        "p.a": "def f():\n    from p import b",
        "p.b": "from p.c import x",
        "p.c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.b\nimport p.a",
    }
    imports = {name: imported_files(imports_in(text), known) for name, text in code.items()}
    assert set(circle(imports)) == {"p.a", "p.b", "p.c"}
    del imports["p.c"]
    assert circle(imports) == []


def test_a_class_name_means_one_thing():
    homes = defaultdict(list)
    for name, path in files().items():
        for found in re.findall(r"^class ([A-Za-z]\w*)", path.read_text("utf-8"), re.MULTILINE):
            homes[found].append(name)
    assert {found: where for found, where in homes.items() if len(where) > 1} == {}


def folders() -> list[Path]:
    return sorted({path.parent for path in SOURCE.rglob("*.py")} - {SOURCE})


@each("folder", folders(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_folder_says_what_it_is_for_and_can_be_looked_over(folder: Path):
    found = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    many = len(found) > MOST_FILES and folder.name != "cli"
    assert not many, f"{len(found)} files: make it two folders"
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
    assert not FORBIDDEN_NAMES & {path.stem for path in found}


def test_a_file_is_one_thing():
    sizes = {name: len(path.read_text("utf-8").splitlines()) for name, path in files().items()}
    assert {name: lines for name, lines in sizes.items() if lines > LONGEST_FILE} == {}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_the_picture_of_the_tree_is_what_the_tree_is(name: str):
    draw = drawing("draw_tree")
    assert read(name) == draw.document(read(name), draw.PICTURES[name]()), (
        "run .venv/bin/python docs/draw_tree.py"
    )
