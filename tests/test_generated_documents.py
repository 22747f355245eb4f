"""Generated documents are up to date, and documents name only things that exist."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from expert.manifest.explain import explain
from tests.cli.running import Runner
from tests.command_blocks import ROOT, documents
from tests.each import each

REQUIREMENTS = ROOT / "docs" / "REQUIREMENTS.md"


def drawing(name: str) -> ModuleType:
    """Import a script of docs/, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # a dataclass looks its module up by name
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")  # as when the script is run
        spec.loader.exec_module(module)
    return module


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# --- made from the code --------------------------------------------------------------------------


def test_the_page_of_commands_is_what_the_commands_say():
    made = drawing("draw_cli").document()
    assert read("docs/CLI.md") == made, "run .venv/bin/python docs/draw_cli.py"


def test_every_option_that_help_shows_is_on_the_page_of_commands(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    run = Runner(capsys, monkeypatch)
    draw = drawing("draw_cli")
    for command in draw.commands():
        told = run(*command.name.split()[1:], "--help").out
        shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", told))
        assert "--help" in shown, told
        written = set(re.findall(r"--[a-z][a-z-]+", draw.described(command)))
        assert shown - {"--help"} <= written, command.name


def test_the_tables_of_the_format_are_what_the_schema_says():
    made = drawing("draw_format").document(read("docs/EXPERT_FORMAT.md"))
    assert read("docs/EXPERT_FORMAT.md") == made, "run .venv/bin/python docs/draw_format.py"


def test_every_key_is_in_the_tables_and_has_an_origin():
    draw = drawing("draw_format")
    tables = draw.made()
    for key in explain():
        assert f"| `{key.path.rpartition('.')[2]}` |" in tables, key.path
        assert draw.since(key.path) in draw.ORIGINS, key.path
    assert set(draw.named_keys()) <= {key.path for key in explain()}


def test_a_format_without_its_marks_is_not_touched():
    with pytest.raises(SystemExit, match=r"EXPERT_FORMAT\.md has no place for them"):
        drawing("draw_format").document("# The manifest\n")


# --- named in documents --------------------------------------------------------------------------


def rows_of_requirements() -> list[list[str]]:
    """The rows with requirement, command, keys, tests and state."""
    lines = [line for line in read("docs/REQUIREMENTS.md").splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    return [row for row in rows if len(row) == 5 and row[0] != "requirement"]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_requirement_has_a_state_and_names_what_there_is():
    known = {command.name for command in drawing("draw_cli").commands()}
    rows = rows_of_requirements()
    assert len(rows) >= 70
    for requirement, command, keys, tests, state in rows:
        assert state, requirement
        assert set(quoted(command)) <= known, requirement
        for key in quoted(keys):
            assert explain(key), requirement
        for test in quoted(tests):
            assert (ROOT / "tests" / test).exists(), f"{requirement}: {test}"


def test_a_requirement_that_is_done_has_a_test():
    for requirement, _, _, tests, state in rows_of_requirements():
        assert quoted(tests) or not state.startswith("done"), requirement


@each("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_document_leads_somewhere(document):
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def anchors(path: Path) -> set[str]:
    """The link anchors that GitHub makes of headings."""
    heads = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
