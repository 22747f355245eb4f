"""Scripts outside the package, which mypy does not check, import only names that exist."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
FOLDERS = ("benchmarks", "recipes", "experts", "docs")


@cache
def names_of(module: Path) -> frozenset[str]:
    """Names bound at the top level of a module, including branches."""
    bound: set[str] = set()
    inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    left: list[ast.AST] = [*ast.parse(module.read_text(encoding="utf-8")).body]
    while left:
        node = left.pop()
        if isinstance(node, inner):
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {each.asname or each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        else:
            left += ast.iter_child_nodes(node)
    return frozenset(bound)


def absent(tree: ast.Module) -> Iterator[str]:
    """Names that a script imports from the package although they do not exist."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "expert":
            continue
        folder = SOURCE.joinpath(*(node.module or "").split("."))
        file = folder.with_suffix(".py") if not folder.is_dir() else folder / "__init__.py"
        for name in (each.name for each in node.names):
            inside = (folder / f"{name}.py").is_file() or (folder / name).is_dir()
            if not inside and (not file.is_file() or name not in names_of(file)):
                yield f"line {node.lineno}: {node.module}.{name}"


def test_scripts_import_only_what_the_package_has():
    scripts = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(scripts) > 30
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in scripts}
    wrong = [f"{p.relative_to(ROOT)}: {each}" for p, tree in trees.items() for each in absent(tree)]
    assert wrong == []


def test_the_check_finds_a_name_and_a_module_that_are_gone():
    code = "from expert.core.files import read_json, gone\nfrom expert.core import files, nothing\n"
    assert list(absent(ast.parse(code))) == [
        "line 1: expert.core.files.gone",
        "line 2: expert.core.nothing",
    ]
