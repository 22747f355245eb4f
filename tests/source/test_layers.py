"""Layers import downwards only, and siblings do not know each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.each import each
from tests.source.imports import Imports, imports_in, imports_of

SOURCE = Path(__file__).parents[2] / "src" / "expert"
LAYERS = (
    ("core",),
    ("manifest",),
    ("planning",),
    ("data", "model", "parallel", "telemetry", "insight", "judging"),
    ("training", "answer"),
    ("run",),
    ("jobs",),
    ("cli",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FACE = "__init__.py"  # the package's own file, which shows what all layers have to offer
START = "__main__.py"  # where the commands start: above all layers


def modules() -> list[Path]:
    found = sorted(SOURCE.rglob("*.py"))
    assert len(found) > 20
    return found


def imported(statements: Imports) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported, inside functions too."""
    for node in statements:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        else:
            module = "." * node.level + (node.module or "")
            names = [f"{module}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, name) for name in names)


def upward(layer: str, statements: Imports) -> list[str]:
    """Imports that a module of `layer` may not have."""
    wrong = []
    for line, name in imported(statements):
        if name.startswith("."):
            wrong.append(f"line {line}: {name} is a relative import")
            continue
        package, _, rest = name.partition(".")
        if package != "expert":
            continue
        target = rest.partition(".")[0]
        if target == "__version__":
            continue
        if target not in LEVEL:
            wrong.append(f"line {line}: {name} is in no layer")
        elif target != layer and LEVEL[target] >= LEVEL.get(layer, len(LAYERS)):
            wrong.append(f"line {line}: {layer} imports {name}")
    return wrong


def test_every_folder_is_a_layer():
    folders = {path.relative_to(SOURCE).parts[0] for path in modules() if path.parent != SOURCE}
    assert folders
    assert folders <= set(LEVEL)
    assert {path.name for path in modules() if path.parent == SOURCE} <= {FACE, START}


@each("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_imports_only_its_own_layer_and_those_below(path: Path):
    layer = path.relative_to(SOURCE).parts[0]
    assert upward(layer, imports_of(path)) == []


@each(
    ("layer", "code", "allowed"),
    [
        ("manifest", "from expert.core.errors import Problem", True),
        ("manifest", "from expert.manifest.text.document import Item", True),
        ("manifest", "import expert.planning.machine.cards", False),
        ("manifest", "from expert import planning", False),
        ("core", "def f():\n    from expert.cli import main", False),
        ("data", "from expert.model import x", False),
        ("data", "from expert.data import x", True),
        ("jobs", "def f():\n    from expert.training.loop import train", True),
        ("cli", "from expert.jobs import train", True),
        ("cli", "from . import x", False),
        ("cli", "from expert.utils import x", False),
        ("core", "import expertise, json", True),
        ("cli", "from expert import __version__", True),
        (FACE, "from expert.cli import main", True),
        ("cli", "from expert import read_manifest", False),
    ],
)
def test_the_check_itself_tells_up_from_down(layer: str, code: str, allowed: bool):
    assert (upward(layer, imports_in(code)) == []) is allowed
