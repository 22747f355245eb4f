"""The house grows no further: lines in all, and what each command imports (pytest -s prints it)."""

from __future__ import annotations

from pathlib import Path

from tests.source.imports import imports_of
from tests.source.test_tree import SOURCE, files, imported_files

MOST_SOURCE_LINES = 66_700
MOST_TEST_LINES = 48_470
MOST_LINES_OF_TRAIN = 41_300
TESTS = Path(__file__).parents[1]


def lines_in(paths: list[Path]) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def closure(command: str) -> list[Path]:
    """The files that a command imports, inside functions too, from its own file down."""
    known = files()
    waiting, found = [f"expert.cli.{command}"], set[str]()
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += imported_files(imports_of(known[name]), known) - {"expert"}
    return [known[name] for name in found]


def test_the_source_and_the_tests_keep_to_their_bounds():
    assert lines_in(list(SOURCE.rglob("*.py"))) <= MOST_SOURCE_LINES
    assert lines_in(list(TESTS.rglob("*.py"))) <= MOST_TEST_LINES


def test_training_imports_no_more_than_its_bound():
    commands = {path.stem for path in (SOURCE / "cli").glob("*.py")} - {"__init__", "app", "main"}
    sizes = {name: lines_in(closure(name)) for name in sorted(commands)}
    for name, lines in sizes.items():
        print(f"{name:12} {lines:7,}")  # noqa: T201 - what the table in CONTRIBUTING.md is made of
    assert sizes["train"] <= MOST_LINES_OF_TRAIN
